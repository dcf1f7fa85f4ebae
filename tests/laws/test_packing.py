"""Packed is alone: a row of several sequences gives what each of them gives by itself."""

from functools import partial
from itertools import pairwise

import pytest
import torch

from lit_effattn import Transformer, sequence
from lit_effattn.attention import (
    CompressiveAttention,
    InfiniteAttention,
    KimiDeltaAttention,
    LinearAttention,
    PerformerAttention,
    SoftmaxAttention,
)
from lit_effattn.laws import ContractAdapter, check
from lit_effattn.laws.subject import gradients
from lit_effattn.nn import packing
from tests.laws.cases import CASES, EACH, ROTARY, Case
from tests.laws.tools import assert_close, assert_same, copied, each, inputs


def _has_source(case: Case) -> bool:
    """Whether the state holds a source for each row."""
    return case.causal and any(True for _ in sequence.sources(case.example.initial_state(1)))


SOURCES = [case for case in CASES if _has_source(case)]
PACKED = [case for case in (*CASES, *ROTARY) if case not in SOURCES]
# With kernels, with a state that grows, and with auxiliary losses.
KINDS = {
    LinearAttention,
    PerformerAttention,
    KimiDeltaAttention,
    SoftmaxAttention,
    CompressiveAttention,
    InfiniteAttention,
}
SOME = [case.name for case in PACKED if case.name in EACH and type(case.example) in KINDS | {Transformer}]


@pytest.fixture
def _long_rows(monkeypatch: pytest.MonkeyPatch):
    """Pieces of other lengths are called by themselves, as those of long rows are."""
    monkeypatch.setattr(packing, "CALL_COST", 0)


def _pieces(case: Case) -> tuple[torch.Tensor, torch.Tensor, list[list[tuple[int, int]]]]:
    """Return starts, lengths, and the pieces of each row: of one position, of borders ± 1, none, and all of a row."""
    c = case.unit
    n = 4 * c + 3
    cuts = [[0, 1, c, c + 1, 2 * c + 3], [c - 1, 3 * c + 1], [], [0], [2, c + 2]]
    lengths = torch.tensor([n, n - 2, n, 0, c + 2])  # the fourth row is empty; the last has a start in its padding
    starts = torch.zeros(len(cuts), n, dtype=torch.bool)
    for row, begins in zip(starts, cuts, strict=True):
        row[begins] = True
    borders = [sorted({0, *(i for i in row if i < end), end}) for row, end in zip(cuts, lengths.tolist(), strict=True)]
    return starts, lengths, [list(pairwise(b)) for b in borders]


@each(PACKED, quick=EACH)
@pytest.mark.usefixtures("_long_rows")
def test_packed_is_alone(case: Case):
    """Outputs, gradients, states and auxiliary losses, without and after a state."""
    for carried in (False, True) if case.causal and case.name in EACH else [case.causal]:
        _check_packed(case, carried)


def _check_packed(case: Case, carried: bool) -> None:
    module = case.build()
    starts, lengths, pieces = _pieces(case)
    padding = ~sequence.valid_positions(lengths, starts.size(1))
    x = inputs(module, *starts.shape)
    x[padding] = float("nan")
    before = _before(module, case, len(x)) if carried else None
    kept = copied(before)
    x.requires_grad_()
    y, after = packing.packed(module, x, starts, before, lengths)
    found = gradients(module, y, x)

    assert_same(before, kept)
    assert (y[padding] == 0).all()
    assert (found["input 0"][padding] == 0).all()
    expected, states, losses = _alone(module, x, starts, pieces, before)
    assert_close(y, expected)
    assert_close(found, gradients(module, expected, x))
    for i, state in enumerate(states if case.causal else []):
        _go_on_alike(module, sequence.select(after, torch.tensor([i])), state)
        if losses[i] and losses[i][0] is not None:
            assert_close(sequence.losses(after)[i], torch.cat(losses[i]).sum())


def _go_on_alike(module, state, expected) -> None:
    more = inputs(module, 1, 3, seed=2)
    with torch.no_grad():
        assert_close(module(more, state)[0], module(more, expected)[0])


def _before(module, case: Case, rows: int, dtype: torch.dtype = torch.float64):
    """Return a state of other positions, if the module has one."""
    with torch.no_grad():
        return module(inputs(module, rows, case.unit + 1, seed=1).to(dtype))[1] if case.causal else None


