"""Reading and writing folders of Hugging Face weights, without pickles and downloads."""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_effattn.datamodules.common.json_data import parse_json

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FILE = re.compile(r"[\w-][\w.-]*\.safetensors")  # files that an index may name: in the same folder
_METADATA = {"format": "pt"}  # metadata that transformers requires


def read_json(folder: Path, name: str, remedy: str) -> dict[str, Any]:
    """Read a JSON object. If the file is missing, the message ends with `remedy`.

    Raises:
        ValueError: If the file is missing, or holds something else.
    """
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{folder} has no {name}: {remedy}")
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, but holds a {type(content).__name__}")
    return content


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder, from one file or from the files in its index.

    Raises:
        ValueError: If weights are missing, damaged, of another format, or differ from the index.
    """
    if (folder / _WEIGHTS).is_file():
        return _read(folder / _WEIGHTS)
    if not (folder / _INDEX).is_file():
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        if pickles:
            raise ValueError(
                f"{folder} has its weights as a pickle ({pickles[0]}), which can run code and is never read: get "
                f"{_WEIGHTS}, or, if you trust the file, save it with transformers' save_pretrained"
            )
        raise ValueError(f"{folder} has neither {_WEIGHTS} nor {_INDEX}: get the weights of the model")
    files = read_json(folder, _INDEX, "get it").get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(f, str) and _FILE.fullmatch(f) for f in files.values()):
        raise ValueError(f"{folder / _INDEX} has no weight_map from names of tensors to names of files in its folder")
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        if not (folder / file).is_file():
            raise ValueError(f"{folder} has no {file}, which {_INDEX} lists: get the missing part")
        tensors |= _read(folder / file)
    if tensors.keys() != files.keys():
        first = min(tensors.keys() ^ files.keys())
        raise ValueError(f"{folder}: {_INDEX} and the files list different tensors, such as {first}")
    return tensors


def size_of_tensors(folder: Path) -> tuple[int, int]:
    """Return the number of bytes and of tensors in a folder's safetensors files, without reading the tensors."""
    from safetensors import SafetensorError, safe_open

    n_bytes = n_tensors = 0
    for path in folder.glob("*.safetensors"):
        if path.is_file():
            with suppress(SafetensorError), safe_open(path, "pt") as file:  # `read_tensors` reports damage
                n_bytes, n_tensors = n_bytes + path.stat().st_size, n_tensors + len(file.keys())
    return n_bytes, n_tensors


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not in the safetensors format: {error}") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.bool):
            raise ValueError(f"{path}: {name} has the type {tensor.dtype}; quantised weights are not supported")
    return tensors


def write_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors to one file, without shared memory."""
    from safetensors.torch import save_file

    save_file({name: t.detach().clone().contiguous() for name, t in tensors.items()}, folder / _WEIGHTS, _METADATA)
