"""Saving and restoring of the random states in checkpoints."""

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_effattn.callbacks.lightning_internals import is_within_epoch
from lit_effattn.checkpoints.folders import gathered
from lit_effattn.distributed.sharding import heads_of

RANDOM_STATES_KEY = "random_states"


class RandomStates(pl.Callback):
    """Saves the random state of every process (Python, NumPy, torch, its GPU), and restores it on resuming.

    Dropout thus continues its random sequence, and a resumed run equals an uninterrupted one. A validation does not
    change the states, so training does not depend on the number of validations. With another number of processes, each
    process starts from its own seed, with a warning. Every `Task` adds this callback, unless the trainer has one.

    Args:
        restore: Whether to restore the states; False if the user asked for another seed.
    """

    def __init__(self, restore: bool = True) -> None:
        self.restore = restore
        self._loaded: dict[str, Any] | None = None  # until the first batch
        self._begins_epoch = False  # whether the run resumes with the first batch of an epoch
        self._before_validation: dict[str, Any] | None = None  # while a validation runs

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forget states of an earlier run that were not restored. A checkpoint is loaded after this."""
        self._loaded = self._before_validation = None

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Gather the states of all processes. This hook is called on every process, unlike `state_dict`."""
        local = self._loaded or self._before_validation or _capture(pl_module.device)
        checkpoint[RANDOM_STATES_KEY] = [local] if trainer.world_size == 1 else gathered(local)

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Read this process's state from the checkpoint."""
        states = checkpoint.get(RANDOM_STATES_KEY)
        if not self.restore or states is None or trainer.state.fn != TrainerFn.FITTING:
            return
        if len(states) == trainer.world_size:
            heads = heads_of(trainer)  # processes that share the heads of a model draw the same numbers
            self._loaded = states[trainer.global_rank // heads * heads]
        else:
            rank_zero_warn(
                f"The checkpoint was saved by {len(states)} processes and is resumed by {trainer.world_size}: random "
                "states start from the seed again, and the run won't repeat the uninterrupted one exactly."
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the state before an epoch begins: a loader without a `generator` draws from torch's."""
        if self._loaded is not None:
            _restore(self._loaded, torch.device("cpu"))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note whether an epoch begins. Within one, its loader has drawn before the state was saved."""
        self._begins_epoch = not is_within_epoch(trainer)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Restore the state before the first batch, since setting up loaders and progress bars draws numbers too."""
        if self._loaded is not None:
            drawn = {"torch": torch.get_rng_state()} if self._begins_epoch else {}
            _restore({**self._loaded, **drawn}, pl_module.device)
            self._loaded = None

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the state. A run that resumes with a validation restores it first."""
        if not trainer.sanity_checking:
            self.on_train_batch_start(trainer, pl_module)
            self._before_validation = _capture(pl_module.device)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the state from before the validation."""
        if self._before_validation is not None:
            _restore(self._before_validation, pl_module.device)
            self._before_validation = None


def _capture(device: torch.device) -> dict[str, Any]:
    """Return the states in plain containers, which load with `weights_only=True`."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 (libraries use the global generator)
    states = {
        "python": [version, list(internal), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _restore(states: dict[str, Any], device: torch.device) -> None:
    try:
        version, internal, gauss = states["python"]
        random.setstate((version, tuple(internal), gauss))
        kind, keys, position, has_gauss, cached = states["numpy"]
        if not 0 <= position <= len(keys):  # NumPy would read outside of its memory
            raise ValueError(f"position {position} of {len(keys)}")
        np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
        torch.set_rng_state(states["torch"])
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], device)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"the random states of the checkpoint can't be restored ({reason})") from error
