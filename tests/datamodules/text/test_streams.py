import itertools
import warnings

import numpy as np
import pytest
import torch

from lit_effattn.datamodules.common import packing
from lit_effattn.datamodules.common.tokens import IGNORE
from lit_effattn.datamodules.text.documents import Documents
from lit_effattn.datamodules.text.streams import (
    InOrder,
    ShuffledWholeDocuments,
    StreamLoader,
    TokenStreams,
    WholeDocuments,
)

START = 999
DOCUMENTS = [(1,), (2,), (5,), (1, 1), (7, 3), (4, 1, 6), (3, 3, 3), (13, 2, 8, 1), (40,), (9, 30, 2)]
SETTINGS = list(itertools.product(DOCUMENTS, (1, 2, 3, 64), (1, 2, 7), (1, 3), (False, True)))


def streams(
    sizes, segment_len, batch_size, world=1, rank=0, *, joined=False, drop_last=False, packed=False, kind=TokenStreams
):
    borders = np.concatenate([[0], np.cumsum(sizes)])
    return kind(
        np.arange(borders[-1], dtype=np.uint16),
        borders,
        start=START,
        segment_len=segment_len,
        batch_size=batch_size,
        num_replicas=world,
        rank=rank,
        joined=joined,
        drop_last=drop_last,
        packed=packed,
    )


def batches(*args, **options):
    made = streams(*args, **options)
    return [made[t] for t in range(len(made))]


