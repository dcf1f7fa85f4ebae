"""Checks of the loaders that a task trains on, which may be a user's own."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import DistributedSampler

from lit_effattn.callbacks.lightning_internals import has_last_batch, is_within_epoch
from lit_effattn.datamodules.common.sampling import BatchSampler


def check_single(loaders: Any) -> None:
    """Raise ValueError if a data module returned several loaders to train on."""
    if isinstance(loaders, (dict, list, tuple)):
        raise ValueError(
            f"train_dataloader returned a {type(loaders).__name__} of {len(loaders)} loaders, but a task reads the "
            "batches of one; join their data sets by torch.utils.data.ConcatDataset"
        )


def check_even(trainer: pl.Trainer) -> None:
    """Raise ValueError if the processes read the same batches, or different numbers of them.

    With different numbers, one would wait for the others for ever.
    """
    if trainer.world_size == 1:
        return
    sampler, share = getattr(trainer.train_dataloader, "sampler", None), trainer.distributed_sampler_kwargs or {}
    for name, number in share.items():
        if (given := getattr(sampler, name, number)) != number:
            raise ValueError(
                f"the sampler of train_dataloader has {name}={given}, but the trainer needs {number}, or processes "
                "read the same batches; give trainer.fit the data module, or a sampler made with this number"
            )
    for name, numbers in (("training", [trainer.num_training_batches]), ("validation", trainer.num_val_batches)):
        counts = _gathered(trainer, [float(number) for number in numbers])
        if not bool((counts == counts[0]).all()):
            of_each = ", ".join(
                f"process {rank} has {' + '.join(f'{n:g}' for n in n_)}" for rank, n_ in enumerate(counts)
            )
            raise ValueError(f"the processes have different numbers of {name} batches: {of_each}; give each as many")


def check_end(trainer: pl.Trainer) -> None:
    """Raise ValueError if this batch is the last of some processes alone. For loaders without a length."""
    if trainer.world_size == 1 or trainer.num_training_batches != float("inf"):
        return
    ended = _gathered(trainer, [float(has_last_batch(trainer))])[:, 0].bool()
    if ended.any() and not ended.all():
        number = trainer.fit_loop.epoch_loop.batch_idx + 1
        ranks = ", ".join(str(rank) for rank, end in enumerate(ended) if end)
        raise ValueError(
            f"train_dataloader of process {ranks} ended after {number} batches, and those of the others did not; give "
            "each process as many"
        )


def warn_of_last_steps(trainer: pl.Trainer) -> None:
    """Warn if the last step of an epoch has fewer batches than the others: Lightning divides its loss as theirs."""
    size, batches = trainer.accumulate_grad_batches, trainer.num_training_batches
    if batches != float("inf") and (rest := batches % size):
        rank_zero_warn(
            f"the last step of an epoch has {rest} of its {batches} batches, and Lightning divides their loss by "
            f"accumulate_grad_batches={size}, so they count for less; the callback GlobalLossNormalization counts all "
            "items alike"
        )


def warn_of_repeated_items(trainer: pl.Trainer) -> None:
    """Warn if a validation scores items twice. In `validate` and `test` Lightning warns."""
    sampler = getattr(trainer.val_dataloaders, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or isinstance(sampler, BatchSampler):
        return
    n = len(sampler.dataset)  # type: ignore[arg-type]
    if sampler.total_size > n:
        rank_zero_warn(
            f"validation scores {sampler.total_size} items in place of {n}, since Lightning's DistributedSampler gives "
            f"{sampler.num_replicas} processes equally many; return a ResumableLoader with ShardedBatches from "
            "val_dataloader, or use a number of items that the number of processes divides"
        )


def warn_of_repetition(trainer: pl.Trainer) -> None:
    """Warn if the data of an interrupted epoch come again. Lightning warns of loaders that have a length."""
    loader = trainer.train_dataloader
    if trainer.num_training_batches == float("inf") and is_within_epoch(trainer) and not hasattr(loader, "state_dict"):
        rank_zero_warn(
            f"the interrupted epoch's {trainer.fit_loop.epoch_loop.batch_progress.current.ready} batches come again: "
            f"the {type(loader).__name__} of train_dataloader has no state_dict; give it one, as torchdata's "
            "StatefulDataLoader has"
        )


def _gathered(trainer: pl.Trainer, values: list[float]) -> Tensor:
    """Return the values of all processes, (processes, values)."""
    gathered: Tensor = trainer.strategy.all_gather(torch.tensor(values, device=trainer.strategy.root_device))
    return gathered.view(trainer.world_size, -1).cpu()