def _alone(module, x, starts, pieces, before) -> tuple[torch.Tensor, list, list]:
    """Return the outputs of each piece by itself, 0 in padding, and of each row the last state and all losses."""
    y, after, losses = torch.zeros(*starts.shape, module.d_model, dtype=x.dtype), [], []
    for i, row in enumerate(pieces):
        state = None if before is None else sequence.select(before, torch.tensor([i]))
        losses.append([])
        for begin, end in row:
            z, state = module(x[i : i + 1, begin:end], None if starts[i, begin] else state)
            y = y.index_put((torch.tensor(i), torch.arange(begin, end)), z[0])
            losses[i].append(sequence.losses(state))
        after.append(state)
    return y, after, losses


@each(PACKED, quick=SOME)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.exhaustive)], ids=["bfloat16", "float16"]
)
@pytest.mark.usefixtures("_long_rows")
def test_packed_is_alone_in_half_precision(case: Case, dtype: torch.dtype):
    """Outputs differ by half a spacing of the numbers near 1, gradients by two; a factor of 12 stays in its piece."""
    if dtype == torch.float16 and "trigonometric" in case.name:
        return  # denominators near 0 make gradients overflow, packed or not
    module = case.build(dtype)
    starts, lengths, pieces = _pieces(case)
    x = inputs(module, *starts.shape).to(dtype).requires_grad_()
    before = _before(module, case, len(x), dtype)
    y, after = packing.packed(module, x, starts, before, lengths)
    expected, states, _ = _alone(module, x, starts, pieces, before)
    spacing = torch.finfo(dtype).eps
    assert _difference(y, expected) <= spacing / 2
    found, correct = (torch.cat([g.flatten() for g in gradients(module, z, x).values()]) for z in (y, expected))
    assert _difference(found, correct) <= 2 * spacing
    if case.causal:
        more = inputs(module, 1, 3, seed=2).to(dtype)
        for i, state in enumerate(states):
            row = sequence.select(after, torch.tensor([i]))
            assert _difference(module(more, row)[0], module(more, state)[0]) <= 2 * spacing
    larger = x.detach().clone()
    larger[0, case.unit + 1 :] *= 12
    with torch.no_grad():
        z, _ = packing.packed(module, larger, starts, before, lengths)
    assert _difference(z[0, : case.unit + 1], expected[0, : case.unit + 1]) <= spacing / 2


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.isfinite().all()
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@each([case for case in PACKED if case.name in EACH], quick={"GatedDeltaNetAttention-chunk_size=4"})
def test_packed_is_alone_where_it_is_compiled(case: Case):
    module = case.build()
    starts, lengths, pieces = _pieces(case)
    x = inputs(module, *starts.shape).requires_grad_()
    before = _before(module, case, len(x))
    torch._dynamo.reset()
    packed = torch.compile(partial(packing.packed, module), backend="aot_eager")
    y, after = packed(x, starts, before, lengths)
    expected, states, _ = _alone(module, x, starts, pieces, before)
    assert_close(y, expected)
    assert_close(gradients(module, y, x), gradients(module, expected, x))
    for i, state in enumerate(states if case.causal else []):
        _go_on_alike(module, sequence.select(after, torch.tensor([i])), state)


@each(PACKED, quick=SOME)
@pytest.mark.usefixtures("_long_rows")
def test_without_the_state_all_else_is_the_same(case: Case):
    """Pieces are then called in other groups where states grow."""
    module = case.build()
    starts, lengths, _ = _pieces(case)
    x = inputs(module, *starts.shape).requires_grad_()
    (y, state), (z, losses) = (packing.packed(module, x, starts, None, lengths, keep_state=k) for k in (True, False))
    assert_close(z, y)
    assert_close(gradients(module, z, x), gradients(module, y, x))
    assert (sequence.losses(state) is None) == (sequence.losses(losses) is None)
    if sequence.losses(state) is not None:
        assert_close(sequence.losses(losses), sequence.losses(state))
    assert sum(t.numel() for t in sequence.tensors(losses)) <= len(x) * len(sequence.losses_by_kind(state))


class Counting(torch.nn.Module):
    """The positions themselves, with the shape of each call."""

    causal = True

    def __init__(self, bounded_by: str | None) -> None:
        super().__init__()
        self.bounded_by = bounded_by
        self.calls: list[tuple[int, ...]] = []

    def forward(self, x, state=None, lengths=None):
        self.calls.append((len(x), x.size(1), *lengths.tolist()))
        return x, None


