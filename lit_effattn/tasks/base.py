"""The base class of tasks: steps, optimiser, and checkpoints from which the model can be rebuilt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau as TorchReduceLROnPlateau
from torchmetrics import Metric

from lit_effattn import sequence
from lit_effattn.callbacks.lightning_internals import epoch_is_whole
from lit_effattn.callbacks.random_states import RandomStates
from lit_effattn.checkpoints.io import hide_folders, own_folders
from lit_effattn.checkpoints.loading import check_finite, check_not_averaged, check_same_model, load_model
from lit_effattn.datamodules.common.tokens import IGNORE
from lit_effattn.datamodules.text.tokenizers import Tokenizer
from lit_effattn.distributed import sharding
from lit_effattn.hparams import HasInitArgs, init_args
from lit_effattn.nn.evaluating import evaluating
from lit_effattn.sequence import State, parts, reads_values, valid_positions
from lit_effattn.tasks import loaders
from lit_effattn.tasks.metrics import Count
from lit_effattn.tasks.optimizers import MuonWithAdamW, exempt_from_decay, hidden_matrices, without_decay
from lit_effattn.tasks.predictions import write_items

if TYPE_CHECKING:
    from typing_extensions import Self


class Objective(NamedTuple):
    """The result of `Task.objective`.

    Attributes:
        loss: The scalar to minimise.
        figures: Values to log by name, detached.
        state: The state of the backbone after the batch, detached.
        n_scored: The number of items, such as tokens, of which `loss` is the mean. None: unknown.
    """

    loss: Tensor
    figures: dict[str, Tensor]
    state: State | None = None
    n_scored: Tensor | None = None


def check_backbone(backbone: Any, causal: bool = False) -> None:
    """Raise ValueError unless `backbone` is a sequence module, causal if `causal`."""
    if isinstance(backbone, type) or not (hasattr(backbone, "causal") and hasattr(backbone, "d_model")):
        what = f"the class {backbone.__name__}" if isinstance(backbone, type) else f"a {type(backbone).__name__}"
        raise ValueError(f"backbone is {what}, not a module; give an object such as Transformer(128, 4, 2)")
    if causal and not backbone.causal:
        raise ValueError("backbone has causal=False, so a position would see what it predicts; set causal=True")


def check_fields(batch: Any, kind: Any) -> None:
    """Raise ValueError unless `batch` has the fields of the NamedTuple `kind`."""
    if not all(hasattr(batch, name) for name in kind._fields):
        raise ValueError(
            f"the batch is a {type(batch).__name__}, not a {kind.__name__} with the fields {', '.join(kind._fields)}; "
            f"make one of your tensors by lit_effattn.datamodules.{kind.__name__}"
        )


def check_integers(values: Tensor, name: str, first: int, last: int, option: str) -> None:
    """Check that the integers of a batch are in the model's range. On a GPU they are not read, because it would wait.

    Args:
        values: Integers of any shape.
        name: What an integer is, such as "token".
        first: Lowest valid value.
        last: Highest valid value.
        option: What the model has, such as "vocab_size=257".

    Raises:
        ValueError: If a value is out of range.
    """
    if not reads_values(values) or not values.numel():
        return
    for value in (int(values.min()), int(values.max())):  # as Python's integers: 256 does not fit into uint8
        if not first <= value <= last:
            raise ValueError(
                f"the data hold {name} {value}, but the model has {option}: {first} … {last}; use the same for both"
            )


def check_tokens(tokens: Tensor, size: int, option: str = "vocab_size", name: str = "token") -> None:
    """Check that tokens are below `size`, the value of `option`: see `check_integers`."""
    check_integers(tokens, name, 0, size - 1, f"{option}={size}")


def check_targets(targets: Tensor, lengths: Tensor | None, size: int, option: str = "vocab_size") -> None:
    """Check that the targets (B, N) of a batch are below `size`, or `IGNORE`, as those of the padding must be.

    Args:
        targets: Targets.
        lengths: (B,), number of valid positions of each row; None: all are valid.
        size: Number of tokens that the model has.
        option: Name of its option for this number.

    Raises:
        ValueError: If a value is out of range, or a position of the padding is scored.
    """
    if not reads_values(targets):
        return
    scored = targets != IGNORE
    check_tokens(targets.masked_fill(~scored, 0), size, option, "target")
    if lengths is not None and (scored & ~valid_positions(lengths, targets.size(1))).any():
        raise ValueError(f"the batch scores a target beyond its `lengths`; set the targets of the padding to {IGNORE}")


class Task(HasInitArgs, pl.LightningModule):
    """A LightningModule that records its constructor arguments, whether it is built from YAML or in Python.

    The training, validation and test steps are defined here. A subclass defines what they call:

    - `check_batch(batch)` rejects a batch that the model can't read;
    - `hidden(batch, memory)` returns the backbone's output and its state after the batch;
    - `objective(batch, memory)` computes the loss and the figures to log, without reading values of tensors;
    - `score(stage, batch)` updates the metrics of validation or test and returns them by name; a task that can continue
      from a memory also overrides `evaluate(stage, batch, memory)`, which calls it;
    - `write_samples(folder, options, *, datamodule, progress)`, if the task can generate, draws samples, writes them
      into the folder that `folder()` makes, and returns a message for the user. `options` is a `generation`;
      `progress` wraps the iterable of steps.

    Args:
        optimizer: Makes the optimiser from the parameters. Default: torch.optim.RAdam.
        lr_scheduler: Makes the schedule from the optimiser. It steps once an optimiser step; a schedule that monitors a
            metric steps at the end of an epoch, with its latest value.
        decay_biases_and_gains: Whether the optimiser's weight decay also applies to biases and to the gains of norms.
            It never applies to what a module names in its class attribute `no_weight_decay`, such as the decays of
            `Mamba2Attention`.
        auxiliary_weight: Weight of auxiliary losses of the attention, such as Compressive's reconstruction.
    """

    monitor: str
    """The metric whose lowest value determines the best checkpoint."""

    fixed_by_data: ClassVar[tuple[str, ...]] = ()
    """Arguments of the task that the command takes from the attributes of the same name of the data module."""

    numbering: ClassVar[tuple[str, ...]] = ()
    """Arguments of the task that say what a token or label means: a checkpoint with other values is rejected."""

    new_modules: ClassVar[tuple[str, ...]] = ()
    """Modules that start from their initialisation if `--init_weights` names a checkpoint of another task."""

    generation: ClassVar[type | None] = None
    """The dataclass with the options of `lit-effattn generate`; None: the task can't generate."""

    predicts_by_steps: ClassVar[bool] = False
    """Whether `predict` reads one position at a time, as generation does."""

    in_progress_bar: ClassVar[tuple[str, ...]] = ("train/loss",)
    """Figures of training that the progress bar shows."""

    memory: State | None = None
    """The state from which a step continues. None: the empty state.

    Only the steps (training, validation, test, prediction) and the callback `MemoryCarry` read and set it; all other
    methods take a memory as an argument and return the state.
    """

    carries: bool = False
    """Whether a step replaces `memory` by the state after its batch, detached. The callback `MemoryCarry` sets it."""

    scored_items: list[Tensor] | None = None
    """Number of scored items of each batch since the last optimiser step, by which the batch's loss is multiplied.

    None: losses are not multiplied. The callback `GlobalLossNormalization` sets it.
    """

    def __init__(
        self,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        decay_biases_and_gains: bool = True,
        auxiliary_weight: float = 1.0,
    ) -> None:
        super().__init__()
        # Not the argument's default: jsonargparse would apply RAdam's defaults on top of those of a chosen class.
        self._optimizer = optimizer or torch.optim.RAdam
        self._lr_scheduler = lr_scheduler
        self._decay_biases_and_gains = decay_biases_and_gains
        self.auxiliary_weight = auxiliary_weight
        self._in_training_mode: list[nn.Module] = []  # before the evaluation that runs
        self._objective: Callable[..., Objective] = type(self).objective
        try:
            arguments = init_args(self)
        except TypeError as error:
            rank_zero_warn(f"Checkpoints of this model can't rebuild it on their own: {error}")
            return
        kind = type(self)
        self.save_hyperparameters({"_class_path": f"{kind.__module__}.{kind.__qualname__}", **arguments}, logger=False)

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]  # `trust` is ours; `hparams_file` and pickles are not
        cls,
        checkpoint_path: str | Path,
        map_location: Any = None,
        strict: bool | None = None,
        weights_only: Literal[True] | None = None,
        trust: Sequence[str | type | ModuleType] = (),
        average: int | None = None,
        **kwargs: Any,
    ) -> Self:
        """Build the model that a checkpoint holds, with its weights.

        A checkpoint may name the classes of this package, this class, the classes that you trust, and, in a run that
        this account started, those of the run. No other name is imported or called.

        Args:
            checkpoint_path: The file, or `model:NAME`, a model that comes with the package.
            map_location: Device of its tensors, as in `torch.load`. Default: the device that they were saved from, or
                the CPU if it is missing.
            strict: Whether the file must hold exactly this model's parameters and buffers. Default: `strict_loading`.
            weights_only: True or None: checkpoints are never unpickled.
            trust: Further classes that the file may name: the classes, their full names, or your modules.
            average: Number of checkpoints over which the parameters are averaged: the last of those that the run of
                this one has kept (`LastCheckpoint.keep`). If this file is one of them, it is the last.
            kwargs: Arguments of the model that replace those in the file. If the file could not hold the arguments,
                all are needed.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If the file is not a checkpoint, holds another model, or names a class that is not allowed
                (`NotAllowedError`), or if fewer checkpoints than `average` were kept.
        """
        if weights_only is not None and not weights_only:
            raise ValueError(f"weights_only={weights_only} would run code from {checkpoint_path}; leave it out")
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

    def setup(self, stage: str) -> None:
        """Undo the effects of an evaluation that an exception ended: the sums in metrics, and evaluation mode."""
        for module in self.modules():
            if isinstance(module, Metric):
                module.reset()
        self.on_validation_model_train()

    def on_validation_model_eval(self) -> None:
        """Enter evaluation mode."""
        self._in_training_mode = [module for module in self.modules() if module.training]
        super().on_validation_model_eval()

    def on_validation_model_train(self) -> None:
        """Restore the mode of each module."""
        for module in self._in_training_mode:
            module.training = True
        self._in_training_mode = []

    on_test_model_eval, on_test_model_train = on_validation_model_eval, on_validation_model_train
    # Lightning has no `on_predict_model_train`.
    on_predict_model_eval, on_predict_epoch_end = on_validation_model_eval, on_validation_model_train

    def configure_callbacks(self) -> list[pl.Callback]:
        """Add `RandomStates`, so that a run resumes with its random states, unless the trainer has one."""
        given: Any = self.trainer
        return [] if any(isinstance(c, RandomStates) for c in given.callbacks) else [RandomStates()]

    def configure_model(self) -> None:
        """Divide the parameters among the processes, if the strategy does so. A second call does nothing.

        Raises:
            ValueError: If the strategy is Lightning's own `ModelParallelStrategy`.
        """
        sharding.shard_module(self)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients by the trainer's options, also where processes divide heads."""
        sharding.clip_gradients(self, optimizer, gradient_clip_val, gradient_clip_algorithm)

    def whole(self) -> AbstractContextManager[None]:
        """Return a context in which this process has all parameters, also if they are divided among processes.

        All processes enter it together. A callback that draws samples within an epoch needs it. Validations run in it.
        """
        return sharding.whole(self)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Build the optimiser and its schedule."""
        optimizer = self._optimizer(self.parameters())
        if isinstance(optimizer, MuonWithAdamW):
            optimizer.use_muon_for(hidden_matrices(self))
        exempt_from_decay(optimizer, without_decay(self, decay_biases_and_gains=self._decay_biases_and_gains))
        if self._lr_scheduler is None:
            return optimizer
        scheduler: Any = self._lr_scheduler(optimizer)
        # On resuming, the number comes from the checkpoint. Computing it opens the loader, whose position Lightning
        # would then not restore.
        trainer = self._trainer
        if getattr(scheduler, "total_steps", 0) is None and trainer is not None and trainer.ckpt_path is None:
            scheduler.set_total_steps(trainer.estimated_stepping_batches)
        if isinstance(scheduler, TorchReduceLROnPlateau):
            monitor = scheduler.monitor if isinstance(scheduler, ReduceLROnPlateau) else self.monitor
            # A frequency that Lightning never reaches: `on_train_epoch_end` steps it.
            settings: Any = {"scheduler": scheduler, "monitor": monitor, "frequency": sys.maxsize}
            return {"optimizer": optimizer, "lr_scheduler": settings}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """Check the loaders. Warn of a run that goes on after the end of its schedule, at a rate of 0.

        Raises:
            ValueError: If there are several loaders to train on, or the processes have different numbers of batches.
        """
        if self.device.type == "cuda" and self.trainer.precision == "32-true":
            rank_zero_info(
                "Training in float32. On an H100, steps with --trainer.precision bf16-mixed are 1.1 (Transformer-XL) "
                "to 3.5 times (Gated DeltaNet) as fast"
            )
        loaders.check_single(self.trainer.train_dataloader)
        loaders.check_even(self.trainer)
        loaders.warn_of_repeated_items(self.trainer)
        loaders.warn_of_repetition(self.trainer)
        if self.scored_items is None:
            loaders.warn_of_last_steps(self.trainer)
        for scheduler in (config.scheduler for config in self.trainer.lr_scheduler_configs):
            total: int | None = getattr(scheduler, "total_steps", None)
            rates = [group["lr"] for group in scheduler.optimizer.param_groups]
            if total is not None and self.trainer.global_step >= total and not any(rates):
                rank_zero_warn(
                    f"the schedule of the learning rate ended at step {total}, and the rate is 0 since: nothing "
                    "more is learnt; train on in a new run with --init_weights in place of --ckpt_path, or give "
                    "--model.lr_scheduler.total_steps when a run begins"
                )

    def _was_validated_in_epoch(self) -> bool:
        """Return whether a validation was due in the epoch that ends. Validations by the clock count as due."""
        trainer, batches = self.trainer, self.trainer.fit_loop.epoch_loop.batch_progress
        if trainer.check_val_every_n_epoch is not None:
            return (trainer.current_epoch + 1) % trainer.check_val_every_n_epoch == 0
        interval = trainer.val_check_batch or 1  # None: by the clock
        return batches.total.ready // interval > (batches.total.ready - batches.current.ready) // interval

    def on_train_epoch_end(self) -> None:
        """Step a schedule that monitors a metric, at the end of a whole epoch.

        `max_steps`, `max_time` and early stopping end an epoch before it is whole; a resumed run then continues it.
        Lightning would step the schedule after the checkpoint of this epoch is saved, and not at all after resuming
        from it.

        Raises:
            ValueError: If the metric was not logged.
        """
        for config in self.trainer.lr_scheduler_configs if epoch_is_whole(self.trainer) else ():
            if not config.reduce_on_plateau:
                continue
            if str(config.monitor).startswith("val/") and not self._was_validated_in_epoch():
                continue
            metrics = self.trainer.callback_metrics
            if config.monitor not in metrics:
                logged = ", ".join(sorted(metrics)) or "none"
                raise ValueError(
                    f"the learning rate's schedule monitors {config.monitor!r}, which was not logged; there are "
                    f"{logged}"
                )
            scheduler: Any = config.scheduler
            scheduler.step(metrics[config.monitor])

    def objective(self, batch: Any, memory: State | None = None) -> Objective:
        """Compute the loss of a batch, starting from the state `memory`.

        Python code must not depend on values of tensors, so that `compile_objective` can compile it as one graph.

        Raises:
            NotImplementedError: If the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no `objective`")

    def check_batch(self, batch: Any) -> None:
        """Check that the model can read a batch.

        Raises:
            ValueError: If it can't. The message says why.
        """

    def score(self, stage: str, batch: Any) -> dict[str, Any]:
        """Update the metrics of `stage`, "val" or "test", with a batch, and return them by name.

        Raises:
            NotImplementedError: If the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no `score`")

    def evaluate(self, stage: str, batch: Any, memory: State | None = None) -> tuple[dict[str, Any], State | None]:
        """Score a batch, starting from the state `memory`. The default calls `score`, and has no state.

        Returns:
            The metrics by name, and the state after the batch.
        """
        return self.score(stage, batch), None

    def keep(self, state: State | None) -> None:
        """Make the state after a batch, detached, the next one's memory, if the task `carries` one."""
        self.memory = sequence.detach(state) if self.carries else None

    def training_step(self, batch: Any) -> Tensor:
        """Return the loss of `objective`, and log its figures."""
        if self._trainer is not None:
            loaders.check_end(self._trainer)
        self.check_batch(batch)
        loss, figures, state, n_scored = self.run_objective(batch, self.memory)
        self.keep(state)
        if self.scored_items is not None:
            if n_scored is None:
                raise ValueError(
                    f"{type(self).__name__}.objective returns no `n_scored`, which GlobalLossNormalization needs; "
                    "return it, or leave the callback out"
                )
            self.scored_items.append(n_scored)
            loss = loss * n_scored
        if (group := parts()) is not None:
            figures = {name: group.mean(figure) for name, figure in figures.items()}
        for name, figure in figures.items():
            self.log(name, figure, prog_bar=name in self.in_progress_bar)
        return loss

    def validation_step(self, batch: Any) -> None:
        """Score a batch."""
        self._evaluation_step("val", batch)

    def test_step(self, batch: Any) -> None:
        """Score a batch."""
        self._evaluation_step("test", batch)

    def _evaluation_step(self, stage: str, batch: Any) -> None:
        self.check_batch(batch)
        metrics, state = self.evaluate(stage, batch, self.memory)
        self.keep(state)
        rows = len(batch[0]) if isinstance(batch, tuple) else len(batch)
        # Metrics, not their values: Lightning then adds the sums of all processes before the division.
        for name, metric in metrics.items():
            counts = isinstance(metric, Count)
            self.log(f"{stage}/{name}", metric, on_step=False, on_epoch=True, prog_bar=not counts, batch_size=rows)

    @contextmanager
    def in_evaluation(self) -> Iterator[None]:
        """Evaluate within the context: evaluation mode, and the memory options of evaluation."""
        with evaluating(self):
            self.on_validation_start()
            try:
                yield
            finally:
                self.on_validation_end()

    def run_objective(self, batch: Any, memory: State | None = None) -> Objective:
        """Run `objective`, compiled if `compile_objective` was called."""
        return self._objective(self, batch, memory)

    def compile_objective(self, backend: str | None = "inductor") -> None:
        """Compile `objective` with `torch.compile`: see the callback `Compile`.

        Parameter names, checkpoints, evaluation and generation do not change. With `backend` None, `objective` is no
        longer compiled.

        Raises:
            ValueError: If the class does not define `objective`.
        """
        if type(self).objective is Task.objective:
            raise ValueError(f"{type(self).__name__} can't be compiled: it defines no `objective`; see `Task`")
        # The function, not the bound method: a copy of this model must use its own weights.
        objective = type(self).objective
        self._objective = objective if backend is None else torch.compile(objective, backend=backend)

    def with_auxiliary(
        self,
        loss: Tensor,
        figures: dict[str, Tensor],
        state: State,
        *,
        n_scored: Tensor | None = None,
        n_sequences: Tensor | None = None,
    ) -> Objective:
        """Add the mean over the sequences of the auxiliary losses in `state` to `loss`.

        The unweighted loss of each kind is logged as `train/auxiliary_loss/` and the name of its state's class.

        Args:
            loss: The loss without them.
            figures: Figures to log.
            state: The backbone's state after the batch.
            n_scored: The number of items of which `loss` is the mean.
            n_sequences: The number of sequences, if a row of the batch holds several. None: each row is one.
        """

        def mean(of_rows: Tensor) -> Tensor:
            return of_rows.mean() if n_sequences is None else of_rows.sum() / n_sequences

        by_kind = sequence.losses_by_kind(state)
        figures = {**figures, **{f"train/auxiliary_loss/{k}": mean(of_k.detach()) for k, of_k in by_kind.items()}}
        auxiliary = sequence.losses(state)
        loss = loss if auxiliary is None else loss + self.auxiliary_weight * mean(auxiliary)
        return Objective(loss, figures, sequence.detach(state), n_scored)

    write_predictions = write_items

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Reject a checkpoint of another model, and remove paths outside the run.

        Raises:
            OtherModelError: If parameters differ. The message names the first ones.
            ValueError: If a token or label is numbered otherwise: see `numbering`.
            ValueError: If weights are not finite, or training would go on from averaged weights as if they were the
                run's.
        """
        if self._trainer is not None:
            own_folders(checkpoint, self._trainer)
            if self._trainer.state.fn == TrainerFn.FITTING:
                check_not_averaged(checkpoint, self._trainer.callbacks)  # type: ignore[attr-defined]  # Lightning sets it
        self._check_numbering(checkpoint.get("hyper_parameters", {}))
        check_same_model(self, checkpoint)
        check_finite(self, checkpoint)

    def _check_numbering(self, built: Mapping[str, Any]) -> None:
        """Raise ValueError if a checkpoint's model was built with another `numbering`."""
        for name in self.numbering:
            saved, own = (tuple(v) if isinstance(v, list) else v for v in (built.get(name), getattr(self, name)))
            if None not in (saved, own) and saved != own:
                other = ", or for another text --data.tokenizer_of CHECKPOINT --data.tokens null --data.vocab_size null"
                raise ValueError(
                    f"the checkpoint's and this model's {name} differ: {_described(saved, own)}, and "
                    f"{_described(own, saved)}; the same number means another one: use the data and the settings that "
                    f"the checkpoint was trained with{other if name == 'tokenizer' else ''}"
                )


def _described(value: Any, other: Any) -> str:
    """Describe a tokenizer, a number, or the names that `other` does not have in the same places."""
    if isinstance(value, str):
        return repr(Tokenizer.from_spec(value))
    if isinstance(value, int):
        return str(value)
    differing = [name for name, at_its_place in zip_longest(value, other[: len(value)]) if name != at_its_place]
    return f"{len(value)}: {', '.join(map(repr, differing[:5] or value[-1:]))}{', …' * (len(differing) > 5)}"
