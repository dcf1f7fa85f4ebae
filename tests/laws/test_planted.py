"""Ten bugs in a module that knows nothing of this package: each is found by a law, shrunk, and told in plain words."""

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lit_effattn.laws import LAWS, Adapter, BrokenLawError, ContractAdapter, LawSuite, check, tree
from lit_effattn.laws.comparison import TOLERANCES, Pair, difference
from tests.laws.planted import Mixer, MixerAdapter
from tests.laws.planted_sum import SumAdapter

# The laws that find the bug, and the smallest case of the first of them.
BUGS = {
    "leak over a split": (["segments", "steps"], "batch 1, length 2, split 1 + 1, kept-none"),
    "mask off by one": (["no-future"], "batch 1, length 2"),
    "mutated cache": (["unchanged"], "batch 1, length 2, split 1 + 1, none"),
    "mixed rows": (["alone"], "batch 2, length 2, split 1 + 1, alone"),
    "dropped convolution": (["segments"], "batch 1, length 3, split 1 + 2, kept-none"),
    "float16 sum": (["half-precision"], ""),  # the length at which it exceeds the bound depends on rounding
    "padding in the denominator": (["padding", "ragged"], "batch 1, length 2, valid positions [1], large"),
    "positions from 0": (["segments", "steps"], "batch 1, length 2, split 1 + 1, kept-none"),
    "reset keeps the maximum": (["reset"], ""),
    "donated state reused": (["donation-ends"], "batch 1, length 2, split 1 + 1"),
}
UNCOMPILED = [name for name in LAWS if not name.startswith("compiled")]


def test_a_mixer_without_a_bug_keeps_all_laws():
    report = check(MixerAdapter())
    assert report.ok, report
    assert {r.law for r in report.results if r.status == "not checked"} == {
        *("combine", "packed", "empty-rows", "saved-state", "generation")
    }


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_and_shrunk(bug: str):
    laws, case = BUGS[bug]
    report = check(MixerAdapter(bug), laws=laws, shrink_seconds=20)
    assert [result.status for result in report.results] == ["broken"] * len(laws), report
    first = report.results[0]
    assert first.case == case or not case, first.case
    assert int(re.search(r"length (\d+)", first.case)[1]) <= (4 if bug != "float16 sum" else 2048)
    text = str(report)
    assert all(word in text for word in (first.title, first.difference, first.detail, first.case, first.inputs))
    assert "seed" in first.inputs


# The law that finds the bug, and its smallest case.
BUGS_OF_SUM = {
    "detached state": ("carried-gradients", "batch 1, length 2, split 1 + 1, kept-none"),
    "growing state": ("bounded", "batch 1, length 6, split 6 × 1"),
    "constant state declared to grow": ("bounded", "batch 1, length 6, split 6 × 1"),
    "half of a combination": ("combine", "batch 1, length 4, split 1 + 1 + 1 + 1"),
    "rows in order": ("select", "batch 2, length 2, split 1 + 1"),
    "lengths double the state": ("full-lengths", "batch 1, length 1"),
    "outputs at padding": ("empty-rows", "batch 1, length 1, valid positions [0]"),
    "gradient of the wrong sign": ("gradients", "batch 1, length 1"),
    "value outside the state_dict": ("state-dict", "batch 1, length 1"),
    "state loaded twice as large": ("saved-state", "batch 1, length 2, split 1 + 1, none"),
}


def test_a_sum_without_a_bug_keeps_the_laws():
    report = check(SumAdapter(), laws=dict.fromkeys(law for law, _ in BUGS_OF_SUM.values()))
    assert {result.status for result in report.results} == {"ok"}, report


def test_a_bug_of_a_sum_is_found_and_shrunk():
    for bug, (law, case) in BUGS_OF_SUM.items():
        (result,) = check(SumAdapter(bug), laws=[law]).results
        assert (bug, result.status, result.case) == (bug, "broken", case)


class Constant(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))

    def forward(self, x: torch.Tensor, state: tuple | None = None) -> tuple:
        return self.value.expand_as(x) * 1, (x[:, -1],)


@pytest.mark.parametrize(
    ("value", "told"), [(1.0, "two rows have the same"), (float("nan"), "outputs are not finite")], ids=["1", "nan"]
)
def test_constant_and_nan_do_not_pass(value: float, told: str):
    report = check(Adapter(partial(Constant, value), width=4), laws=UNCOMPILED)
    assert not report.ok
    assert told in str(report)
    nothing = {r.law for r in report.results if r.status == "ok"}
    assert not nothing & {"no-future", "reset"}
    if value != value:
        assert not nothing & {"segments", "steps", "alone", "select"}
    with pytest.raises(BrokenLawError, match=r"^Constant: \d+ laws checked .* broken: alive"):
        report.raise_if_broken()