CALLS: list[tuple[int, str | None, bool, list[tuple[int, ...]]]] = [
    # 8 and 6 are alike, as are 5 and 4 of the others; the last piece of each row is in the first call.
    (0, "window", True, [(2, 9, 1, 9), (2, 8, 8, 6), (2, 5, 5, 4), (1, 1, 1)]),
    (5, "window", True, [(2, 9, 1, 9), (2, 8, 8, 6), (3, 5, 5, 4, 1)]),  # 4 positions of padding cost less
    (10, "window", True, [(2, 9, 1, 9), (5, 8, 8, 6, 5, 4, 1)]),  # as do 9
    (0, None, True, [(2, 9, 9, 8), (2, 6, 6, 5), (1, 4, 4), (2, 1, 1, 1)]),  # the last ones are 1 and 9
    (0, "window", False, [(2, 9, 9, 8), (2, 6, 6, 5), (1, 4, 4), (2, 1, 1, 1)]),
]
"""The cost of a call, what bounds the state, whether it is kept, and rows, positions and lengths of each call."""


def test_pieces_of_similar_length_are_called_together(monkeypatch: pytest.MonkeyPatch):
    sizes = [[6, 4, 8, 1], [1, 5, 9]]
    x = torch.arange(38.0).view(2, 19, 1)
    starts = torch.zeros(2, 19, dtype=torch.bool)
    for row, lengths in zip(starts, sizes, strict=True):
        row[[sum(lengths[:i]) for i in range(len(lengths))]] = True
    for cost, bounded_by, keep_state, calls in CALLS:
        monkeypatch.setattr(packing, "CALL_COST", cost)
        module = Counting(bounded_by)
        y, _ = packing.packed(module, x, starts, None, torch.tensor([19, 15]), keep_state=keep_state)
        assert module.calls == calls
        assert torch.equal(y, x.masked_fill(torch.arange(38).view(2, 19, 1) >= 19 + 15, 0))


def test_starts_of_cu_seqlens():
    starts = packing.starts_of(torch.tensor([0, 2, 3, 6]))
    assert starts.tolist() == [[True, False, True, True, False, False]]


def test_wrong_cu_seqlens_are_refused():
    for cu_seqlens in ([1, 2], [0, 2, 2], [0], [[0, 2]], [0.0, 2.0], [False, True]):
        with pytest.raises(ValueError, match="cu_seqlens is"):
            packing.starts_of(torch.tensor(cu_seqlens))
    with pytest.raises(ValueError, match=r"cu_seqlens is \[0, 3, 1\]"):
        packing.starts_of(torch.tensor([0, 3, 1], dtype=torch.uint8))


def test_wrong_starts_are_refused():
    module = CASES[0].build()
    x = inputs(module, 2, 5)
    for empty in (x[:0], x[:, :0]):
        with pytest.raises(ValueError, match="packed SoftmaxAttention: x has shape"):
            packing.packed(module, empty, torch.zeros(empty.shape[:2], dtype=torch.bool))
    with pytest.raises(ValueError, match="packed SoftmaxAttention: state has 3 rows; expected 2"):
        packing.packed(module, x, torch.zeros(2, 5, dtype=torch.bool), module.initial_state(3))
    with pytest.raises(ValueError, match=r"packed SoftmaxAttention: starts is torch.bool of shape \(2, 4\)"):
        packing.packed(module, x, torch.zeros(2, 4, dtype=torch.bool))
    both_ways = Transformer(x.size(-1), 1, 1, causal=False).double()
    with pytest.raises(ValueError, match="packed Transformer: state was given, but causal=False"):
        packing.packed(both_ways, x, torch.zeros(2, 5, dtype=torch.bool), module.initial_state(2))
    with pytest.raises(ValueError, match="expected booleans"):
        packing.packed(module, x, torch.zeros(2, 5))


class Forgetful(torch.nn.Module):
    """The mean of all positions, padding included."""

    causal, d_input, bounded_by = False, 4, None

    def initial_state(self, batch_size):
        return None

    def forward(self, x, state=None, lengths=None):
        return x - x.mean(1, keepdim=True), None


def test_the_law_packs_modules_of_the_contract():
    (kept,) = check(partial(LinearAttention, 8, 2, chunk_size=4), laws=["packed"]).results
    assert kept.status == "ok"
    (broken,) = check(Forgetful, laws=["packed"]).broken
    assert broken.case == "batch 1, length 3, split 1 + 2"
    (unchecked,) = check(ContractAdapter(Forgetful, padding=None), laws=["packed"]).results
    assert unchecked.reason == "the adapter has no `packed`"


def test_a_source_for_each_row_is_refused():
    for module in (case.build() for case in SOURCES):
        with pytest.raises(NotImplementedError, match="give each target a row of its own"):
            packing.packed(module, inputs(module, 1, 4), torch.zeros(1, 4, dtype=torch.bool), module.initial_state(1))
