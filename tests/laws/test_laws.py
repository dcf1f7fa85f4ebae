"""The laws that every module with the shape `y, state = module(x, state, lengths)` keeps.

`lit_effattn.laws` has the laws that any module with a state can keep; `cases.py` says who is enrolled in them. Here are
those of this package's contract alone: final sizes and growth, refused arguments, and the definition of each kind.
Sequences are several chunks, windows and memories long, for a law held within one chunk is not held.
"""

import inspect
import typing
from contextlib import nullcontext
from itertools import product

import pytest
import torch

import lit_effattn.attention
from lit_effattn import sequence
from lit_effattn.attention import (
    Attention,
    CrossAttention,
    RecurrentAttention,
)
from lit_effattn.laws import ContractAdapter, LawSuite
from lit_effattn.laws.law import Law, run
from lit_effattn.laws.numbers import Precision
from lit_effattn.laws.round_trips import Compiled
from lit_effattn.laws.subject import Subject, gradients, stream
from tests.laws.cases import ATTENTIONS, CASES, CAUSAL, CROSS, EACH, ROTARY, SHARING, STACKS, Case, CaseAdapter, subject
from tests.laws.tools import assert_close, assert_same, copied, each, inputs


def test_every_attention_kind_is_enrolled():
    exported = {name: getattr(lit_effattn.attention, name) for name in lit_effattn.attention.__all__}
    classes = {name: k for name, k in exported.items() if isinstance(k, type) and typing.get_origin(k) is None}
    for base, cases in ((Attention, ATTENTIONS), (CrossAttention, CROSS)):
        kinds = {name for name, k in classes.items() if issubclass(k, base) and not inspect.isabstract(k)}
        enrolled = {type(subject(case.example)).__name__ for case in cases}
        assert kinds <= enrolled, f"{kinds - enrolled} keep no laws: see tests/laws/cases.py"
        assert all(case.definition is not None for case in cases)


def test_every_file_of_attention_exports_a_kind():
    """Else an attention that is not exported escapes the test above."""
    pending: list[type] = [Attention, CrossAttention]
    for cls in pending:
        pending += [c for c in cls.__subclasses__() if c.__module__.startswith("lit_effattn.")]
    public = {c.__name__ for c in pending if not c.__name__.startswith("_")}  # others are bases of several kinds
    assert public <= set(lit_effattn.attention.__all__)


# --------------------------------------------------------------------------------------------- the laws of any module

STARTS = {
    "none": lambda module, n: None,
    "initial": lambda module, n: module.initial_state(2),
    "max_len": lambda module, n: module.initial_state(2, max_len=n),
}

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


def _structure(state) -> object:
    return (type(state), *map(_structure, state)) if isinstance(state, tuple) else state.numel() > 0


# The code that might write to a state depends on the class of the module, on those of the state, and on which of its
# tensors are empty: one case for each. Where both starts give the same, `max_len` is the one that is tested.
WRITTEN = {
    (type(m), _structure(STARTS[start](m, 9))): (c.name, start)
    for c in reversed(CAUSAL)
    for m in [c.example]
    for start in ("initial", "max_len")
}
# A module that does not remove padding may yet mask finite numbers and replace NaN; infinity then gets through. Padding
# is removed in `forward`, so there is one case for each `forward`.
FORWARDS = {type(subject(c.example)).forward: c.name for c in reversed(CASES)}
INDUCTOR = {"SoftmaxAttention", "LinearAttention-chunk_size=4", "Transformer-rotary-post"}
LONG_FLOAT16 = {"LinearAttention-chunk_size=4", "PerformerAttention-chunk_size=4"}  # sums over all positions
# A long call is compiled of a kind with a kernel; test_packing.py has one with a recurrent state.
LONG_COMPILED = {"PerformerAttention-chunk_size=4"}
# Steps are compiled of each kind of state that test_compiled.py does not trace, alone or in its decoder.
STEPS_COMPILED = {
    "PerformerAttention-chunk_size=4",
    "WindowedLinearAttention-window=3-chunk_size=2-feature_map=StirredHedgehog",
    "KimiDeltaAttention-chunk_size=4",
    "CompressiveAttention-mem_len=3-compressed_len=2-compression_rate=2-chunk_size=8",
    "LinearCrossAttention-feature_map=ReluFeatureMap-bias=False",
}


