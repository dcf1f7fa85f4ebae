"""The laws that every module with the shape `y, state = module(x, state, lengths)` keeps.

One suite for all of them: `cases.py` says who keeps them. Sequences are several chunks, windows and memories long, for
a law held within one chunk is not held.
"""

import io
import typing
from contextlib import nullcontext

import pytest
import torch

import lit_effattn.attention
from lit_effattn import sequence
from lit_effattn.attention import Attention, CrossAttention
from tests.laws.cases import ATTENTIONS, CASES, CAUSAL, CAUSAL_ROTARY, CROSS, ROTARY, Case, subject
from tests.laws.tools import assert_close, assert_same, copied, each, gradients, inputs, splits, stream


def test_every_attention_kind_is_enrolled():
    exported = {name: getattr(lit_effattn.attention, name) for name in lit_effattn.attention.__all__}
    classes = {name: k for name, k in exported.items() if isinstance(k, type) and typing.get_origin(k) is None}
    for base, cases in ((Attention, ATTENTIONS), (CrossAttention, CROSS)):
        kinds = {name for name, k in classes.items() if issubclass(k, base)} - {base.__name__}
        enrolled = {type(subject(case.build())).__name__ for case in cases}
        assert kinds <= enrolled, f"{kinds - enrolled} keep no laws: see tests/laws/cases.py"
        assert all(case.definition is not None for case in cases)


def test_every_file_of_attention_exports_a_kind():
    """Else an attention that is not exported escapes the test above."""
    pending: list[type] = [Attention, CrossAttention]
    for cls in pending:
        pending += [c for c in cls.__subclasses__() if c.__module__.startswith("lit_effattn.")]
    assert {c.__name__ for c in pending} <= set(lit_effattn.attention.__all__)


# ------------------------------------------------------------------------------------------------------- 1. segments


STARTS = {
    "none": lambda module, n: None,
    "initial": lambda module, n: module.initial_state(2),
    "max_len": lambda module, n: module.initial_state(2, max_len=n),
}


# What a stream starts from, and whether its states are donated. Donated states from None have tests of their own.
STREAMS = pytest.mark.parametrize(
    ("start", "given_away"),
    [
        pytest.param(start, given_away, id=f"{'donated' if given_away else 'kept'}-{start}")
        for given_away in (False, True)
        for start in STARTS
        if not (given_away and start == "none")
    ],
)


@each(CAUSAL)
@STREAMS
def test_segments_equal_one_pass(case: Case, start: str, given_away: bool):
    _compare_segments(case, start, given_away)


# After the first call, a state begun from None is like any other. Only two things can go wrong with it: a module that
# makes the empty state itself writes to it in place, and layers of one kind share an empty state. One case for each
# module that does the former, and a stack for the latter.
BEGINS = {
    "SparseAttention-stride=5-pattern=fixed-summary=2",
    "LSHAttention-n_hashes=2-n_buckets=4-chunk_size=2",
    "LinearAttention-chunk_size=4",
    "PerformerAttention-chunk_size=4",
    "Transformer-concatenated",
}


@each([case for case in CAUSAL if case.name in BEGINS])
def test_donated_segments_from_none_equal_one_pass(case: Case):
    _compare_segments(case, "none", True)


def _compare_segments(case: Case, start: str, given_away: bool) -> None:
    module = case.build()
    n = case.long
    x = inputs(module, 2, n + 4)
    with torch.no_grad():
        whole, _ = module(x)
    for way in splits(n, case.unit):
        with torch.no_grad(), sequence.donated() if given_away else nullcontext():
            y, state = stream(module, x[:, :n], way, STARTS[start](module, n + 4))
            after, _ = module(x[:, n:], state)
        assert_close(y, whole[:, :n])
        assert_close(after, whole[:, n:])


@each(CAUSAL)
def test_gradients_flow_through_the_state(case: Case):
    """Modules never detach their state; whoever carries it does."""
    module = case.build()
    x = inputs(module, 2, case.long).requires_grad_()
    expected = gradients(module, module(x)[0], x)
    for way in splits(case.long, case.unit)[1:4]:
        y, _ = stream(module, x, way, module.initial_state(2))
        assert_close(gradients(module, y, x), expected)
    with sequence.donated():  # a gradient wants the old values: nothing may be overwritten
        y, _ = stream(module, x, [1] * case.long, module.initial_state(2, max_len=case.long))
        assert_close(gradients(module, y, x), expected)


