from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lit_effattn import sequence
from lit_effattn.attention import LinearAttention
from lit_effattn.distributed.memories import MemoryStrategy, Streams, WholeMemories, memories_of, streams_of
from lit_effattn.distributed.sharding import ShardedStrategy
from lit_effattn.distributed.strategies import SequenceParallel

ATTENTION = LinearAttention(8, 2, causal=True)


def memory(value: float) -> Any:
    return sequence.map_tensors(lambda t: t.to(torch.float32) + value, ATTENTION.initial_state(1))


def numbers(state: Any) -> list[float]:
    return [float(t.flatten()[0]) for t in sequence.tensors(state)]


def plain(packed: Any) -> bool:
    return isinstance(packed, torch.Tensor) or (type(packed) is tuple and all(map(plain, packed)))


def test_a_single_process_has_one_stream():
    assert streams_of(None) == Streams(1, 0)
    trainer: Any = SimpleNamespace(strategy=object(), distributed_sampler_kwargs=None, world_size=1)
    memories = memories_of(trainer)
    (packed,) = memories.gather_memory(memory(3.0))
    assert plain(packed)
    found = memories.scatter_memory([packed], ATTENTION.initial_state(1))
    assert type(found) is type(memory(3.0))
    assert numbers(found) == numbers(memory(3.0))
    assert memories.gather_memory(None) == [None]
    assert memories.scatter_memory([None], ATTENTION.initial_state(1)) is None


def test_of_processes_with_one_stream_the_first_s_memory_is_kept(monkeypatch: pytest.MonkeyPatch):
    """Processes 0 … 3 hold memories 0 … 3; those that share a stream are neighbours."""

    def gather(everyone: list[Any], packed: Any) -> None:
        everyone[:] = [sequence.pack(memory(float(rank))) for rank in range(4)]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    for streams, kept in ((4, [0.0, 1.0, 2.0, 3.0]), (2, [0.0, 2.0]), (1, [0.0])):
        packed = WholeMemories(Streams(streams, 0), 4).gather_memory(memory(0.0))
        assert [float(next(sequence.tensors(of_one)).flatten()[0]) for of_one in packed] == kept
        for index, value in enumerate(kept):
            found = WholeMemories(Streams(streams, index), 4).scatter_memory(packed, ATTENTION.initial_state(1))
            assert float(next(sequence.tensors(found)).flatten()[0]) == value


def test_what_has_streams_of_its_own_is_asked_itself():
    class Own:
        streams = Streams(3, 2)

        def gather_memory(self, memory: Any) -> Any: ...

        def scatter_memory(self, memories: Any, like: Any) -> Any: ...

    own: Any = SimpleNamespace(strategy=Own())
    assert memories_of(own) is own.strategy
    assert all(hasattr(ShardedStrategy, name) for name in ("streams", "gather_memory", "scatter_memory"))
    groups: Any = SimpleNamespace(
        strategy=SequenceParallel(), distributed_sampler_kwargs={"num_replicas": 2, "rank": 1}, world_size=4
    )
    assert memories_of(groups) == WholeMemories(Streams(2, 1), 4)
    assert not isinstance(SequenceParallel(), MemoryStrategy)