# These depend on the class of a module, not on its options.
ONCE = {"alive", "state-dict", "saved-state", "bounded", "donation-ends", "reset", "full-lengths", "empty-rows"}
# All options select rows alike; NaN shows what other numbers show, and segments include single steps.
ONCE_OF_VARIANTS = {
    ("alone", "alone"),
    ("alone", "others"),
    ("carried-gradients", "kept-initial"),
    ("padding", "large"),
    ("padding", "large-after-a-state"),
    ("select", ""),
    ("steps", "donated-max_len"),
    ("steps", "kept-none"),
}
# The first case of each class that is causal or not: what takes long is tried on these.
SLOWLY = {(type(subject(m := c.example)), m.causal): c.name for c in reversed(CASES) if c.name in EACH}.values()


class TestLaws(LawSuite):
    adapters: typing.ClassVar = [case.adapter() for case in [*CASES, *ROTARY]]

    @classmethod
    def marks(cls, adapter: CaseAdapter, law: Law, variant: str) -> list | None:
        """Leave out what another case shows as well."""
        name = adapter.name
        if law.name == "packed":  # test_packing.py, which compares gradients and states too
            return None
        if adapter.case in ROTARY:  # the laws about positions
            kept = law.name in ("reset", "ragged") or (law.name == "padding" and variant in ("large", "nan"))
            return [] if kept and variant != "donated-none" else None
        if variant == "donated-none":
            # From None, the states of a stack and of its softmax layer hold one tensor, `length`: neither adds to it.
            return [] if name in {"segments": BEGINS, "ragged": {"Transformer-dealt"}}.get(law.name, ()) else None
        if law.name == "unchanged":
            return [] if (name, variant) in WRITTEN.values() else None
        if variant == "infinite":
            return [] if name in FORWARDS.values() else None
        if law.name.startswith("compiled"):
            if name not in EACH or name == "EncoderDecoder":  # where it trains and where it generates
                return None
            quick = name in (LONG_COMPILED if law.name == "compiled" else STEPS_COMPILED)
        elif law.name == "gradients":  # `test_equals_the_definition` compares those of attentions
            # Those of the norm of remembered inputs are compared here alone.
            quick = adapter.case.definition is None and (name in SLOWLY or name == "Transformer-raw-memories")
        elif law.name == "half-precision":
            once = adapter.case in STACKS or isinstance(adapter.case.example, RecurrentAttention)
            forms = ["long-bfloat16"] if once or not adapter.causal else ["long-bfloat16", "steps-bfloat16"]
            forms += ["long-float16"] * (name in LONG_FLOAT16)
            # Where bins are drawn, rounding is seen most.
            quick = (
                variant in forms and name not in SHARING
                if name in SLOWLY
                else "=bins" in name and variant == "steps-float16"
            )
        elif law.name in ONCE or (law.name, variant) in ONCE_OF_VARIANTS:
            quick = name in EACH
        else:  # a state begun in another way has the same slots; "carried-gradients" and "reset" begin with them all
            quick = variant not in ("kept-initial", "kept-max_len", "donated-initial")
        return [] if quick else [pytest.mark.exhaustive]


@pytest.mark.slow
@each([case for case in CASES if case.adapter().longest < ContractAdapter.longest], quick=[])
def test_half_precision_of_long_sequences(case: Case):
    law, adapter = Precision(), case.adapter()
    adapter.longest, adapter.steps = ContractAdapter.longest, ContractAdapter.steps
    subject = Subject(adapter)
    assert [run(law, subject, variant) for variant in law.variants(subject)] == [None] * len(law.variants(subject))