def _structure(state) -> object:
    return (type(state), *map(_structure, state)) if isinstance(state, tuple) else state.numel() > 0


# The code that might write to a state depends on the class of the module, on those of the state, and on which of its
# tensors are empty: one case for each. Where both starts give the same, `max_len` is the one that is tested.
WRITTEN = {
    (type(m), _structure(STARTS[start](m, 9))): pytest.param(c, start, id=f"{start}-{c.name}")
    for c in reversed(CAUSAL)
    for m in [c.build()]
    for start in ("initial", "max_len")
}


@pytest.mark.parametrize(("case", "start"), WRITTEN.values())
def test_a_state_is_not_changed(case: Case, start: str):
    """Neither an empty state nor a later one, with gradients or without: each takes a path of its own."""
    module = case.build()
    x = inputs(module, 2, case.long)
    for graph in (False, True):
        with torch.set_grad_enabled(graph):
            state = STARTS[start](module, 2 * case.long)
            _check_unchanged(case, module, x, state)
            _check_unchanged(case, module, x, module(x, state)[1])


def _check_unchanged(case: Case, module, x: torch.Tensor, state) -> None:
    before = copied(state)
    for n in (1, case.unit + 1):
        first, after = module(x[:, :n], state)
        kept = copied(after)
        second, again = module(x[:, :n], state)
        assert_same(state, before)
        assert_same(after, kept)
        assert_same(again, after)
        assert_close(second, first, rtol=0, atol=0)


@each(CAUSAL)
def test_donating_ends_with_the_block(case: Case):
    module = case.build()
    x = inputs(module, 2, 3)
    with torch.no_grad():
        with sequence.donated():
            _, state = module(x, module.initial_state(2, max_len=9))
        before = copied(state)
        module(x[:, :1], state)
    assert_same(state, before)


@each([case for case in CAUSAL if case not in CROSS])
def test_a_state_that_was_donated_is_refused(case: Case):
    """Else the outputs would be of a cache that the first call has overwritten. A source is never overwritten."""
    module = case.build()
    x = inputs(module, 2, 1)
    refused = pytest.raises(ValueError, match=r"donated to an earlier call .* use the state that the call returned")
    with torch.no_grad():
        for first in (module.initial_state(2), module.initial_state(2, max_len=9)):
            with sequence.donated():
                _, second = module(x, first)
                with refused:
                    module(x, first)
                _, third = module(x, second)
            with refused:  # after the context too
                module(x, second)
            module(x, third)
            module(x, third)


@each(CAUSAL)
def test_sizes_are_final_with_max_len(case: Case):
    module = case.build()
    state = module.initial_state(2, max_len=case.long)
    before = [(t.shape, t.dtype) for t in sequence.tensors(state)]
    with torch.no_grad():
        for x in inputs(module, 2, case.long).split(case.unit + 1, 1):
            _, state = module(x, state)
            assert [(t.shape, t.dtype) for t in sequence.tensors(state)] == before


