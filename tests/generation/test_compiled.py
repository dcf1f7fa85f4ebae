"""When steps are compiled: by the measured time of Python's, and of the compiled ones."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from lit_effattn.attention import SoftmaxAttention
from lit_effattn.generation import compiled, generate_each, packages, sampling
from lit_effattn.generation.beam import beam_search
from lit_effattn.generation.packages import Program
from lit_effattn.generation.sampling import generate
from tests.generation.test_packages import around, stack


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the seconds of a step."""
    monkeypatch.setattr(sampling, "LEAST_STEPS", 40)
    monkeypatch.setattr(compiled, "check_inductor", lambda asked, device: None)
    times = [0.0, 0.0]

    def now() -> float:
        times[0] += times[1]
        return times[0]

    monkeypatch.setattr(compiled, "perf_counter", now)
    return lambda seconds: times.__setitem__(1, seconds)  # asked before and after each step


MEASURED = compiled.WARM_UP + compiled.MEASURED


@pytest.mark.parametrize(
    ("seconds", "there", "compiled", "used"),
    [
        (14.9, True, 0, False),  # what remains is too short to look for a library
        (15.1, True, 0, True),
        (15.1, False, 0, False),
        (119, False, 0, False),  # too short to make one
        (121, False, 1, True),
    ],
)
def test_compiled_if_what_remains_takes_long(
    seconds: float, there: bool, compiled: int, used: bool, interpreted: list[Path], clock, monkeypatch
):
    made, prompt, n = around(stack()), torch.zeros(2, 1, dtype=torch.long), 60
    expected = generate(*made, prompt, n, compile=False)
    if there:
        generate(*made, prompt, 1, compile=True)
    before, calls = len(interpreted), []
    call = Program.__call__
    monkeypatch.setattr(Program, "__call__", lambda self, *args: calls.append(0) or call(self, *args))
    clock(seconds / (n - MEASURED))
    assert torch.equal(generate(*made, prompt, n), expected)
    assert len(interpreted) - before == compiled
    assert len(calls) == (1 + n - MEASURED if used else 0)  # once to compare


def test_a_state_that_no_longer_fits_is_compiled_for_again(interpreted: list[Path], clock):
    """If it was worth it before."""
    made, tokens = around(stack()), torch.zeros(2, 1, dtype=torch.long)
    steps = compiled.Steps(*made, device=tokens.device, n=10**6)
    clock(1.0)
    for rows in (2, 3):
        state = made[0].initial_state(rows, max_len=64)
        for _ in range(MEASURED + 1):
            _, state = steps(tokens[:1].repeat(rows, 1), state)
    assert len(interpreted) == 2


def test_few_tokens_are_not_timed(interpreted: list[Path], clock):
    clock(1e9)
    generate(*around(stack()), torch.zeros(2, 1, dtype=torch.long), 39)
    assert not interpreted


def test_without_a_compiler_it_goes_on_and_says_so(interpreted: list[Path], clock, monkeypatch: pytest.MonkeyPatch):
    def missing(asked: str, device: torch.device) -> None:
        raise ValueError("there is no compiler")

    clock(1e9)
    monkeypatch.setattr(compiled, "check_inductor", missing)
    made, prompt = around(stack()), torch.zeros(2, 1, dtype=torch.long)
    with pytest.warns(UserWarning, match=r"goes on without compiled steps.*there is no compiler") as warned:
        drawn = generate(*made, prompt, 60)
    assert len(warned) == 1
    assert torch.equal(drawn, generate(*made, prompt, 60, compile=False))


def test_a_state_that_grows_with_each_step_goes_on_in_python(interpreted: list[Path], clock):
    clock(1e9)
    made, prompt = around(stack(SoftmaxAttention)), torch.zeros(2, 1, dtype=torch.long)
    state = made[0].initial_state(2)
    assert torch.equal(generate(*made, prompt, 60, state=state), generate(*made, prompt, 60, compile=False))
    assert not interpreted


def test_tensors_that_share_memory_are_parted():
    """Else a library, which overwrites each of them, would count twice."""
    shared = torch.zeros(2, dtype=torch.long)
    turned = torch.randn(2, 3).T
    parted = compiled.apart((shared, (shared, turned), None))
    assert parted[0] is shared
    assert parted[1][0].data_ptr() != shared.data_ptr()
    assert parted[1][1].is_contiguous()
    assert torch.equal(parted[1][1], turned)


@pytest.mark.parametrize(("ratio", "used"), [(1.0, None), (1.2, 16), (1.9, 16), (2.1, 2)])
def test_a_library_that_is_slower_than_python_is_left(
    ratio: float, used: int | None, interpreted: list[Path], clock, monkeypatch: pytest.MonkeyPatch
):
    made, prompt, n = around(stack()), torch.zeros(2, 1, dtype=torch.long), 60
    calls, call = [], Program.__call__

    def timed(self, *args):
        clock(10 * ratio)
        return call(self, *args)

    monkeypatch.setattr(Program, "__call__", lambda self, *args: calls.append(0) or timed(self, *args))
    clock(10)
    assert torch.equal(generate(*made, prompt, n), generate(*made, prompt, n, compile=False))
    assert len(calls) == 1 + (n - MEASURED if used is None else 1 + used)  # once to compare, once to warm up


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="compile=True supports these steps on the CPU alone, not on meta"):
        compiled.Steps(*around(stack()), device=torch.device("meta"), n=1, compile=True)


@pytest.mark.exhaustive
def test_one_library_for_searches_and_files_of_prompts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Of machine code, for the same number of rows."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    packages.cpp_build.private_folder.cache_clear()
    made, prompts = around(stack(SoftmaxAttention)), torch.randint(7, (8, 3))
    search = partial(beam_search, *made, prompts[:2], 9, beam=3, n_best=2)
    found, expected = search(compile=True), search(compile=False)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.log_probs, expected.log_probs)
    continued = partial(generate_each, *made, list(prompts), [5, 2, 9, 4, 3, 6, 7, 1], batch_size=6)
    for drawn, other in zip(continued(compile=True), continued(compile=False), strict=True):
        assert torch.equal(drawn, other)
    assert len(list(tmp_path.rglob("*.pt2"))) == 1
    packages.cpp_build.private_folder.cache_clear()