def by_definition(sizes, segment_len, n_streams, joined, drop_last):
    """Of every stream its segments, each a list of (input, target), and whether it is fresh; tokens are 0, 1, 2, …"""
    pairs, count = [], 0
    for size in sizes:
        pairs.append([(START, count)] + [(i - 1, i) for i in range(count + 1, count + size)])
        count += size
    texts = [[pair for text in pairs for pair in text]] if joined else pairs
    segments = []
    for text in texts:
        for i in range(0, len(text), segment_len):
            segments.append((text[i : i + segment_len], i == 0))
    if drop_last and len(texts) == 1 and len(segments[-1][0]) < segment_len:
        segments.pop()
    if drop_last:
        segments = segments[: len(segments) // n_streams * n_streams]
    rows = [segments[len(segments) * r // n_streams : len(segments) * (r + 1) // n_streams] for r in range(n_streams)]
    return [[(pairs, is_fresh or t == 0) for t, (pairs, is_fresh) in enumerate(row)] for row in rows]


def row_of(batch, row):
    n = batch.inputs.size(1) if batch.lengths is None else int(batch.lengths[row])
    pairs = list(zip(batch.inputs[row, :n].tolist(), batch.targets[row, :n].tolist(), strict=True))
    assert (batch.targets[row, n:] == IGNORE).all()
    assert (batch.inputs[row, n:] == 0).all()
    return (pairs, bool(batch.fresh[row])) if n else None


@pytest.mark.parametrize("world", [1, 3])
def test_packed_segments_are_joined_ones_with_the_starts_of_documents(world):
    for sizes, segment_len in itertools.product(DOCUMENTS, (1, 3, 64)):
        packed = batches(sizes, segment_len, 2, world, world - 1, joined=True, packed=True)
        joined = batches(sizes, segment_len, 2, world, world - 1, joined=True)
        for batch, other in zip(packed, joined, strict=True):
            assert other.starts is None
            assert torch.equal(batch.starts, batch.inputs == START)
            assert torch.equal(batch.inputs, other.inputs)
            assert torch.equal(batch.targets, other.targets)


def whole_documents(sizes, segment_len, window):
    """The rows by first fit, each a list of pieces, which are lists of (input, target); tokens are 0, 1, 2, …"""
    pieces, count, rows = [], 0, []
    for size in sizes:
        pairs = [(START, count)] + [(i - 1, i) for i in range(count + 1, count + size)]
        pieces += [pairs[i : i + segment_len] for i in range(0, size, segment_len)]
        count += size
    for begin in range(0, len(pieces), window):
        filled = []
        for piece in pieces[begin : begin + window]:
            room = [row for row in filled if sum(map(len, row)) + len(piece) <= segment_len]
            if not room:
                filled.append([])
            (room or filled[-1:])[0].append(piece)
        rows += filled
    return rows


@pytest.mark.parametrize("window", [3, 1024])
@pytest.mark.parametrize("drop_last", [False, True])
def test_rows_of_whole_documents_by_definition(drop_last, window, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packing, "WINDOW", window)
    compared = 0
    for sizes, segment_len, batch_size, world, _ in SETTINGS:
        expected = whole_documents(sizes, segment_len, window)
        n_rows, n_batches = batch_size * world, len(expected) // (batch_size * world)
        if drop_last and (n_batches == 0 or segment_len > sum(sizes)):
            continue
        for rank in range(world):
            made = batches(sizes, segment_len, batch_size, world, rank, drop_last=drop_last, kind=WholeDocuments)
            assert len(made) == (n_batches if drop_last else -(-len(expected) // n_rows))
            for t, batch in enumerate(made):
                for i in range(batch_size):
                    row = expected[index] if (index := t * n_rows + rank * batch_size + i) < len(expected) else []
                    pairs = [pair for piece in row for pair in piece]
                    assert row_of(batch, i) == ((pairs, True) if pairs else None)
                    begins = np.cumsum([0, *map(len, row)])[: len(row)]
                    assert batch.starts[i].nonzero()[:, 0].tolist() == begins.tolist()
                    compared += len(row)
    assert compared > 1000


def test_an_epoch_with_fewer_rows_repeats_the_first():
    made = streams((3, 3, 3, 3), 4, 2, drop_last=True, kind=WholeDocuments)
    made._divide(np.arange(9), np.array([0, 3, 6, 9]))
    assert made[1].targets[:, :3].tolist() == [[6, 7, 8], [0, 1, 2]]
    documents = Documents(np.arange(40), np.array([0, 6, 10, 16, 20, 26, 30, 36]), np.array([6, 4] * 4))
    options = {"start": START, "segment_len": 10, "num_replicas": 1, "rank": 0, "joined": True, "drop_last": True}
    options |= {"shuffle_seed": 5}  # whose first epoch has more rows than the second
    n_rows = len(ShuffledWholeDocuments(documents, batch_size=1, **options))
    epochs = ShuffledWholeDocuments(documents, batch_size=n_rows, **options)
    assert {len(epochs[(epoch, 0)].inputs) for epoch in range(5)} == {n_rows}


def test_too_few_rows_of_whole_documents_are_refused():
    with pytest.raises(ValueError, match=r"batch_size=3 makes 3 streams, but the text gives only 2 segments"):
        streams((3, 2), 4, 3, drop_last=True, kind=WholeDocuments)


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_by_definition(drop_last):
    compared = 0
    for sizes, segment_len, batch_size, world, joined in SETTINGS:
        expected = by_definition(sizes, segment_len, batch_size * world, joined, drop_last)
        if drop_last and (not expected[0] or segment_len > sum(sizes)):
            continue
        for rank in range(world):
            actual = batches(sizes, segment_len, batch_size, world, rank, joined=joined, drop_last=drop_last)
            assert len(actual) == max(len(row) for row in expected)
            for row in range(batch_size):
                segments = [segment for batch in actual if (segment := row_of(batch, row)) is not None]
                assert segments == expected[rank * batch_size + row]
                compared += len(segments)
    assert compared > 1000


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_two_processes_have_the_rows_of_one(joined, drop_last):
    one = batches((50, 7, 31), 4, 6, joined=joined, drop_last=drop_last)
    two = [batches((50, 7, 31), 4, 3, 2, rank, joined=joined, drop_last=drop_last) for rank in range(2)]
    assert len(one) == len(two[0]) == len(two[1]) >= 3
    for whole, *halves in zip(one, *two, strict=True):
        for name, value in whole._asdict().items():
            parts = [getattr(half, name) for half in halves]
            if value is None:
                assert parts == [None, None]  # also the lengths: the same computation, bit for bit
            else:
                assert torch.equal(value, torch.cat(parts))


def test_training_on_one_text_is_all_full():
    for batch in batches((101,), 5, 4, drop_last=True):
        assert batch.lengths is None
        assert batch.inputs.shape == (4, 5)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert not (batch.targets == IGNORE).any()


def test_too_little_text_is_refused():
    with pytest.raises(ValueError, match=r"segment_len=11 .* 10 training tokens"):
        streams((6, 4), 11, 1, drop_last=True)
    with pytest.raises(ValueError, match=r"batch_size=6 makes 6 streams.*5 segments of segment_len=2.*batch_size=5"):
        streams((11,), 2, 6, drop_last=True)
    with pytest.raises(ValueError, match=r"batch_size=3 in each of 2 processes makes 6 .*batch_size=2,"):
        streams((11,), 2, 3, 2, drop_last=True)
    with pytest.raises(ValueError, match=r"at most 5 processes"):
        streams((11,), 2, 1, 6, drop_last=True)
    streams((6, 4), 11, 1)  # evaluation pads


# Going on


def loader(world=1, batch_size=2, segment_len=3, size=50):
    made = streams((size,), segment_len, batch_size, world, drop_last=True)
    return StreamLoader(made, batch_size=None, sampler=InOrder(made))


def epoch_of(made, epoch):
    made.sampler.set_epoch(epoch)
    return [(batch.inputs.tolist(), batch.fresh.tolist()) for batch in made]


def test_another_number_of_processes_starts_afresh_and_says_so():
    first = loader()
    next(taken := iter(first))
    next(taken)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader().load_state_dict(first.state_dict())
    second = loader(world=2, batch_size=2)
    with pytest.warns(UserWarning, match="2 processes instead of 1.*restart"):
        second.load_state_dict(first.state_dict())
    assert epoch_of(second, 0) == epoch_of(loader(world=2, batch_size=2), 0)


@pytest.mark.parametrize("change", [{"batch_size": 4}, {"segment_len": 6}])
def test_other_segments_are_refused(change):
    first = loader()
    next(iter(first))
    name = next(iter(change))
    was = {"batch_size": 2, "segment_len": 3}[name]
    with pytest.raises(ValueError, match=f"{name}={change[name]}, but the interrupted run had {was}"):
        loader(**change).load_state_dict(first.state_dict())


@pytest.mark.parametrize("name", ["batch_size", "segment_len", "shuffle_seed"])
def test_a_position_with_a_tensor_for_a_number_is_refused_in_a_line(name: str):
    first = loader()
    next(iter(first))
    with pytest.raises(ValueError, match=f"{name}=.*, but the interrupted run had tensor") as caught:
        loader().load_state_dict({**first.state_dict(), name: torch.ones(2, 3)})
    assert "\n" not in str(caught.value)


def test_another_text_is_refused():
    first = loader()
    next(iter(first))
    second = loader(size=80)
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=r"after 1 of 8 batches.* has 13 now"):
        next(iter(second))
