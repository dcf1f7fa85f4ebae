"""A callback that kills or stops a run at a named moment. The configurations of the harness name it."""

import io
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

PLAN = "LIT_EFFATTN_FAULT"
"""Environment variable with the path of the plan, a JSON file. Without the file the callback does nothing."""

STARTED = "LIT_EFFATTN_FAULT_STARTED"
"""Environment variable with the path of a file that is written when the fit starts."""


NOW, RELEASED = "now", "released"
"""Files beside the plan: the moment has come, which a run that is held writes, and the run may go on."""


def hold(plan: Path) -> None:
    """Wait at the moment of a plan until a signal was sent."""
    plan.with_name(NOW).touch()
    while not plan.with_name(RELEASED).exists():
        time.sleep(0.005)


class Fault(pl.Callback):
    """Acts once, when the moment of the plan comes. The plan is then renamed, so that the resumed run goes on.

    It also writes the log at every batch. A killed run then loses at most the values of its last step, and a value that
    is missing for another reason is noticed.

    A plan has the keys

    - act: "kill" (SIGKILL to all processes of the run), "term" (SIGTERM to the first process), "stop"
      (`trainer.should_stop`, as Lightning's `Timer` sets it), or "hold" (see `hold`);
    - moment: a hook (train_batch_start, train_batch_end, validation_batch_start, test_batch_start, predict_batch_start,
      train_epoch_end), sanity_check, or write (in the middle of writing a checkpoint), before_rename, after_rename;
    - epoch and, of a batch, batch; or file and nth: the n-th write of the checkpoint with that name;
    - term, if SIGTERM is sent before the act: its moment, epoch and batch. Writes are counted from there.
    """

    def __init__(self) -> None:
        self._path = Path(os.environ.get(PLAN, "none"))
        self._plan: dict[str, Any] = {}
        self._written = 0
        self._inside = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._path.is_file():
            self._plan = json.loads(self._path.read_text())
            if "file" in self._plan and "term" not in self._plan:
                self._patch()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if STARTED in os.environ and trainer.is_global_zero:
            Path(os.environ[STARTED]).write_text(str(trainer.num_training_batches))

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._at(trainer, moment="train_batch_start", batch=batch_idx)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._at(trainer, moment="train_batch_end", batch=batch_idx)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._at(trainer, moment="train_epoch_end")

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._at(
            trainer, moment="sanity_check" if trainer.sanity_checking else "validation_batch_start", batch=batch_idx
        )

    def on_test_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._at(trainer, moment="test_batch_start", batch=batch_idx)

    def on_predict_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._at(trainer, moment="predict_batch_start", batch=batch_idx)

    def _at(self, trainer: pl.Trainer, **now: Any) -> None:
        now["epoch"] = trainer.current_epoch
        place = self._plan.get("term", self._plan)
        if place and all(place.get(key, value) == value for key, value in now.items()):
            if "term" in self._plan:
                self._terminate(trainer)
            else:
                self._act(trainer)

    def _terminate(self, trainer: pl.Trainer) -> None:
        """Send SIGTERM; the act comes at a later write of a checkpoint."""
        del self._plan["term"]
        self._patch()
        if trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGTERM)

    def _act(self, trainer: pl.Trainer | None = None) -> None:
        act, self._plan = self._plan["act"], {}
        if act == "stop":  # on every process
            assert trainer is not None
            trainer.should_stop = True
        if trainer is None or trainer.is_global_zero:
            self._path.replace(self._path.with_suffix(".done"))
            if act == "hold":
                hold(self._path)
            elif act == "kill":
                os.killpg(0, signal.SIGKILL)
            elif act == "term":
                os.kill(os.getpid(), signal.SIGTERM)

    # ----------------------------------------------------------------------------------- while a checkpoint is written

    def _patch(self) -> None:
        if self._plan["moment"] == "write":
            torch.save = self._half(torch.save)
        else:
            Path.replace = self._around(Path.replace)
            os.replace = self._around(os.replace)

    def _nth(self, name: str) -> bool:
        """Count the writes of the file of the plan; return whether this one is due."""
        if not self._plan or self._plan["file"] not in name:
            return False
        self._written += 1
        return self._written == self._plan["nth"]

    def _half(self, save: Callable[..., None]) -> Callable[..., None]:
        def half(content: Any, file: Any, *args: Any, **options: Any) -> None:
            if not self._nth(str(getattr(file, "name", file))):
                return save(content, file, *args, **options)
            whole = io.BytesIO()
            save(content, whole, *args, **options)
            with open(file, "wb") if isinstance(file, (str, Path)) else file as opened:  # noqa: PTH123
                opened.write(whole.getvalue()[: whole.tell() // 2])
                opened.flush()
                return self._act()

        return half

    def _around(self, replace: Callable[..., Any]) -> Callable[..., Any]:
        def around(path: Any, target: Any, *args: Any, **options: Any) -> Any:
            outer = not self._inside  # `Path.replace` calls `os.replace`: the outer of the two counts
            due = outer and self._nth(Path(target).name)
            if due and self._plan["moment"] == "before_rename":
                self._act()
            self._inside = True
            try:
                result = replace(path, target, *args, **options)
            finally:
                self._inside = not outer
            if due:
                self._act()
            return result

        return around
