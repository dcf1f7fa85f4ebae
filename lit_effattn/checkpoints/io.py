"""Atomic writing and safe reading of checkpoints, and relative paths in them."""

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lit_effattn.checkpoints.files import DamagedError, explained, put, read, remove, unfinished, write
from lit_effattn.checkpoints.folders import Parts, read_whole
from lit_effattn.checkpoints.runs import LAST, PREVIOUS, is_checkpoint, short
from lit_effattn.checkpoints.shape import check_weights
from lit_effattn.checkpoints.shipped import SUFFIX, model_path
from lit_effattn.checkpoints.weights_files import read_weights_file


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint under a temporary name and renames it when it is complete.

    A crash or a full disk while saving leaves the checkpoint of that name intact. A new `last.ckpt` turns the old one
    into `previous.ckpt`.

    With `asynchronous` a thread writes a copy while training continues. Files are written and deleted in the order of
    the calls, so an older checkpoint is deleted only after the newer one is complete. A call waits while two
    checkpoints are unfinished. After an error nothing more is written or deleted, and the next call raises the error.

    Args:
        read: Reads a checkpoint. Default: `read_checkpoint`.
        asynchronous: Whether training continues while a checkpoint is written. The copy needs as much CPU memory as the
            checkpoint; at most two exist at a time.
    """

    def __init__(self, read: Callable[[Path], dict[str, Any]] | None = None, asynchronous: bool = False) -> None:
        super().__init__()
        self.reads_otherwise = read is not None
        self._read = read or read_checkpoint
        self.asynchronous = asynchronous
        self._thread: ThreadPoolExecutor | None = None
        self._unfinished: deque[tuple[Future[None], bool]] = deque()  # of each call, and whether it writes

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write `checkpoint` to `path`.

        Raises:
            OSError: If the file could not be written, for example because the disk is full. With `asynchronous`, the
                error may be an earlier call's.
        """
        if not self.asynchronous:
            self._write(checkpoint, Path(path))
            return
        self._wait(until=1)
        self._in_order(self._write, _copy(checkpoint), Path(path), writes=True)

    def _write(self, checkpoint: dict[str, Any], path: Path) -> None:
        part = unfinished(path)
        try:
            with explained(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                write(checkpoint, part)
                put(part, path)
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint, a file or a folder."""
        if self.asynchronous:
            self._in_order(remove, Path(path))
        else:
            remove(Path(path))

    def _in_order(self, function: Callable[..., None], *args: Any, writes: bool = False) -> None:
        """Have the thread call `function` after the previous call, unless that fails."""
        before = self._unfinished[-1][0] if self._unfinished else None

        def call() -> None:
            if before is not None:
                before.result()
            function(*args)

        self._thread = self._thread or ThreadPoolExecutor(1, "checkpoints")
        self._unfinished.append((self._thread.submit(call), writes))

    def _wait(self, until: int) -> None:
        """Wait until at most `until` checkpoints are unfinished; raise the error of a call that failed."""
        while self._unfinished:
            first = self._unfinished[0][0]
            if not first.done() and until and sum(writes for _, writes in self._unfinished) <= until:
                return
            first.result()
            self._unfinished.popleft()

    def finish(self) -> None:
        """Wait until all checkpoints are written.

        Raises:
            OSError: If one could not be written.
        """
        self._wait(until=0)

    def teardown(self) -> None:
        """Finish, and end the thread."""
        try:
            self.finish()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._thread = None
            self._unfinished.clear()

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """Read a checkpoint to the CPU: plain containers of tensors only.

        Raises:
            ValueError: If `weights_only=False`, which would execute code from the file.
        """
        if weights_only is False:
            raise ValueError(f"weights_only=False would run code from {path}: leave it out")
        self.finish()
        return self._read(Path(path))


def _copy(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Copy a checkpoint to the CPU. Tensors that share memory, such as tied weights, share it in the copy."""
    copies: dict[int, Tensor] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    for t in tree_leaves(checkpoint):
        if isinstance(t, Tensor):
            storage = t.untyped_storage()
            if storage._cdata not in storages:
                storages[storage._cdata] = storage.clone() if storage.device.type == "cpu" else storage.cpu()
            copied = torch.empty(0, dtype=t.dtype)
            copies[id(t)] = copied.set_(storages[storage._cdata], t.storage_offset(), t.size(), t.stride())
    return deepcopy(checkpoint, copies)


def read_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint with plain containers of tensors. Nothing in it is executed.

    The checksums (CRC-32) of all its parts are verified first; an exported safetensors file has none. The parts of a
    folder, which the processes of a sharded run have written, are put together. `model:NAME` is a shipped model.

    Raises:
        FileNotFoundError: If there is none.
        DamagedError: If it is cut off, changed, or not a checkpoint. It is a ValueError.
    """
    return _read(model_path(path), lambda folder: read_whole(folder, map_location), map_location)


def read_outline(path: str | Path, *, verify: bool = False) -> dict[str, Any]:
    """Read a checkpoint as `read_checkpoint` does; of a folder, only the content that all processes have in common.

    The common content lacks the carried memories and the values of divided tensors, whose device is `meta`. All parts
    must exist and have their lengths; their checksums are verified if `verify` is True.

    Raises:
        FileNotFoundError: If there is none.
        DamagedError: If it is cut off, changed, or not a checkpoint.
    """

    def of_folder(folder: Path) -> dict[str, Any]:
        parts = Parts(folder)
        if verify:
            for rank in range(len(parts)):
                parts[rank]  # is verified when it is read
        return parts.common

    return _read(model_path(path), of_folder)


def _read(path: Path, read_folder: Callable[[Path], dict[str, Any]], map_location: Any = "cpu") -> dict[str, Any]:
    if not is_checkpoint(path):
        raise FileNotFoundError(f"there is no checkpoint {path}")
    if path.is_dir():
        checkpoint = read_folder(path)
    else:
        checkpoint = (read_weights_file if path.suffix == SUFFIX else read)(path, map_location)
    if "state_dict" not in checkpoint:
        raise DamagedError(f"{path} is not a Lightning checkpoint: it has no `state_dict`")
    try:
        check_weights(checkpoint["state_dict"])
    except ValueError as error:
        raise DamagedError(f"{path} can't be read as a checkpoint: {error}") from error
    return checkpoint


def read_intact(checkpoint: Path, *, training: bool, verify: bool) -> tuple[Path, dict[str, Any]]:
    """Read a checkpoint without its tensors; if training resumes from a damaged `last.ckpt`, read `previous.ckpt`.

    Processes that a command starts do not `verify` all parts: they use the checkpoint that the command has read.
    Processes that another program starts (torchrun) each verify the same files.

    Returns:
        The path of the checkpoint that was read, and its content.

    Raises:
        DamagedError: If the checkpoint is damaged.
    """
    previous, damaged = checkpoint.with_name(PREVIOUS), ""
    try:
        content = read_outline(checkpoint, verify=verify)
    except DamagedError as error:
        if not training or checkpoint.name != LAST or not is_checkpoint(previous):
            raise DamagedError(f"{error}; name another checkpoint") from error
        try:
            content = read_outline(previous, verify=True)
        except DamagedError:
            raise DamagedError(f"{error}, and so is {PREVIOUS}; name another checkpoint") from error
        checkpoint, damaged = previous, f"{error}. "
    last = checkpoint.with_name(LAST)
    if training and checkpoint == previous and (damaged or not last.exists()):
        rank_zero_warn(
            f"{damaged or f'there is no {short(last)}. '}Training goes on from {short(previous)}, saved at step "
            f"{content.get('global_step')}: later steps are trained again"
        )
    return checkpoint, content


def saved_model(checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the spec of the model in `checkpoint`, from its `hyper_parameters`; None if it has none.

    The spec is not checked yet.
    """
    arguments = checkpoint.get("hyper_parameters")
    if not isinstance(arguments, dict) or "_class_path" not in arguments:
        return None
    init_args = {name: value for name, value in arguments.items() if name not in ("_class_path", "_instantiator")}
    return {"class_path": arguments["_class_path"], "init_args": init_args}


_SETTINGS = ("hyper_parameters", "datamodule_hyper_parameters", "optimizer_states", "lr_schedulers")
_PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")


def hide_folders(checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
    """Make the callbacks' paths of checkpoint files relative to their folders, and these relative to the run's folder.

    A checkpoint that is given away then contains no user's name, and a run can be moved. `own_folders` undoes it.
    Settings become plain values. Arguments of the data module that can't be are left out, with a warning.
    """
    for name in checkpoint.keys() & {*_SETTINGS}:
        checkpoint[name] = without_folders(checkpoint[name])
    of_data = checkpoint.get("datamodule_hyper_parameters", {})
    if foreign := [name for name, value in of_data.items() if not _is_plain(value)]:
        rank_zero_warn(
            f"checkpoints leave out the data module's {', '.join(foreign)}: reading them would run code; to stop this "
            "warning, leave them out of save_hyperparameters (ignore=…)"
        )
        checkpoint["datamodule_hyper_parameters"] = {n: value for n, value in of_data.items() if n not in foreign}
    root = Path(trainer.default_root_dir).resolve()
    for folder, state in _checkpoint_states(checkpoint, trainer):
        state["dirpath"] = str(folder.relative_to(root)) if folder.is_relative_to(root) else str(folder)
        _map_paths(state, lambda path, folder=folder: _inside(folder, path))


def without_folders(settings: Any) -> Any:
    """Return `settings` with NumPy's numbers as Python's, and paths as texts, relative if in the current folder."""
    if type(settings) is dict:
        return {name: without_folders(value) for name, value in settings.items()}
    if type(settings) in (list, tuple):
        return type(settings)(map(without_folders, settings))
    if isinstance(settings, (np.generic, Path)):
        settings = settings.item() if isinstance(settings, np.generic) else str(settings)
    return short(settings) if isinstance(settings, str) and Path(settings).is_absolute() else settings


def _is_plain(value: Any) -> bool:
    """Return whether a checkpoint with `value` can be read."""
    if type(value) in (dict, list, tuple):
        return all(map(_is_plain, [*value.keys(), *value.values()] if type(value) is dict else value))
    return value is None or type(value) in (bool, int, float, str) or isinstance(value, Tensor)


def own_folders(checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
    """Keep the callbacks' paths of checkpoint files that are inside their own folders of this run; drop all others.

    Lightning deletes the file, or folder, that a checkpoint names as the worst of the best. Therefore a path that leads
    elsewhere, also by links or dots, is dropped.
    """
    root = Path(trainer.default_root_dir).resolve()
    same_run = trainer.ckpt_path is not None and Path(trainer.ckpt_path).resolve().is_relative_to(root)
    known = set()
    for folder, state in _checkpoint_states(checkpoint, trainer):
        known.add(id(state))
        before = state.get("dirpath")
        if same_run and isinstance(before, str) and (root / before).resolve() == folder:
            state["dirpath"] = str(folder)  # what Lightning compares with
        _map_paths(state, lambda path, folder=folder: str(folder / inside) if (inside := _inside(folder, path)) else "")
    for state in _states(checkpoint).values():
        if isinstance(state, dict) and id(state) not in known:
            _map_paths(state, lambda path: "")


def _checkpoint_states(checkpoint: dict[str, Any], trainer: pl.Trainer) -> list[tuple[Path, dict[str, Any]]]:
    """Return copies of the states of the trainer's checkpoint callbacks, each with the folder that it writes to."""
    states, copies = _states(checkpoint), []
    for callback in trainer.checkpoint_callbacks:
        folder, state = getattr(callback, "dirpath", None), states.get(callback.state_key)
        if folder is not None and "://" not in str(folder) and isinstance(state, dict):
            states[callback.state_key] = state = dict(state)
            copies.append((Path(folder).resolve(), state))
    return copies


def _states(checkpoint: dict[str, Any]) -> dict[str, Any]:
    states = checkpoint.get("callbacks")
    return states if isinstance(states, dict) else {}


def _map_paths(state: dict[str, Any], change: Any) -> None:
    """Apply `change` to all paths in a checkpoint callback's state; it returns "" for those to drop."""
    worst = state.get("kth_best_model_path")
    for name in state.keys() & set(_PATHS):
        state[name] = change(state[name])
    if "best_k_models" in state:
        scores = state["best_k_models"] if isinstance(state["best_k_models"], dict) else {}
        state["best_k_models"] = {changed: score for path, score in scores.items() if (changed := change(path))}
        if worst and state["kth_best_model_path"] not in state["best_k_models"]:
            state["kth_best_model_path"], state["best_k_models"] = "", {}  # Lightning would not find it


def _inside(folder: Path, path: Any) -> str:
    """Return `path` relative to `folder`; "" if, with links and dots resolved, it is not inside `folder`."""
    if not isinstance(path, str) or not path:
        return ""
    resolved = (folder / path).resolve()
    return str(resolved.relative_to(folder)) if folder in resolved.parents else ""
