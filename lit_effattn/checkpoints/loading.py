"""Building a trained model from its checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn

from lit_effattn.checkpoints.averaging import average_parameters
from lit_effattn.checkpoints.build import Allowed, build
from lit_effattn.checkpoints.io import read_checkpoint, saved_model
from lit_effattn.checkpoints.model_size import model_of, size_of
from lit_effattn.checkpoints.own_runs import own_classes
from lit_effattn.checkpoints.runs import last_kept, short
from lit_effattn.checkpoints.shape import differences
from lit_effattn.checkpoints.shipped import model_path
from lit_effattn.checkpoints.trust import Trust

M = TypeVar("M", bound=pl.LightningModule)


def load_model(
    kind: type[M],
    path: Path,
    *,
    map_location: Any = None,
    strict: bool | None = None,
    trust: Sequence[str | type | ModuleType] = (),
    average: int | None = None,
    arguments: Mapping[str, Any] | None = None,
    content: dict[str, Any] | None = None,
) -> M:
    """Build the model of a checkpoint, with its weights: see `Task.load_from_checkpoint`.

    The model is of the class `kind`, which the checkpoint may name, or of one derived from it. `arguments` replace
    those in the file, whose `content` is given if it has been read.
    """
    location = map_location or _same_device
    path = model_path(path)
    paths = [path] if average is None else last_kept(path, average)
    path = paths[-1]
    checkpoint = content if content is not None and average is None else read_checkpoint(path, location)
    model = build_model(kind, path, checkpoint, trust, arguments)
    if average is not None:
        average_parameters(checkpoint, paths, model, location)
    model.on_load_checkpoint(checkpoint)
    model.load_state_dict(checkpoint["state_dict"], strict=model.strict_loading if strict is None else strict)
    tensors = [value for value in checkpoint["state_dict"].values() if isinstance(value, Tensor)]
    return model.to(tensors[0].device) if tensors else model


def build_model(
    kind: type[M],
    path: Path,
    content: Mapping[str, Any],
    trust: Sequence[str | type | ModuleType] = (),
    arguments: Mapping[str, Any] | None = None,
) -> M:
    """Build the model that the content of a checkpoint describes, without its weights: see `load_model`."""
    spec = saved_model(content)
    with model_of(short(path), *size_of(path)):
        if spec is None:
            try:
                return kind(**(arguments or {}))
            except TypeError as error:
                raise ValueError(f"{short(path)} does not describe its model: {error}") from error
        model: M = build(spec, kind, "model", allowed_in(path, [*trust, kind]), **(arguments or {}))
        return model


def allowed_in(path: Path, trust: Sequence[str | type | ModuleType] = ()) -> Allowed:
    """Return the classes that a checkpoint may name: if it is of a run of the user's, also those of that run."""
    return Allowed(short(path), Trust([*trust, *own_classes(path)]))


def _same_device(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """Keep a tensor on its device if that device is available; otherwise use the CPU."""
    available = location == "cpu" or (location.startswith("cuda") and torch.cuda.is_available())
    return None if available else storage.cpu()


class OtherModelError(ValueError):
    """The parameters of a checkpoint have other names or shapes than those of the model."""

    def __init__(self, difference: str) -> None:
        super().__init__(
            f"{difference}. A run brings its own configuration: leave out the options that change the model's shape"
        )
        self.difference = difference


def check_same_model(model: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Check that a checkpoint has the parameters and buffers of `model`, with the same shapes.

    Raises:
        OtherModelError: If names or shapes differ. The message names the first differences.
    """
    different = [
        f"{name} is {saved} in the checkpoint, {expected} here"
        for name, expected, saved in differences(model.state_dict(), checkpoint["state_dict"])
    ]
    if not different:
        return
    more = f" (and {len(different) - 3} more)" if len(different) > 3 else ""
    raise OtherModelError(
        f"the checkpoint holds another model than this {type(model).__name__}: {'; '.join(different[:3])}{more}"
    )


def check_finite(model: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Raise ValueError if parameters in a checkpoint are infinite or NaN: every result would be. Buffers may be."""
    weights = {name: checkpoint["state_dict"].get(name) for name, _ in model.named_parameters()}
    failed = [name for name, t in weights.items() if isinstance(t, Tensor) and not t.is_meta and not t.isfinite().all()]
    if failed:
        more = f" and {len(failed) - 1} more parameters" if len(failed) > 1 else ""
        raise ValueError(f"the checkpoint's {failed[0]}{more} are infinite or NaN; use an earlier checkpoint")


def check_not_averaged(checkpoint: Mapping[str, Any], callbacks: Sequence[pl.Callback]) -> None:
    """Raise ValueError if training would resume from a moving average in place of the weights that it is of.

    Lightning's `WeightAveraging` saves the average as the model's weights, and restores both.
    """
    if "current_model_state" in checkpoint and not any(isinstance(c, WeightAveraging) for c in callbacks):
        raise ValueError(
            "the checkpoint's weights are the average of EMAWeightAveraging or another WeightAveraging, which this run "
            "lacks; resume with that callback, or begin a new run from the average with --init_weights"
        )
