"""The carried memories of all processes of a run, and their form in a checkpoint."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import lightning.pytorch as pl

from lit_effattn import sequence
from lit_effattn.checkpoints.folders import gathered
from lit_effattn.sequence import State


class Streams(NamedTuple):
    """The streams of data that the processes of a run read.

    Attributes:
        number: Number of different streams. Processes that share a batch read the same stream.
        rank: The index of this process's stream.
    """

    number: int
    rank: int


@runtime_checkable
class MemoryStrategy(Protocol):
    """A strategy of the trainer that divides states among processes, or that has each process write its own state.

    `memories_of` returns the same interface for every other strategy.
    """

    @property
    def streams(self) -> Streams:
        """The streams of data that the processes read."""

    def gather_memory(self, memory: State | None) -> Any:
        """Return the memories of all processes in the form of a checkpoint. All processes call it.

        Args:
            memory: The memory of this process. None: it is empty.
        """

    def scatter_memory(self, memories: Sequence[Any], like: State) -> State | None:
        """Return the memory of this process, on the CPU. None: it is empty.

        Args:
            memories: The result of `gather_memory`, read from a checkpoint: the memory of each stream.
            like: Any state of the same module.
        """


class WholeMemories(NamedTuple):
    """The memories of a strategy whose processes hold whole states. A checkpoint has a list, one for each stream."""

    streams: Streams
    n_processes: int

    def gather_memory(self, memory: State | None) -> list[Any]:
        """See `MemoryStrategy`."""
        packed = sequence.pack(sequence.to(memory, "cpu"))
        if self.n_processes == 1:
            return [packed]
        return gathered(packed)[:: self.n_processes // self.streams.number]

    def scatter_memory(self, memories: Sequence[Any], like: State) -> State | None:
        """See `MemoryStrategy`."""
        return sequence.unpack(memories[self.streams.rank], like)


def memories_of(trainer: pl.Trainer) -> MemoryStrategy:
    """Return the trainer's strategy if it divides states, else `WholeMemories`."""
    if isinstance(trainer.strategy, MemoryStrategy):
        return trainer.strategy
    return WholeMemories(streams_of(trainer.distributed_sampler_kwargs), trainer.world_size)


def streams_of(sampler: dict[str, Any] | None) -> Streams:
    """Return the streams of `distributed_sampler_kwargs`; None: a single process reads a single stream."""
    return Streams(1, 0) if sampler is None else Streams(sampler["num_replicas"], sampler["rank"])
