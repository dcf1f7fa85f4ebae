"""Checkpoints as safetensors files: the weights, and metadata with what a checkpoint says of its model and run.

Training can't resume from such a file, which has no optimiser state. All other commands read it as a checkpoint.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lit_effattn.checkpoints.files import DamagedError
from lit_effattn.checkpoints.shape import check_plain, wrong
from lit_effattn.checkpoints.shipped import METADATA, metadata
from lit_effattn.hparams import subclasses

_VERSION = "pytorch-lightning_version"
_OF_RUN = ("epoch", "global_step", _VERSION, "logged", "datamodule_hyper_parameters")
"""Parts of a checkpoint that are kept, beside its model and the state of its data."""


def write_weights_file(
    path: Path,
    weights: Mapping[str, Tensor],
    model: dict[str, Any],
    version: str,
    saved: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    card: Mapping[str, Any] | None = None,
) -> None:
    """Write the weights of a model, and its spec, into a file that `read_weights_file` reads.

    Of `saved`, a checkpoint of the model, the counters, last metrics and state of the data are kept. Floating-point
    weights get the type `dtype`. `card` is what `lit-effattn models` shows of a shipped model.

    Raises:
        ValueError: If a weight is too large for `dtype`.
    """
    from safetensors.torch import save_file

    data = [kind.__qualname__ for kind in subclasses(pl.LightningDataModule)]
    kept = {name: saved[name] for name in (*_OF_RUN, *data) if name in saved} if saved else {}
    about = {"version": version, "model": model, "checkpoint": kept, **({} if card is None else {"card": card})}
    path.touch()
    mode = path.stat().st_mode  # safetensors lets the owner alone read its files
    save_file(
        {name: _converted(name, t, dtype) for name, t in weights.items()},
        path,
        {"format": "pt", METADATA: json.dumps(about, ensure_ascii=False, default=_as_json)},
    )
    path.chmod(mode)


def _converted(name: str, t: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a copy without shared memory, of another type if `t` is of floating-point numbers."""
    if dtype is None or not t.is_floating_point():
        return t.detach().clone().contiguous()
    converted = t.detach().to(dtype, copy=True).contiguous()
    if bool((converted.isinf() & t.isfinite()).any()):
        raise ValueError(f"dtype={str(dtype).removeprefix('torch.')}: {name} has values that are too large for it")
    return converted


_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.int64)}


def _as_json(value: Any) -> dict[str, Any]:
    """Return a tensor of the state of the data, such as statistics, as plain data."""
    if isinstance(value, Tensor) and value.dtype in _DTYPES.values():
        return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    raise TypeError(f"{type(value).__name__} can't be written to a safetensors file's metadata")


def _from_json(value: Any) -> Any:
    """Undo `_as_json` in a tree."""
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != {"tensor", "dtype"}:
        return {name: _from_json(item) for name, item in value.items()}
    try:
        return torch.tensor(value["tensor"], dtype=_DTYPES[value["dtype"]])
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"a tensor in its metadata is invalid: {error}") from error


def read_weights_file(path: Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a file as a checkpoint, to the CPU if `map_location` is not a device.

    Nothing in it is executed; the format has no checksums.

    Raises:
        DamagedError: If the file is cut off or damaged, or another program wrote it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    device = map_location if isinstance(map_location, (str, torch.device)) else "cpu"
    try:
        about = metadata(path)
        check_plain(about)
        model, kept = about["model"], about.get("checkpoint", {})
        arguments = model.get("init_args") or {}
        for name, part in (("model.init_args", arguments), ("checkpoint", kept)):
            if not isinstance(part, dict):
                raise wrong(name, part, "a mapping")
        kept = _from_json(kept)
        weights = load_file(path, device=str(device))
    except (SafetensorError, ValueError) as error:
        raise DamagedError(f"{path} can't be read as a checkpoint: {error}") from error
    return {
        _VERSION: pl.__version__,
        **kept,
        "state_dict": weights,
        "hyper_parameters": {"_class_path": model["class_path"], **arguments},
    }