@each(CAUSAL)
def test_a_grown_state_goes_on_as_one_that_was_made_larger(case: Case):
    """At every size: rows that have filled the room or not, memories that are full or not, by prompts or by steps."""
    module = case.build()
    n, last = case.long, 2 * case.unit + 2
    x = inputs(module, 3, last + n)
    with torch.no_grad():
        for room in range(1, last):
            lengths = torch.tensor([room, room - 1, room // 2])
            larger = module(x[:, :room], module.initial_state(3, max_len=room + n), lengths)[1]
            expected = module(x[:, last:], larger)[0]
            for prompt in (room, 1):
                fed = lengths.clamp(max=prompt)
                _, state = module(x[:, :prompt], module.initial_state(3, max_len=room), fed)
                for i in range(prompt, room):
                    _, state = module(x[:, i : i + 1], state, (lengths > i).long())
                before = copied(state)
                grown = module.grow(state, room + n)
                assert_same(state, before)
                assert [t.numel() for t in sequence.tensors(grown)] == [t.numel() for t in sequence.tensors(larger)]
                assert_close(stream(module, x[:, last:], [1, 1, n - 2], grown)[0], expected)
                between = module.grow(module.grow(state, room + 1), room + n)
                assert_close(stream(module, x[:, last:], [n - 1, 1], between)[0], expected)


@each(CAUSAL)
def test_a_state_that_has_room_is_not_copied(case: Case):
    """Nor is one that grows by itself."""
    module = case.build()
    x = inputs(module, 2, case.long)
    for make in STARTS.values():
        _, state = module(x, make(module, case.long + 3))
        grown = module.grow(state, case.long + 3)
        assert type(grown) is type(state)
        assert all(a is b for a, b in zip(sequence.tensors(grown), sequence.tensors(state), strict=True))


@each(CAUSAL)
def test_a_grown_state_keeps_its_types(case: Case):
    """Those given to `initial_state`; a compiled step would be compiled again."""
    module = case.build()
    state = module.initial_state(2, max_len=1, dtype=torch.float32)
    assert [t.dtype for t in sequence.tensors(module.grow(state, 999))] == [t.dtype for t in sequence.tensors(state)]


@each(CAUSAL)
def test_growth_says_whether_the_state_grows(case: Case):
    module = case.build()
    state, sizes = module.initial_state(2), []
    with torch.no_grad():
        for x in inputs(module, 2, 6 * case.unit).split(case.unit, 1):
            _, state = module(x, state)
            sizes.append(sequence.nbytes(state))
    if module.bounded_by is None:
        _, from_none = module(inputs(module, 2, case.unit))
        assert {*sizes, sequence.nbytes(from_none)} == {sequence.nbytes(module.initial_state(2))}
    else:
        assert sizes[0] < sizes[2] < sizes[-1]


@each(CAUSAL)
def test_a_state_holds_no_more_than_it_counts(case: Case):
    """A view into something larger keeps all of that alive, uncounted, for as long as the state is carried."""
    module = case.build()
    with torch.no_grad():
        _, state = module(inputs(module, 2, case.long))
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in sequence.tensors(state)}
    assert sum(held.values()) <= sequence.nbytes(state)


@each([case for case in ATTENTIONS if case.causal])
def test_growth_names_an_option_that_ends_it(case: Case):
    module = case.build()
    if module.bounded_by:
        bounded = type(module)(8, 2, True, **{module.bounded_by: 4})
        assert bounded.bounded_by is None


# ------------------------------------------------------------------------------------------------------ 2. no future


@each(CAUSAL)
def test_no_output_depends_on_the_future(case: Case):
    module = case.build()
    n, c = case.long, case.unit
    x = inputs(module, 1, n)
    with torch.no_grad():
        y, _ = module(x)
        for t in {0, 1, c - 1, c, c + 1, 2 * c - 1, 2 * c, 3 * c, n - 1}:
            for change in (lambda v: v + 1e-3, lambda v: 12 * v):
                changed = x.clone()
                changed[:, t] = change(x[:, t])
                z, _ = module(changed)
                assert torch.equal(z[:, :t], y[:, :t]), f"position {t} changed an earlier output"
                # A hash may let a position see a single other one, and then all of it, whatever it asks for.
                end = n if case.jumps else t + 1
                assert not torch.equal(z[:, t:end], y[:, t:end]), f"position {t} did not change its own output"


# ------------------------------------------------------------------------------------------------ 3. rows are strangers


@each(CASES)
@pytest.mark.parametrize("strange", ["others", "nan"])
def test_a_row_does_not_depend_on_its_mates(case: Case, strange: str):
    """Nor on its place among them."""
    module = case.build()
    x = inputs(module, 3, case.long)
    mates = inputs(module, 3, case.long, seed=1) if strange == "others" else torch.full_like(x, torch.nan)
    mates[1] = mates[2] = x[1]
    n = case.long
    lengths, other_lengths = torch.tensor([n, n - 2, 3]), torch.tensor([1, n - 2, n - 2])
    with torch.no_grad():
        for a, b in ((None, None), (lengths, other_lengths)):
            y, state = module(x, lengths=a)
            z, other = module(mates, lengths=b)
            assert_close(z[1:], y[1].expand(2, -1, -1))
            if case.causal:
                after, _ = module(x, state)
                assert_close(module(x[[0, 1, 1]], other)[0][1:], after[1].expand(2, -1, -1))


@each([*CAUSAL, *CAUSAL_ROTARY])
@STREAMS
def test_rows_go_on_from_where_each_stands(case: Case, start: str, given_away: bool):
    """Prompts of different lengths, then all go on, one step and several at a time."""
    _compare_rows(case, start, given_away)


@each([case for case in CAUSAL if case.name == "Transformer-dealt"])
def test_donated_rows_go_on_from_none(case: Case):
    """From None, the states of a stack and of its softmax layer hold one tensor, `lengths`: neither may add to it."""
    _compare_rows(case, "none", True)


def _compare_rows(case: Case, start: str, given_away: bool) -> None:
    module = case.build()
    c = case.unit
    lengths = [1, 2 * c + 1, 0, 3 * c]
    prompt, rest = inputs(module, 4, 3 * c), inputs(module, 4, 2 * c + 3, seed=1)
    ways = [[1] * 3 + [c + 1, c - 1], [2 * c + 3]]
    with torch.no_grad():
        alone = [module(torch.cat([p[:n], r])[None])[0][0, n:] for p, r, n in zip(prompt, rest, lengths, strict=True)]
        for way in ways:
            with sequence.donated() if given_away else nullcontext():
                state = (
                    None if start == "none" else module.initial_state(4, max_len=6 * c if start == "max_len" else None)
                )
                _, state = module(prompt, state, torch.tensor(lengths))
                y, _ = stream(module, rest, way, state)
            assert_close(y, torch.stack(alone))


@each([*CAUSAL, *CAUSAL_ROTARY])
@pytest.mark.parametrize("start", STARTS)
def test_reset_rows_are_fresh_and_others_go_on(case: Case, start: str):
    module = case.build()
    n = case.long
    x, after = inputs(module, 3, n), inputs(module, 3, n, seed=1)
    x[2] = torch.nan  # what diverged is forgotten too
    rows = torch.tensor([False, True, True])
    state = None if start == "none" else module.initial_state(3, max_len=2 * n if start == "max_len" else None)
    with torch.no_grad():
        _, state = module(x, state)
        before = copied(state)
        reset = module.reset(state, rows)
        assert_same(state, before)
        assert type(reset) is type(state)
        assert_same(sequence.select(reset, torch.tensor([0])), sequence.select(state, torch.tensor([0])))
        y, state = stream(module, after, [1, n - 1], reset)
        assert_close(y[1:], module(after)[0][1:])
        assert_close(y[0], module(torch.cat([x, after], 1)[:1])[0][0, n:])


@each(CAUSAL)
def test_selected_rows_go_on(case: Case):
    module = case.build()
    n, rows = case.long, torch.tensor([2, 0, 0, 1])
    x, after = inputs(module, 3, n), inputs(module, 4, n, seed=1)
    lengths = torch.tensor([n, 2, case.unit])
    with torch.no_grad():
        _, state = module(x, None, lengths)
        y, _ = stream(module, after, [1, n - 1], sequence.select(state, rows))
        for i, row in enumerate(rows):
            alone, _ = module(torch.cat([x[row, : lengths[row]], after[i]])[None])
            assert_close(y[i], alone[0, lengths[row] :])


# ----------------------------------------------------------------------------------------------- 4. padding is nothing


GARBAGE = [100.0, float("nan")]
# A module that does not remove padding may yet mask finite numbers and replace NaN; infinity then gets through. Padding
# is removed in `forward`, so there is one case for each `forward`.
FORWARDS = list({type(subject(c.build())).forward: c for c in reversed(CASES)}.values())


def _padded(case: Case, garbage: float) -> tuple:
    """Return a module, rows of several lengths with `garbage` behind them, and these lengths."""
    module = case.build()
    c = case.unit
    lengths = torch.tensor([0, 1, c, c + 1, 3 * c, 3 * c + 1])
    x = inputs(module, len(lengths), 3 * c + 1)
    padding = ~sequence.valid_positions(lengths, x.size(1))
    x[padding] = garbage * torch.rand_like(x[padding])
    return module, x, lengths, padding


@each([*CASES, *ROTARY])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_padded_equals_trimmed(case: Case, garbage: float):
    _compare_trimmed(case, garbage, carried=False)


@each(FORWARDS)
def test_infinite_padding_equals_trimmed(case: Case):
    _compare_trimmed(case, float("inf"), carried=False)


@each(CAUSAL)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_padded_equals_trimmed_after_a_state(case: Case, garbage: float):
    _compare_trimmed(case, garbage, carried=True)


def _compare_trimmed(case: Case, garbage: float, carried: bool) -> None:
    module, x, lengths, padding = _padded(case, garbage)
    before = None
    if carried:
        with torch.no_grad():
            _, before = module(inputs(module, len(x), len(x), seed=1), None, torch.arange(len(x)))
    x.requires_grad_()
    y, state = module(x, before, lengths)
    found = gradients(module, y, x)

    assert (y[padding] == 0).all()
    assert (found["wanted[0]"][padding] == 0).all()
    total: dict[str, torch.Tensor] = {}
    for i, n in enumerate(lengths.tolist()):
        if n == 0:
            continue
        row = None if before is None else sequence.select(before, torch.tensor([i]))
        alone = x[i : i + 1, :n].detach().requires_grad_()
        z, after = module(alone, row)
        assert_close(y[i, :n], z[0])
        for name, gradient in gradients(module, z, alone).items():
            if name == "wanted[0]":
                assert_close(found[name][i, :n], gradient[0])
            else:
                total[name] = total.get(name, 0) + gradient
        if case.causal:
            _goes_on_the_same(module, sequence.select(state, torch.tensor([i])), after)
    if case.causal:  # the row of length 0 is where it was
        row = None if before is None else sequence.select(before, torch.tensor([0]))
        _goes_on_the_same(module, sequence.select(state, torch.tensor([0])), row)
    assert_close({name: found[name] for name in total}, total)


def _goes_on_the_same(module, state, expected) -> None:
    more = inputs(module, 1, 3, seed=2)
    with torch.no_grad():
        assert_close(module(more, state)[0], module(more, expected)[0])


@each(CAUSAL)
@pytest.mark.parametrize("given_away", [False, True], ids=["kept", "donated"])
def test_padding_takes_no_room(case: Case, given_away: bool):
    """Rows fill a state made with `max_len` to the last slot, in one call or in steps, beside rows that are full."""
    module = case.build()
    for room in (2, case.unit + 2, 3 * case.unit):
        held = torch.tensor([room, 0, room - 1, room // 2])
        x, more = inputs(module, 4, 2 * room + 1), inputs(module, 4, case.unit + 2, seed=1)
        last = sequence.valid_positions(room - held, room + 1)
        with torch.no_grad():
            _, state = module(x[:, :room], None, held)
            expected, state = module(x[:, room:], state, room - held)
            later, _ = module(more, state)
            for way in ([room + 1], [1] * room + [1], [1, room]):
                with sequence.donated() if given_away else nullcontext():
                    _, state = module(x[:, :room], module.initial_state(4, max_len=room), held)
                    outputs, fed = [], 0
                    for part in x[:, room:].split(way, 1):
                        y, state = module(part, state, (room - held - fed).clamp(0, part.size(1)))
                        outputs.append(y)
                        fed += part.size(1)
                assert_close(torch.cat(outputs, 1)[last], expected[last])
                assert_close(module(more, module.grow(state, room + more.size(1)))[0], later)


@each(CAUSAL)
def test_positions_beyond_the_room_are_refused(case: Case):
    """Of the row that has too many; kinds whose state does not grow take them."""
    module = case.build()
    room = case.unit
    x = inputs(module, 2, 2 * room)
    with torch.no_grad():
        _, state = module(x[:, :room], module.initial_state(2, max_len=room), torch.tensor([room, 1]))
        smaller = sequence.nbytes(state) < sequence.nbytes(module.initial_state(2, max_len=9 * room))
        for n, lengths, message in (
            (1, None, f"holds {room} positions and is given 1 more"),
            (1, torch.tensor([1, 0]), f"holds {room} positions and is given 1 more"),
            (2 * room, torch.tensor([0, 2 * room]), f"holds 1 positions and is given {2 * room} more"),
        ):
            with pytest.raises(ValueError, match=message) if smaller else nullcontext():
                module(x[:, :n], state, lengths)


@each(CASES)
def test_all_rows_empty(case: Case):
    module = case.build()
    x = torch.full((2, case.unit + 1, module.d_input), torch.nan, dtype=torch.float64, requires_grad=True)
    y, _ = module(x, None, torch.zeros(2, dtype=torch.long))
    assert (y == 0).all()
    assert all((g == 0).all() for g in gradients(module, y, x).values())


@each(CASES)
def test_full_lengths_are_no_lengths(case: Case):
    module = case.build()
    x = inputs(module, 2, case.long)
    with torch.no_grad():
        y, state = module(x, None, torch.full((2,), case.long))
        z, other = module(x)
    assert_close(y, z)
    if case.causal:
        _goes_on_the_same(module, sequence.select(state, torch.tensor([0])), sequence.select(other, torch.tensor([0])))


# --------------------------------------------------------------------------------------------------- 5. the definition


@pytest.mark.check
@each([*ATTENTIONS, *CROSS, *ROTARY])
def test_equals_the_definition(case: Case):
    module = case.build()
    c = case.unit
    for n in sorted({1, c - 1, c, c + 1, 2 * c + 1, 5 * c} - {0}):
        x = inputs(module, 2, n).requires_grad_()
        y, _ = module(x)
        expected = case.definition(module, x)
        assert_close(y, expected)
        assert_close(gradients(module, y, x), gradients(module, expected, x))


@each(CASES)
def test_gradcheck(case: Case):
    """Of outputs, and of outputs that came through a state, with respect to inputs and parameters."""
    module = case.build(d_model=4, n_heads=2)
    parameters = {name: p.detach().requires_grad_() for name, p in module.named_parameters()}

    def outputs(x, *values):
        given = dict(zip(parameters, values, strict=True))
        call = torch.func.functional_call
        if not case.causal:
            return call(module, given, (x,))[0]
        first, state = call(module, given, (x[:, :3],))
        return torch.cat([first, call(module, given, (x[:, 3:], state))[0]], 1)

    x = inputs(module, 1, case.unit + 2).requires_grad_()
    assert torch.autograd.gradcheck(outputs, (x, *parameters.values()), fast_mode=True)


# --------------------------------------------------------------------------------------------------------- 6. precision

LONG = 4096
# The spacing of numbers near 1 is 2⁻⁷ in bfloat16 and 2⁻¹⁰ in float16. An output is rounded to half of it, and so are
# x, the weights, q, k and v before, whose errors add at random: four spacings. A drifting sum is off by far more.
SPACINGS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def _narrow(case: Case, dtype: torch.dtype) -> tuple:
    """Return the module in float32, the module that computes in `dtype`, and the context to call it in."""
    exact, narrow = case.build(torch.float32, 32, 2), case.build(torch.float32, 32, 2)
    if dtype == torch.float16:
        narrow.half()
        exact.load_state_dict({k: v.float() for k, v in narrow.state_dict().items()})
        return exact, narrow, nullcontext()
    return exact, narrow, torch.autocast("cpu", dtype)


def _error(case: Case, y: torch.Tensor, exact: torch.Tensor) -> float:
    """The worst position's error, relative to its length; the median one's, where rounding makes outputs jump."""
    errors = (y.float() - exact).norm(dim=-1) / exact.norm(dim=-1)
    return (errors.median() if case.jumps else errors.max()).item()


@each(CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16_autocast", "float16"])
def test_long_sequences_in_half_the_bits(case: Case, dtype: torch.dtype):
    exact, narrow, context = _narrow(case, dtype)
    n = 2 * LONG if case.jumps else LONG  # a median needs more
    x = (torch.randn(1, n, exact.d_input) + torch.randn(exact.d_input)).half()  # the mean of the values is not 0
    with torch.no_grad():
        expected, _ = exact(x.float())
        with context:
            y, _ = narrow(x if dtype == torch.float16 else x.float())
    assert y.isfinite().all()
    assert _error(case, y, expected) < case.spacings * SPACINGS[dtype]


@each(CAUSAL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16_autocast", "float16"])
def test_streaming_in_half_the_bits(case: Case, dtype: torch.dtype):
    """A sum kept in bfloat16 stops growing after 256 steps."""
    exact, narrow, context = _narrow(case, dtype)
    third = 120 if case in ATTENTIONS else 70
    x = (torch.randn(1, 3 * third, exact.d_input) + torch.randn(exact.d_input)).half()
    with torch.no_grad():
        expected, _ = exact(x.float())
        with context:
            x = x if dtype == torch.float16 else x.float()
            y, state = stream(
                narrow, x[:, : 2 * third], [third] + [1] * third, narrow.initial_state(1, max_len=len(x[0]))
            )
            with sequence.donated():
                z, _ = stream(narrow, x[:, 2 * third :], [1] * third, state)
    y = torch.cat([y, z], 1)
    assert y.isfinite().all()
    assert _error(case, y, expected) < case.spacings * SPACINGS[dtype]


# -------------------------------------------------------------------------------------------------------- 7. round trip


INDUCTOR = {"SoftmaxAttention", "LinearAttention-chunk_size=4", "Transformer-rotary-post"}
# Compiling is slow: one of each kind, causal or not, with a state that grows or not. An EncoderDecoder is compiled in
# tests of its own, where it trains and where it generates.
COMPILED = list(
    {
        (type(subject(m := c.build())), m.causal, m.bounded_by): c
        for c in reversed(CASES)
        if c.name != "EncoderDecoder"
    }.values()
)


def _saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@each(CASES)
def test_parameters_survive_a_checkpoint(case: Case):
    module = case.build()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.randn_like(p))
        x = inputs(module, 2, case.long)
        fresh = case.build()
        assert not torch.equal(fresh(x)[0], module(x)[0])
        fresh.load_state_dict(_saved(module.state_dict()))
        assert_close(fresh(x)[0], module(x)[0], rtol=0, atol=0)


@each(CAUSAL)
@pytest.mark.parametrize("start", STARTS)
def test_a_state_survives_a_checkpoint(case: Case, start: str):
    module = case.build()
    n = case.long
    x = inputs(module, 2, n)
    with torch.no_grad():
        _, state = module(x, STARTS[start](module, 2 * n), torch.tensor([n, n - 2]))
        example = module.initial_state(1, max_len=5 if start == "max_len" else None)
        loaded = sequence.unpack(_saved(sequence.pack(state)), like=example)
        assert_same(loaded, state)
        assert_close(module(x, loaded)[0], module(x, state)[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c.name, marks=[] if c.causal and c.name not in INDUCTOR else pytest.mark.exhaustive)
        for c in COMPILED
    ],
)
def test_compiled_equals_eager(case: Case):
    _compare_compiled(case, "aot_eager")


@pytest.mark.slow
@each([case for case in CASES if case.name in INDUCTOR])
def test_compiled_by_inductor_equals_eager(case: Case):
    _compare_compiled(case, "inductor")


def _compare_compiled(case: Case, backend: str) -> None:
    torch._dynamo.reset()
    module = case.build()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    n = min(case.long, 2 * case.unit + 1)  # a graph repeats the segments, and compiling it takes as long
    x = inputs(module, 2, n).requires_grad_()
    lengths = torch.tensor([n, case.unit])

    y, state = compiled(x, None, lengths)
    expected, after = module(x, None, lengths)
    assert_close(y, expected)
    assert_close(gradients(module, y, x), gradients(module, expected, x))
    if not case.causal:
        return
    assert_close(compiled(x, sequence.detach(state))[0], module(x, sequence.detach(after))[0])


@each([case for case in COMPILED if case.causal])
def test_compiled_generation_equals_eager(case: Case):
    """Single steps into a state of final size; what was compiled for states given away is not run for those kept."""
    torch._dynamo.reset()
    module = case.build()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=False)
    n = case.unit + 2
    x = inputs(module, 2, n)
    with torch.no_grad():
        expected, _ = module(x)
        with sequence.donated():
            y, _ = stream(compiled, x, [1] * n, module.initial_state(2, max_len=n))
        assert_close(y, expected)
        _, state = module(x[:, :2], module.initial_state(2, max_len=n))
        before = copied(state)
        z, _ = compiled(x[:, 2:3], state)
        assert_close(z, expected[:, 2:3])
        assert_same(state, before)


@each(CAUSAL)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_state_of_other_rows_is_refused(case: Case, rows: int):
    """Broadcast, it would give every row the memory of one."""
    module = case.build()
    _, state = module(inputs(module, rows, 3))
    with pytest.raises(ValueError, match=f"x has 2 rows and the state {rows}"):
        module(inputs(module, 2, 3), state)