def test_nan_for_other_inputs_does_not_pass():
    class Undefined(Constant):
        def forward(self, x, state=None):
            return x.cumsum(1) * (self.value if x.std() > 1.5 else float("nan")), None

    (result,) = check(Adapter(partial(Undefined, 1.0), width=4, stateful=False), laws=["alive"]).results
    assert "outputs are not finite" in result.difference


@pytest.mark.parametrize("expected", [float("inf"), float("-inf"), float("nan")])
def test_no_number_is_near_infinity_or_nan(expected: float):
    for got in (1.0, -expected):
        pair = Pair("outputs", torch.tensor([got, 1.0]), torch.tensor([expected, 1.0]))
        assert str(difference(pair, TOLERANCES[torch.float32])).startswith("outputs: differ by NaN or infinity")


def test_a_difference_names_its_tensor():
    same, one = torch.zeros(2), torch.ones(2)
    pair = Pair("states", {"keys": same, "values": one}, {"keys": same, "values": same})
    assert str(difference(pair, TOLERANCES[torch.float32])).endswith("first at index [0] of values")


def test_states_are_equal_to_the_bit():
    state = {"length": 3, "sums": [torch.tensor([1.0, float("nan")])]}
    assert tree.same(state, tree.clone(state))
    assert not tree.same(state, {"length": 3, "sums": [torch.tensor([1.0 + 1e-7, float("nan")])]})


def test_a_bug_of_the_second_compiled_single_step_is_found():
    class Wrong(Constant):
        def forward(self, x, state=None):
            single = torch.compiler.is_compiling() and x.size(1) == 1
            after = x.new_full(x[:, -1].shape, single)
            return x if state is None or not single else x + state[0][:, None], (after,)

    (result,) = check(Adapter(partial(Wrong, 1.0), width=4), laws=["compiled-steps"]).results
    assert result.status == "broken"


def test_random_outputs_do_not_pass():
    class Noise(Constant):
        def forward(self, x, state=None):
            return x + torch.randn_like(x), (x[:, -1],)

    assert "outputs of two calls on the same inputs" in str(
        check(Adapter(partial(Noise, 1.0), width=4), laws=["alive"])
    )


def test_an_exception_of_the_module_is_an_error_of_its_law():
    class Careless(Constant):
        def forward(self, x, state=None):
            if state is not None:
                raise KeyError("no such state")
            return x, (x[:, -1],)

    report = check(Adapter(partial(Careless, 1.0), width=4), laws=["alone", "steps"])
    assert [r.status for r in report.results] == ["error", "error"]
    assert "KeyError: 'no such state'" in str(report)


def test_a_report_says_how_to_draw_the_inputs_again():
    """The last shapes are those of what was compared, for each seed."""
    report = check(MixerAdapter("mixed rows"), laws=["alone"])
    drawn = "torch.float64 of shape (2, 1, 4), seed"
    assert report.broken[0].inputs == f"{drawn} 0; {drawn} 2"
    assert f"\n  inputs: {drawn} 0; {drawn} 2\n" in str(report)


def test_bitwise_is_stricter():
    report = check(MixerAdapter(), bitwise=True)
    assert "segments" in {r.law for r in report.broken}  # the running maximum of a segment is another one
    assert check(MixerAdapter(), laws=["segments"]).ok


@pytest.mark.parametrize(
    ("options", "wrong", "status"),
    [
        ({}, 1, "broken"),
        ({"magnifies": True}, 1, "ok"),
        ({"magnifies": True}, 3, "broken"),
        ({"magnifies": True}, -15, "broken"),
        ({"jumps": True}, 9, "ok"),
        ({"jumps": True}, 11, "broken"),
    ],
)
def test_half_precision_may_be_off_in_a_share_of_the_outputs(options: dict[str, bool], wrong: int, status: str):
    """`wrong` of 20 outputs are off, or the last ones. The first is 0 in both types."""

    class Off(Constant):
        def forward(self, x, state=None):
            t = torch.arange(x.size(1))
            off = (t % 20 < wrong) | (t >= x.size(1) + min(wrong, 0))
            y = torch.where(t == 0, 0.0, x[..., 0])
            return torch.where(off & (self.value.dtype == torch.float16), -y, y)[..., None] * 1.0, None

    adapter = Adapter(partial(Off, 1.0), width=4, stateful=False, longest=400, **options)
    assert [result.status for result in check(adapter, laws=["half-precision"]).results] == [status]


def test_a_class_that_is_no_module_has_the_attributes_of_its_adapter():
    class Sum:
        d_model, bounded_by = 4, None

        def __call__(self, x, state=None, lengths=None):
            y = x.cumsum(1) + (0 if state is None else state[0][:, None])
            return y, (y[:, -1],)

        def initial_state(self, batch_size, max_len=None):
            return (torch.zeros(batch_size, 4, dtype=torch.float64),)

    class Jumping(ContractAdapter):
        jumps = True

    assert check(Sum, laws=["steps", "segments"]).ok
    assert (Jumping(Sum).jumps, Jumping(Sum, jumps=False).jumps, ContractAdapter(Sum).jumps) == (True, False, False)


