"""Reading and writing folders of Hugging Face weights. Nothing is unpickled, and nothing is downloaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_effattn.datamodules.common.json_data import parse_json

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_METADATA = {"format": "pt"}
"""What transformers asks of a file."""


def read_json(folder: Path, name: str, remedy: str) -> dict[str, Any]:
    """Read an object of JSON.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{folder} has no {name}: {remedy}")
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder, from one file or those that its index lists.

    Raises:
        ValueError: the weights are missing, damaged, of another format, or not those that the index lists.
    """
    need_safetensors()
    if (folder / _WEIGHTS).is_file():
        return _read(folder / _WEIGHTS)
    if not (folder / _INDEX).is_file():
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        if pickles:
            raise ValueError(
                f"{folder} has its weights as a pickle ({pickles[0]}), which can run code and is never read: get "
                f"{_WEIGHTS}, or where you trust the file, save it with transformers' save_pretrained"
            )
        raise ValueError(f"{folder} has neither {_WEIGHTS} nor {_INDEX}: get the weights of the model")
    places = read_json(folder, _INDEX, "get it").get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) and _is_name(file) for file in places.values()):
        raise ValueError(f"{folder / _INDEX} has no weight_map of names of tensors to names of files in its folder")
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(places.values())):
        if not (folder / file).is_file():
            raise ValueError(f"{folder} has no {file}, which {_INDEX} lists: get the missing part")
        tensors |= _read(folder / file)
    if tensors.keys() != places.keys():
        first = min(tensors.keys() ^ places.keys())
        raise ValueError(f"{folder}: the files do not hold the tensors that {_INDEX} lists, such as {first}")
    return tensors


def size_of_tensors(folder: Path) -> tuple[int, int]:
    """Return the number of bytes and of tensors in a folder's files of safetensors, without reading them."""
    from safetensors import SafetensorError, safe_open

    n_bytes = n_tensors = 0
    for path in folder.glob("*.safetensors"):
        if path.is_file():
            with suppress(SafetensorError), safe_open(path, "pt") as file:  # `read_tensors` names the damage
                n_bytes, n_tensors = n_bytes + path.stat().st_size, n_tensors + len(file.keys())
    return n_bytes, n_tensors


def _is_name(file: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*\.safetensors", file) is not None


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no file of safetensors: {error}") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.bool):
            raise ValueError(f"{path}: {name} has the type {tensor.dtype}; quantised weights are not supported")
    return tensors


def write_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors, each to memory of its own, into one file."""
    need_safetensors()
    from safetensors.torch import save_file

    save_file(
        {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, folder / _WEIGHTS, _METADATA
    )


def need_safetensors() -> None:
    """Check that safetensors is installed.

    Raises:
        ValueError: it is not.
    """
    if find_spec("safetensors") is None:
        raise ValueError("convert needs the package safetensors: pip install 'lit-effattn[pretrained]'")