@pytest.mark.slow
@each([case for case in CASES if case.name in INDUCTOR], quick=[])
def test_compiled_by_inductor_equals_eager(case: Case):
    law = Compiled()
    law.backend = "inductor"
    assert run(law, Subject(case.adapter()), "") is None


# ------------------------------------------------------------------------------------------- sizes, growth, refusals


def _sizes_are_final_with_max_len(case: Case):
    module = case.build()
    state = module.initial_state(2, max_len=case.long)
    before = [(t.shape, t.dtype) for t in sequence.tensors(state)]
    with torch.no_grad():
        for x in inputs(module, 2, case.long).split(case.unit + 1, 1):
            _, state = module(x, state)
            assert [(t.shape, t.dtype) for t in sequence.tensors(state)] == before


# The last has summaries before all slots of its memory are filled. Stacks grow in the next test.
@each(
    CAUSAL,
    [
        *(set(EACH) - SHARING - {case.name for case in STACKS}),
        "CompressiveAttention-mem_len=1-compressed_len=3-compression_rate=2-segment_len=5-chunk_size=4",
    ],
)
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


def _a_state_that_has_room_is_not_copied(case: Case):
    """Nor is one that grows by itself."""
    module = case.build()
    x = inputs(module, 2, case.long)
    for make in STARTS.values():
        _, state = module(x, make(module, case.long + 3))
        grown = module.grow(state, case.long + 3)
        assert type(grown) is type(state)
        assert all(a is b for a, b in zip(sequence.tensors(grown), sequence.tensors(state), strict=True))


def _a_grown_state_keeps_its_types(case: Case):
    """Those given to `initial_state`; a compiled step would be compiled again."""
    module = case.build()
    state = module.initial_state(2, max_len=1, dtype=torch.float32)
    assert [t.dtype for t in sequence.tensors(module.grow(state, 999))] == [t.dtype for t in sequence.tensors(state)]


def _a_state_holds_no_more_than_it_counts(case: Case):
    """A view into something larger keeps all of that alive, uncounted, for as long as the state is carried."""
    module = case.build()
    with torch.no_grad():
        _, state = module(inputs(module, 2, case.long))
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in sequence.tensors(state)}
    assert sum(held.values()) <= sequence.nbytes(state)


def test_growth_names_an_option_that_ends_it():
    for case in ATTENTIONS:
        module = case.build()
        if case.causal and module.bounded_by:
            assert type(module)(8, 2, True, **{module.bounded_by: 4}).bounded_by is None


def _padding_takes_no_room(case: Case):
    """Rows fill a state made with `max_len` to the last slot, in one call or in steps, beside rows that are full."""
    module = case.build()
    for room, given_away in product((2, case.unit + 2, 3 * case.unit), (False, True)):
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


def _positions_beyond_the_room_are_refused(case: Case):
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


def _a_state_of_other_rows_is_refused(case: Case):
    """Broadcast, it would give every row the memory of one."""
    module = case.build()
    for rows in (1, 3):
        _, state = module(inputs(module, rows, 3))
        with pytest.raises(ValueError, match=f"x has 2 rows and the state {rows}"):
            module(inputs(module, 2, 3), state)


@each(CAUSAL, set(EACH) - SHARING)
def test_a_state_keeps_its_size_and_refuses_what_does_not_fit(case: Case):
    _sizes_are_final_with_max_len(case)
    _a_state_that_has_room_is_not_copied(case)
    _a_grown_state_keeps_its_types(case)
    _a_state_holds_no_more_than_it_counts(case)
    _padding_takes_no_room(case)
    _positions_beyond_the_room_are_refused(case)
    _a_state_of_other_rows_is_refused(case)


# ----------------------------------------------------------------------------------------------------- the definition


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