def test_the_callers_random_numbers_stay():
    torch.manual_seed(5)
    check(partial(nn.GRU, 4, 4, batch_first=True), laws=["alone"])
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="laws='order' is not a law; there are alive,"):
        check(MixerAdapter(), laws=["order"])
    adapter = MixerAdapter()
    adapter.bitwise = frozenset({"order", "segments"})
    with pytest.raises(ValueError, match=r"bitwise=\['order'\] are not laws; there are alive,"):
        check(adapter, laws=["alive"])
    with pytest.raises(TypeError, match=r"has no option 'units'; there are .*unit"):
        Adapter(partial(Constant, 1.0), units=3)
    with pytest.raises(ValueError, match=r"a Constant, for which there is no built-in adapter; write one"):
        check(partial(Constant, 1.0))
    with pytest.raises(ValueError, match="give the adapter width="):
        check(Adapter(partial(Constant, 1.0)), laws=["alive"])
    for laws in ("segments", []):
        with pytest.raises(ValueError, match="must be a list of at least one name"):
            check(MixerAdapter(), laws=laws)
    for option, value in {"unit": 0, "spacings": float("nan"), "padding": "middle", "least": 2}.items():
        with pytest.raises(ValueError, match=f"Constant: {option}={value!r} must be"):
            check(Adapter(partial(Constant, 1.0), width=4, **{option: value}))
    with pytest.raises(ValueError, match=r"dtype='float32' must be one of torch\.float64"):
        check(MixerAdapter(), dtype="float32")
    with pytest.raises(ValueError, match="batch_first=False; make the module with batch_first=True"):
        check(nn.GRU(4, 4))


class Stack(MixerAdapter):
    """Layers of mixers, each with its bug."""

    def __init__(self, *bugs: str) -> None:
        super().__init__()
        self.bugs, self.name = bugs, f"Stack of {list(bugs)}"

    def make(self, width=None):
        torch.manual_seed(1)
        return Layers(self.bugs)

    def input_width(self, module):
        return 4

    def smaller(self):
        for bug in dict.fromkeys(self.bugs):
            yield Stack(bug)


class Layers(nn.Module):
    def __init__(self, bugs: tuple[str, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixer(4, bug) for bug in bugs)

    def empty(self, rows, like):
        return [layer.empty(rows, like) for layer in self.layers]

    def forward(self, x, state=None, lengths=None):
        states = []
        for layer, before in zip(self.layers, state or [None] * len(self.layers), strict=True):
            x, after = layer(x, before, lengths)
            states.append(after)
        return x, states


def test_a_stack_shrinks_to_the_layer_with_the_bug():
    (result,) = check(Stack("", "positions from 0", ""), laws=["steps"]).results
    assert result.status == "broken"
    assert result.module == "Stack of ['positions from 0']"
    assert check(Stack("", ""), laws=["steps"]).ok


def _cases(suite: LawSuite) -> list[Any]:
    made: list[Any] = []
    suite.pytest_generate_tests(SimpleNamespace(fixturenames=["law_case"], parametrize=lambda _, c: made.extend(c)))
    return made


def test_marks_with_other_arguments_make_other_tests():
    class Suite(LawSuite):
        adapter = MixerAdapter()

        @classmethod
        def marks(cls, adapter, law, variant):
            return [pytest.mark.skipif(law.name == "alive", reason="tried elsewhere")]

    alive, others = _cases(Suite())
    assert [law.name for law, _ in alive.values[0][1]] == ["alive"]
    assert len(others.values[0][1]) > 20


def test_a_suite_names_each_law_that_fails(monkeypatch: pytest.MonkeyPatch):
    """In one test an adapter, for every planted bug."""
    monkeypatch.setattr("lit_effattn.laws.suite.SECONDS", 0)
    planted = [(MixerAdapter(bug), of_bug) for bug, (of_bug, _) in BUGS.items()]
    planted += [(SumAdapter(bug), [law]) for bug, (law, _) in BUGS_OF_SUM.items()]

    class Suite(LawSuite):
        adapters = tuple(adapter for adapter, _ in planted)

        @classmethod
        def marks(cls, adapter, law, variant):
            return () if law.name in (*dict(planted)[adapter], "alive") else None

    made = _cases(Suite())
    assert [case.id for case in made] == [adapter.name for adapter in Suite.adapters]
    for case, (_, of_bug) in zip(made, planted, strict=True):
        with pytest.raises(AssertionError) as raised:
            Suite().test_laws(*case.values)
        first, *rest = str(raised.value).splitlines()
        named = first.partition(": ")[2].split(", ")
        described = [line.split(":")[0] for line in rest if line.endswith("but:")]
        assert len(described) == len(named)
        assert all(name.startswith(law) for name, law in zip(named, described, strict=True))
        assert set(of_bug) <= set(described)
