from collections import Counter
from functools import partial
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from lit_effattn import Transformer
from lit_effattn.attention import InfiniteAttention
from lit_effattn.callbacks import MemoryCarry
from lit_effattn.datamodules import SortingTask, counting_accuracy
from lit_effattn.datamodules.common.tokens import IGNORE
from lit_effattn.datamodules.synthetic.sorting_task import by_frequency
from lit_effattn.tasks import LanguageModel
from tests.callbacks.tiny import trainer
from tests.datamodules.synthetic.test_base import batches


def ordered(types: list[int], n_types: int) -> list[int]:
    counts = Counter(types)  # in order of first appearance, which `sorted` keeps
    return sorted(counts, key=lambda t: -counts[t]) + [t for t in range(n_types) if t not in counts]


def together(segments: list) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([s.inputs for s in segments], 1), torch.cat([s.targets for s in segments], 1)


@pytest.mark.parametrize("split", ["train", "val", "test"])
@pytest.mark.parametrize("segment_len", [None, 7, 10, 48, 100])
def test_every_sequence_is_a_stream_and_its_order(split: str, segment_len: int | None):
    data = SortingTask(40, n_types=8, segment_len=segment_len, batch_size=4, n_train=8, n_val=8, n_test=8)
    n = {None: 1, 7: 7, 10: 5, 48: 1, 100: 1}[segment_len]
    found = batches(data, split)
    assert len(found) == len(getattr(data, f"{split}_dataloader")()) == 2 * n
    for start in (0, n):
        segments = found[start : start + n]
        assert [bool(s.fresh.all()) for s in segments] == [True] + [False] * (n - 1)
        assert all(s.fresh.all() == s.fresh.any() for s in segments)
        assert all(s.lengths is None for s in segments)
        assert all(s.inputs.size(1) == segment_len for s in segments[1:])
        assert segment_len is None or segments[0].inputs.size(1) <= segment_len
        for inputs, targets in zip(*together(segments), strict=True):
            stream, answers = inputs[:40].tolist(), targets[40:].tolist()
            assert [t - 1 for t in answers] == ordered([t - 1 for t in stream], 8)
            assert min(stream) >= 1
            assert inputs[40:].tolist() == [0, *answers[:-1]]
            assert (targets[:40] == IGNORE).all()


def test_every_test_sequence_once_on_every_number_of_processes():
    for world in (1, 2, 3):
        for n_test in (5, 7, 8):
            data = SortingTask(9, n_types=3, segment_len=5, batch_size=2, n_test=n_test)
            seen = []
            for rank in range(world):
                data.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": world, "rank": rank})
                segments = batches(data, "test")
                assert len({len(s.inputs) for s in segments}) == 1  # memories go from row to row
                assert len(segments) == len(data.test_dataloader())
                for i in range(0, len(segments), 3):
                    inputs, targets = together(segments[i : i + 3])
                    for row in range(len(inputs)):
                        lengths = [1 << 9 if s.lengths is None else int(s.lengths[row]) for s in segments[i : i + 3]]
                        if max(lengths) == 0:
                            assert (targets[row] == IGNORE).all()
                        else:
                            assert min(lengths) >= segments[i].inputs.size(1)
                            seen.append(tuple(inputs[row].tolist()))
            expected = [tuple(data.sequences("test").types(i) + 1) for i in range(n_test)]
            assert sorted(t[:9] for t in seen) == sorted(expected)


def test_the_distribution_drifts():
    """Of many sequences with the same two distributions, an early and a late part each have their own."""
    sequences = SortingTask(4000, n_types=5).sequences("test")
    for i in range(3):
        rng = np.random.default_rng((sequences.stream, i))
        weights = rng.integers(1, 10, (2, 5))
        p = weights / weights.sum(1, keepdims=True)
        types = sequences.types(i)
        for part in range(4):
            r = (part + 0.5) / 4
            share = np.bincount(types[1000 * part : 1000 * (part + 1)], minlength=5) / 1000
            assert np.abs(share - (1 - r) * p[0] - r * p[1]).max() < 0.06


def test_order_by_frequency():
    assert by_frequency(np.array([3, 1, 1, 4, 3, 0]), 7).tolist() == [3, 1, 4, 0, 2, 5, 6]
    assert by_frequency(np.array([], np.int64), 3).tolist() == [0, 1, 2]


def test_what_counting_reaches():
    rng = np.random.default_rng(0)
    streams = rng.integers(0, 6, (50, 30))
    for last in (0, 1, 10, 30, 99):
        right = 0
        for types in streams.tolist():
            left, guess = ordered(types, 6), ordered(types[max(0, 30 - last) :], 6)
            while left:
                right += next(t for t in guess if t in left) == left[0]
                left = left[1:]
        assert counting_accuracy(streams, 6, last) == pytest.approx(right / 300)
    assert counting_accuracy(streams, 6, 30) == 1
    few = SortingTask(512, n_types=8).sequences("test")
    streams = np.stack([few.types(i) for i in range(400)])
    assert counting_accuracy(streams, 8, 0) == pytest.approx(sum(1 / k for k in range(1, 9)) / 8, abs=0.03)
    assert counting_accuracy(streams, 8, 64) == pytest.approx(0.5, abs=0.03)


class Memories(pl.Callback):
    """Records where each row's memory stands after each batch."""

    def __init__(self) -> None:
        self.lengths = []

    def on_train_batch_end(self, trainer, module, *_) -> None:
        self.lengths.append(module.memory.length.tolist())

    on_test_batch_end = on_train_batch_end


def test_memories_go_from_segment_to_segment(tmp_path):
    sizes = {"mem_len": 8, "segment_len": 8, "n_basis": 8, "widths": (0.1, 0.2), "n_samples": 8}
    attention = partial(InfiniteAttention, **sizes, sticky=True)
    data = SortingTask(20, n_types=4, segment_len=8, batch_size=2, n_train=4, n_val=2, n_test=5)
    model = LanguageModel(Transformer(8, 2, 1, attention=attention, positions=None), data.vocab_size, accuracy=True)
    memories = Memories()
    run = trainer(tmp_path, [MemoryCarry(), memories], max_epochs=1, accumulate_grad_batches=3, num_sanity_val_steps=2)
    run.fit(model, data)
    assert run.global_step == 2
    assert memories.lengths == 2 * [[8, 8], [16, 16], [24, 24]]
    memories.lengths.clear()
    (result,) = run.test(model, data, verbose=False)
    assert memories.lengths == 2 * [[8, 8], [16, 16], [24, 24]] + [[8, 0], [16, 0], [24, 0]]
    assert result["test/tokens"] == 5 * 4
    assert 0 <= result["test/accuracy"] <= 1
    assert model.write_predictions(run.predict(model, data), tmp_path).startswith("scores of 5 documents")
    header, *rows = (tmp_path / "predictions.csv").read_text().splitlines()
    assert [header, *(row.rpartition(",")[0] for row in rows)] == [
        "index,targets,bits_per_target",
        *(f"{i},4" for i in range(5)),
    ]
