"""The base class of tasks: the steps, the optimiser, and checkpoints from which the model can be rebuilt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau as TorchReduceLROnPlateau

from lit_effattn import sequence
from lit_effattn.callbacks.lightning_internals import epoch_is_whole
from lit_effattn.checkpoints.allowlist import INSTANTIATOR
from lit_effattn.checkpoints.io import hide_folders, own_folders
from lit_effattn.checkpoints.loading import check_same_model, load_model
from lit_effattn.checkpoints.runs import short
from lit_effattn.distributed import sharding
from lit_effattn.hparams import HasInitArgs, init_args
from lit_effattn.sequence import State, parts
from lit_effattn.tasks.metrics import Count

if TYPE_CHECKING:
    from typing_extensions import Self


class Objective(NamedTuple):
    """The result of `Task.objective`.

    Attributes:
        loss: The scalar to minimise.
        figures: Values to log by name, detached.
        state: The state of the backbone after the batch, detached, if the batch went on from a memory.
    """

    loss: Tensor
    figures: dict[str, Tensor]
    state: State | None = None


def check_backbone(backbone: Any) -> None:
    """Refuse what is no module that mixes a sequence."""
    if isinstance(backbone, type) or not (hasattr(backbone, "causal") and hasattr(backbone, "d_model")):
        what = f"the class {backbone.__name__}" if isinstance(backbone, type) else f"a {type(backbone).__name__}"
        raise ValueError(f"backbone is {what}, not a module; give an object such as Transformer(128, 4, 2)")


def carried(memory: State | None, state: State) -> State | None:
    """Return the memory after a batch that started from `memory`: `state`, detached; None if there was none."""
    return None if memory is None else sequence.detach(state)


def check_fields(batch: Any, kind: Any) -> None:
    """Refuse a batch without the fields that the NamedTuple `kind` needs."""
    needed = [name for name in kind._fields if name not in kind._field_defaults]
    if not all(hasattr(batch, name) for name in needed):
        raise ValueError(
            f"the batch is a {type(batch).__name__}, not a {kind.__name__} with the fields {', '.join(needed)}; make "
            f"one of your tensors by lit_effattn.datamodules.{kind.__name__}"
        )


class Task(HasInitArgs, pl.LightningModule):
    """A LightningModule that records its constructor arguments, whether it is built from YAML or in Python.

    The training, validation and test steps are here. A subclass defines what they call:

    - `check_batch(batch)` refuses a batch that the model can't read;
    - `hidden(batch, memory)` returns the backbone's output and its state after the batch: the next two begin with it;
    - `objective(batch, memory)` computes the loss and the figures to log, without looking at any value;
    - `score(stage, batch)` updates the metrics of validation or test and returns them by name; a task that can go on
      from a memory also overrides `evaluate(stage, batch, memory)`, which calls it;
    - `write_samples(folder, *, datamodule, n, sampling, progress, **options)`, if it can generate: it draws samples,
      writes them into the folder that `folder()` makes, and returns what to say of them. `sampling` is a
      `generation.Sampling`; a task that draws nothing does not take it. `options` are those of `lit-effattn generate`
      that it takes.

    Args:
        optimizer: Makes the optimiser from the parameters. Default: torch.optim.RAdam.
        lr_scheduler: Makes the schedule from the optimiser; it steps once an optimiser step (one that watches a
            metric, once a validation).
    """

    monitor: str
    """The metric whose lowest value determines the best checkpoint."""

    fixed_by_data: ClassVar[tuple[str, ...]] = ()
    """Arguments of the task that the command takes from the attributes of the same name of the data module."""

    in_progress_bar: ClassVar[tuple[str, ...]] = ("train/loss",)
    """Figures of training that the progress bar shows."""

    memory: State | None = None
    """The state from which a step goes on. The step replaces it by the state after the batch, detached.

    Only the steps (training, validation, test, prediction) and the callback `MemoryCarry` read and set it; all other
    methods take a memory as an argument and return the state. None: the batch starts anew, and no state is kept.
    """

    def __init__(self, optimizer: OptimizerCallable | None, lr_scheduler: LRSchedulerCallable | None) -> None:
        super().__init__()
        # Not as the argument's default: jsonargparse would lay RAdam's defaults over those of the class that is named.
        self._optimizer = optimizer or torch.optim.RAdam
        self._lr_scheduler = lr_scheduler
        self._objective: Callable[..., Objective] = type(self).objective
        try:
            arguments = init_args(self)
        except TypeError as error:
            rank_zero_warn(f"Checkpoints of this model can't rebuild it on their own: {error}")
            return
        kind = type(self)
        # The form in which LightningCLI saves hyper-parameters.
        self.save_hyperparameters(
            {
                "_class_path": f"{kind.__module__}.{kind.__qualname__}",
                "_instantiator": INSTANTIATOR,
                **arguments,
            },
            logger=False,
        )

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]  # `trust` is ours; `hparams_file` and pickles are not
        cls,
        checkpoint_path: str | Path,
        map_location: Any = None,
        strict: bool | None = None,
        weights_only: Literal[True] | None = None,
        trust: Sequence[str | type] = (),
        average: int | None = None,
        **kwargs: Any,
    ) -> Self:
        """Build the model that a checkpoint holds, with its weights.

        The checkpoint is data: it may name the classes that `lit_effattn.checkpoints.allowlist` lists, this class,
        and those that you trust; all names are checked before anything is imported or called.

        Args:
            checkpoint_path: The file.
            map_location: Where its tensors go, as in `torch.load`. Default: where they were, or the CPU if that device
                is not here.
            strict: Whether the file must hold exactly this model's parameters and buffers. Default: `strict_loading`.
            weights_only: True or None: checkpoints are never unpickled.
            trust: Your own classes that the file may name besides: the classes, their full names, or your modules.
            average: Give the parameters their mean over the last so many checkpoints that the run of this one has kept
                (`LastCheckpoint.keep`). If the file is one of those, it is the last.
            kwargs: Arguments of the model that replace those in the file; all of them, if the file could not hold them.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no checkpoint, holds another model, or names what it may not (`NotAllowedError`); or fewer
                checkpoints than `average` were kept.
        """
        if weights_only is not None and not weights_only:
            raise ValueError(f"weights_only={weights_only} would run code from {checkpoint_path}: leave it out")
        return load_model(
            cls,
            Path(checkpoint_path),
            map_location=map_location,
            strict=strict,
            trust=trust,
            average=average,
            arguments=kwargs,
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remove folders of this machine from the checkpoint."""
        if self._trainer is not None:
            hide_folders(checkpoint, self._trainer)

    def configure_model(self) -> None:
        """Divide the parameters among the processes, if the strategy does so. A second call does nothing.

        Raises:
            ValueError: the strategy is Lightning's own `ModelParallelStrategy`.
        """
        sharding.shard_module(self)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients as the trainer's options say, also where processes divide heads."""
        sharding.clip_gradients(self, optimizer, gradient_clip_val, gradient_clip_algorithm)

    def whole(self) -> AbstractContextManager[None]:
        """Return a context in which this process has all parameters, also if they are divided among processes.

        All processes enter it together. A callback that draws samples within an epoch needs it; in validations, which
        run in it, it is not needed.
        """
        return sharding.whole(self)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Build the optimiser and its schedule."""
        optimizer = self._optimizer(self.parameters())
        if self._lr_scheduler is None:
            return optimizer
        scheduler: Any = self._lr_scheduler(optimizer)
        # A checkpoint has the number. Asking for it opens the loader, whose position Lightning would not restore then.
        trainer = self._trainer
        if getattr(scheduler, "total_steps", 0) is None and trainer is not None and trainer.ckpt_path is None:
            scheduler.set_total_steps(trainer.estimated_stepping_batches)
        if isinstance(scheduler, TorchReduceLROnPlateau):
            monitor = scheduler.monitor if isinstance(scheduler, ReduceLROnPlateau) else self.monitor
            # Never Lightning's turn: `on_train_epoch_end` steps it.
            settings: Any = {"scheduler": scheduler, "monitor": monitor, "frequency": sys.maxsize}
            return {"optimizer": optimizer, "lr_scheduler": settings}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @property
    def epoch_is_whole(self) -> bool:
        """Whether the epoch's last batch was trained on: a limit may end an epoch earlier."""
        return epoch_is_whole(self.trainer)

    def _was_validated_in_epoch(self) -> bool:
        """Return whether a validation was due in the epoch that ends; those by the clock are taken as due."""
        trainer, batches = self.trainer, self.trainer.fit_loop.epoch_loop.batch_progress
        if trainer.check_val_every_n_epoch is not None:
            return (trainer.current_epoch + 1) % trainer.check_val_every_n_epoch == 0
        interval = trainer.val_check_batch or 1  # None: by the clock
        return batches.total.ready // interval > (batches.total.ready - batches.current.ready) // interval

    def on_train_epoch_end(self) -> None:
        """Step a schedule that monitors a metric, at the end of a whole epoch.

        `max_steps`, `max_time` and early stopping end an epoch before it is whole; a resumed run then goes on in it.
        Lightning would step it after the checkpoint of this epoch is saved, and not at all after resuming from it.

        Raises:
            ValueError: there is no such metric.
        """
        for config in self.trainer.lr_scheduler_configs if self.epoch_is_whole else ():
            if not config.reduce_on_plateau:
                continue
            if str(config.monitor).startswith("val/") and not self._was_validated_in_epoch():
                continue
            metrics = self.trainer.callback_metrics
            if config.monitor not in metrics:
                known = ", ".join(sorted(metrics)) or "none"
                raise ValueError(
                    f"the learning rate's schedule monitors {config.monitor!r}, which was not logged; there are {known}"
                )
            scheduler: Any = config.scheduler
            scheduler.step(metrics[config.monitor])

    def objective(self, batch: Any, memory: State | None = None) -> Objective:
        """Compute the loss of a batch, starting from the state `memory`.

        It must not depend on values of tensors in Python, so that `compile_objective` can compile it as one graph.

        Raises:
            NotImplementedError: the task, a subclass, does not say what it minimises.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no `objective`")

    def check_batch(self, batch: Any) -> None:
        """Refuse a batch that the model can't read.

        Raises:
            ValueError: says what is wrong with it.
        """

    def score(self, stage: str, batch: Any) -> dict[str, Any]:
        """Update the metrics of `stage`, "val" or "test", with a batch, and return them by their names.

        Raises:
            NotImplementedError: the task, a subclass, does not say what is measured.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no `score`")

    def evaluate(self, stage: str, batch: Any, memory: State | None = None) -> tuple[dict[str, Any], State | None]:
        """Score a batch, starting from the state `memory`. The default calls `score`, and keeps no state.

        Returns:
            The metrics by their names, and the state after the batch, detached, if the batch went on from a memory.
        """
        return self.score(stage, batch), None

    def training_step(self, batch: Any) -> Tensor:
        """Return the loss of `objective`, and log its figures."""
        self.check_batch(batch)
        loss, figures, self.memory = self.run_objective(batch, self.memory)
        if (others := parts()) is not None:
            figures = {name: others.mean(figure) for name, figure in figures.items()}
        self.log_figures(figures)
        return loss

    def log_figures(self, figures: dict[str, Tensor]) -> None:
        """Log the figures of a training step."""
        for name, figure in figures.items():
            self.log(name, figure, prog_bar=name in self.in_progress_bar)

    def validation_step(self, batch: Any) -> None:
        """Score a batch."""
        self._evaluation_step("val", batch)

    def test_step(self, batch: Any) -> None:
        """Score a batch."""
        self._evaluation_step("test", batch)

    def _evaluation_step(self, stage: str, batch: Any) -> None:
        self.check_batch(batch)
        metrics, self.memory = self.evaluate(stage, batch, self.memory)
        rows = len(batch[0]) if isinstance(batch, tuple) else len(batch)
        # The metrics themselves, not their values: Lightning then adds the sums of all processes before it divides.
        for name, metric in metrics.items():
            counts = isinstance(metric, Count)
            self.log(f"{stage}/{name}", metric, on_step=False, on_epoch=True, prog_bar=not counts, batch_size=rows)

    def run_objective(self, batch: Any, memory: State | None = None) -> Objective:
        """Run `objective`, compiled if `compile_objective` was called."""
        return self._objective(self, batch, memory)

    def compile_objective(self, backend: str = "inductor") -> None:
        """Compile `objective` with `torch.compile`: see the callback `Compile`.

        Parameter names, checkpoints, evaluation and generation do not change.

        Raises:
            ValueError: the class defines no `objective`, so that its training step is one piece.
        """
        if type(self).objective is Task.objective:
            raise ValueError(f"{type(self).__name__} can't be compiled: it defines no `objective`; see `Task`")
        # The function, not the bound method, so that a copy of this model uses its own weights.
        self._objective = torch.compile(type(self).objective, backend=backend)

    @staticmethod
    def with_auxiliary(loss: Tensor, figures: dict[str, Tensor], state: State, weight: float = 1.0) -> Objective:
        """Add the mean over the rows of the auxiliary losses in `state` to `loss`.

        The unweighted loss of each kind is logged as `train/auxiliary_loss/` and the name of its state's class.
        """
        by_kind = sequence.losses_by_kind(state)
        figures = {**figures, **{f"train/auxiliary_loss/{k}": of_k.detach().mean() for k, of_k in by_kind.items()}}
        auxiliary = sequence.losses(state)
        return Objective(loss if auxiliary is None else loss + weight * auxiliary.mean(), figures)

    def write_predictions(self, predictions: list[Any], folder: Path) -> str:
        """Write the results of `predict_step`, one for each batch, into `folder`, and return a message for the user.

        This default takes dictionaries of tensors (B,) and writes `predictions.csv` with one row for each item.
        """
        path = folder / "predictions.csv"
        rows = [row for batch in predictions for row in zip(*(v.tolist() for v in batch.values()), strict=True)]
        with path.open("w", encoding="utf-8") as file:
            print("index", *predictions[0], sep=",", file=file)
            for i, row in enumerate(rows):
                print(i, *row, sep=",", file=file)
        return f"scores of {len(rows)} items: {short(path)}"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Reject a checkpoint of another model, and drop paths that lie outside the run.

        Raises:
            OtherModelError: names the first parameters that differ.
        """
        if self._trainer is not None:
            own_folders(checkpoint, self._trainer)
        check_same_model(self, checkpoint)
