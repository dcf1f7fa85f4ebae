"""Sharding of samples into batches and over processes, and a loader that resumes an interrupted epoch."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lit_effattn.checks import at_least

_COUNTS = ("epoch", "batches", "n_batches", "division")  # of the state of a loader


class BatchSampler(DistributedSampler[Any]):
    """A sampler of batches. Lightning replaces samplers that are not a `DistributedSampler`.

    Args:
        n_samples: Size of the data set.
        options: Arguments of `DistributedSampler`.
    """

    def __init__(self, n_samples: int, **options: Any) -> None:
        super().__init__(range(n_samples), **options)  # type: ignore[arg-type]  # only its length is used
        self.division = 0  # another number if the batches of all processes together have other samples
        self.start = 0  # number of batches that `ResumableLoader` skips, since the interrupted run trained on them


class ShardedBatches(BatchSampler):
    """Batches of indices, sharded over processes, as a pure function of (seed, epoch).

    Pass it to a loader as `sampler=` with `batch_size=None`: the data set's `__getitem__` then gets a list of indices
    and returns the whole batch.

    With `drop_last` (training) all batches have the same size and the rest of the epoch is dropped. The samples in the
    t-th batches of all processes together depend only on the product of the number of processes and the batch size.

    Without `drop_last` (evaluation) every sample occurs exactly once over all processes. All processes have the same
    number of batches, since DDP's exchange of buffers hangs if one process has a batch more. Shards are divided as
    evenly as possible, so batches are a little smaller than `batch_size`. If a process has fewer samples than another
    has batches, one of the batches is larger by one.

    Args:
        n_samples: Size of the data set.
        batch_size: Batch size of one process.
        num_replicas: Number of processes.
        rank: This process, 0 to `num_replicas - 1`.
        shuffle: Draw a new order every epoch.
        seed: Seed of the order, 0 or more.
        variants: Number of variants of each sample. Every epoch draws one for each sample; variant v of sample i is the
            index `i + v * n_samples`.
        drop_last: Drop samples that do not fill a batch on every process.

    Raises:
        ValueError: If an argument is out of its range, or there are too few samples for the processes.

    Examples:
        >>> list(ShardedBatches(5, 2, num_replicas=1, rank=0, shuffle=False, seed=0, drop_last=False))
        [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        n_samples: int,
        batch_size: int,
        *,
        num_replicas: int,
        rank: int,
        shuffle: bool,
        seed: int,
        variants: int = 1,
        drop_last: bool,
    ) -> None:
        at_least(1, batch_size=batch_size, variants=variants)
        at_least(0, seed=seed)
        needed = num_replicas * batch_size if drop_last else num_replicas
        if n_samples < needed:
            each = f"a batch of batch_size={batch_size}" if drop_last else "a sample"
            remedy = "use a smaller batch_size or fewer processes" if drop_last else "use fewer processes"
            raise ValueError(
                f"n_samples={n_samples} cannot give each of {num_replicas} processes {each}; {remedy}, or more samples"
            )
        order: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        super().__init__(n_samples, num_replicas=num_replicas, rank=rank, **order)
        self.division = num_replicas * batch_size
        self.n_samples = n_samples
        self.batch_size = batch_size
        self.variants = variants

    def __len__(self) -> int:
        if self.drop_last:
            return self.n_samples // (self.num_replicas * self.batch_size)
        smallest, extra = divmod(self.n_samples, self.num_replicas)
        largest = smallest + (extra > 0)
        return min(-(-largest // self.batch_size), smallest)

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self._batches()[self.start :])

    def _batches(self) -> list[np.ndarray]:
        order = self._order()
        if not self.drop_last:
            return np.array_split(order[self.rank :: self.num_replicas], len(self))
        used = len(self) * self.num_replicas * self.batch_size
        return list(order[:used].reshape(len(self), self.num_replicas, self.batch_size)[:, self.rank])

    def _order(self) -> np.ndarray:
        # The seed is a pair: with a sum, epoch 1 of seed 0 would equal epoch 0 of seed 1.
        rng = np.random.default_rng((self.seed, self.epoch))
        order = rng.permutation(self.n_samples) if self.shuffle else np.arange(self.n_samples)
        return order + self.n_samples * rng.integers(self.variants, size=self.n_samples)


class ResumableLoader(DataLoader[Any]):
    """A loader over `ShardedBatches` or `InOrder` that resumes an interrupted epoch with exactly the next batch.

    Its state is the epoch, the number of batches returned, their division, and the seed of their order. It does not
    depend on the number of workers, which may change. It is the same on every process, so the first process's state,
    which Lightning saves, is valid for all.

    Lightning creates the iterator before it sets the epoch, and stops after the last batch without a further `next`. A
    loader whose workers prefetch at once, or for which an epoch is unfinished until that `next` (torchdata's
    `StatefulDataLoader`), therefore repeats or loses batches from the second epoch on. For this reason `__iter__` is a
    generator, which does nothing before the first batch is requested, and a state applies to its epoch only.

    A loop of your own gets the next epoch's batches from the next iteration, if this one has ended. Lightning sets the
    epoch.

    If the data set has an attribute `identity`, a dictionary that changes if its items change (their number, a digest
    of them or of their names and sizes), the state has it too, and is loaded for the same data only.

    Raises:
        ValueError: On the first batch, if the interrupted epoch had other batches than this one.
    """

    sampler: BatchSampler
    _epoch = 0  # epoch of the latest iteration, whose next batch has index `_batches`
    _batches = 0
    _ended = False  # whether that iteration has ended: Lightning's stop after the last batch
    _loaded: dict[str, int] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._epoch, self._batches = self.sampler.epoch, self._first_batch()
        self.sampler.start, self._ended = self._batches, False
        for batch in super().__iter__():
            self._batches += 1
            yield batch
        self._ended = True
        self.sampler.set_epoch(self._epoch + 1)

    def _first_batch(self) -> int:
        state, self._loaded = self._loaded, None
        if state is None or state["epoch"] != self.sampler.epoch:
            return 0
        if (state["n_batches"], state["division"]) != (len(self), self.sampler.division):
            raise ValueError(
                f"epoch {state['epoch']} was interrupted after {state['batches']} of {state['n_batches']} batches, but "
                f"has {len(self)} now, of other items; resume with the batch_size, processes and data it was started "
                "with"
            )
        return state["batches"]

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, its batches returned so far, their number and division, the seed, and what the data are."""
        counts = {"epoch": self._epoch, "batches": self._batches, "n_batches": len(self)}
        counts |= {"division": self.sampler.division, "seed": self.sampler.seed}
        return {**counts, "ended": self._ended, "data": self._identity}

    @property
    def _identity(self) -> dict[str, Any]:
        return getattr(self.dataset, "identity", {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from the position in `state_dict`.

        Raises:
            ValueError: If it is not a position, or the data or their order are not those of the interrupted run.
        """
        if (saved := state_dict.get("data")) != self._identity:
            was = saved if isinstance(saved, dict) else {}
            changed = [f"{k}={str(was.get(k))[:40]} and not {v}" for k, v in self._identity.items() if was.get(k) != v]
            raise ValueError(
                f"the interrupted run was trained on other data: {', '.join(changed) or 'without a description'}; "
                "resume with the same data, or start a new run from its weights with --init_weights"
            )
        if (seed := state_dict.get("seed")) != self.sampler.seed:
            raise ValueError(
                f"seed={self.sampler.seed}, but the interrupted run had {str(seed)[:40]}: the rest of its epoch would "
                "have other items; resume with the seed that it was started with"
            )
        counts: dict[str, Any] = {name: state_dict.get(name) for name in _COUNTS}
        for name, count in counts.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ValueError(f"the checkpoint's loader has {name}={str(count)[:40]!r}, which must be a count")
        if counts["batches"] > counts["n_batches"]:
            raise ValueError(f"the checkpoint's loader is at batch {counts['batches']} of {counts['n_batches']}")
        self._loaded = counts
        self._epoch, self._batches = state_dict["epoch"], state_dict["batches"]
        self._ended = state_dict.get("ended") is True
        self.sampler.set_epoch(self._epoch + self._ended)


def digest(*parts: Any) -> str:
    """Return a short digest of arrays and plain data, for the `identity` of a data set."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(np.ascontiguousarray(part).data if isinstance(part, np.ndarray) else json.dumps(part).encode())
    return hashed.hexdigest()[:16]


def processes(trainer: Any) -> dict[str, int]:
    """Return `num_replicas`, the number of processes among which batches are divided, and the `rank` of this one.

    A strategy of the trainer may let several processes share a batch. Without a trainer there is one process.

    Raises:
        ValueError: If the trainer would replace the sampler, for `overfit_batches`.
    """
    if overfit_batches := getattr(trainer, "overfit_batches", 0):
        raise ValueError(
            f"overfit_batches={overfit_batches} would replace the sampler that forms the batches; use "
            "limit_train_batches, or fewer data: a smaller n_train, max_bytes or corpus, or a folder of a few files"
        )
    return getattr(trainer, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}


def loader_options(num_workers: int) -> dict[str, Any]:
    """Return the options of a loader whose sampler returns whole batches."""
    return {
        "batch_size": None,  # the sampler forms the batches
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,
        "pin_memory": torch.cuda.is_available(),
        # A separate generator: loaders draw a number at each start, which would change torch's global random state.
        "generator": torch.Generator(),
    }
