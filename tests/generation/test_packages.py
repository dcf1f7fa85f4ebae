"""Compiled steps on the CPU: the same numbers, and one library for a program."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import cache_dir

from lit_effattn import Transformer
from lit_effattn.attention import InfiniteAttention, LinearAttention, SoftmaxAttention, TransformerXLAttention
from lit_effattn.generation import packages
from lit_effattn.generation.packages import CompilationError, Program, Step
from lit_effattn.generation.sampling import generate
from lit_effattn.nn.heads import CategoricalHead
from lit_effattn.sequence import SequenceModule, tensors
from tests.laws.cases import CAUSAL, Case
from tests.laws.tools import each

Made = tuple[SequenceModule, Callable[[Tensor], Tensor], CategoricalHead]


def around(backbone: SequenceModule, dtype: torch.dtype = torch.double) -> Made:
    torch.manual_seed(2)
    embed, head = nn.Embedding(7, backbone.d_input), CategoricalHead(backbone.d_model, 7)
    with torch.no_grad():
        head.proj.weight.mul_(5)
    return backbone, embed.to(dtype), head.to(dtype)


def stack(attention=LinearAttention, n_layers: int = 1, **options) -> SequenceModule:
    torch.manual_seed(1)
    return Transformer(8, 2, n_layers, attention=attention, init="pytorch", **options).double().eval()


def step_of(made: Made, rows: int = 2, max_len: int = 64) -> tuple[Step, Tensor, list[Tensor]]:
    state = made[0].initial_state(rows, max_len=max_len)
    leaves = [t.clone() for t in tensors(state)]
    return Step(*made, state), torch.zeros(rows, 1, dtype=torch.long), leaves


# Sizes are symbols where a state grows, and the ∞-former's tables are made in its first call. That no step looks at a
# number is tested for every kind in tests/laws/test_devices.py.
TRACED = {
    "SoftmaxAttention",
    "ShawAttention-max_distance=3",
    "SparseAttention-stride=4",
    "LSHAttention-n_hashes=2-n_buckets=4-chunk_size=2",
    "LinearAttention-chunk_size=4",
    "InfiniteAttention-mem_len=4-segment_len=3-n_basis=10-widths=(0.1,)-n_samples=7-sticky=True-n_bins=6-gate=True",
    "SlidingWindow",
    "Decoder",
}


@each(CAUSAL, TRACED)
@pytest.mark.parametrize("n_prompt", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_traced_steps_draw_the_same_tokens(case: Case, n_prompt: int, interpreted: list[Path]):
    """In states that begin small and grow, with one program."""
    made, prompt = around(case.build()), torch.randint(7, (2, n_prompt))
    assert torch.equal(generate(*made, prompt, 24, compile=True), generate(*made, prompt, 24, compile=False))
    assert len(interpreted) == 1


@pytest.mark.slow
def test_a_library_of_machine_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """It reads the weights that the model has now, and another process finds it.

    The second layer writes a segment in one step of three, from the seventh on.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    packages.cpp_build.private_folder.cache_clear()
    infinite = partial(InfiniteAttention, mem_len=4, segment_len=3, n_basis=10, widths=(0.1,), n_samples=7)
    made, prompt = around(stack([SoftmaxAttention, infinite], n_layers=2)), torch.zeros(2, 1, dtype=torch.long)
    assert torch.equal(generate(*made, prompt, 70, compile=True), generate(*made, prompt, 70, compile=False))
    (file,) = tmp_path.rglob("*.pt2")
    assert file.stat().st_size < 4e6  # no weights
    with torch.no_grad():
        made[2].proj.weight.mul_(-1)
    monkeypatch.setattr(packages, "_compile", None)
    assert torch.equal(generate(*made, prompt, 70, compile=True), generate(*made, prompt, 70, compile=False))
    packages.cpp_build.private_folder.cache_clear()


def test_every_model_with_the_same_program_uses_one_library(interpreted: list[Path], monkeypatch: pytest.MonkeyPatch):
    """Of any weights and room; not of another option, type, number of rows or threads."""

    def compiled(*args, **options) -> int:
        packages.program(*step_of(*args, **options))
        return len(interpreted)

    made = around(stack(SoftmaxAttention))
    assert compiled(made) == 1
    assert compiled(made, max_len=128) == 1
    with torch.no_grad():
        made[2].proj.weight.add_(1)
    assert compiled(made) == 1
    assert compiled(around(stack(SoftmaxAttention))) == 1
    assert compiled(made, rows=3) == 2
    assert compiled(around(stack(SoftmaxAttention, norm_eps=1e-3))) == 3
    assert compiled(around(stack(SoftmaxAttention).float(), torch.float)) == 4
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert compiled(made) == 5


def test_a_memory_of_a_fixed_size_has_it_at_once(interpreted: list[Path]):
    made = around(stack(partial(TransformerXLAttention, mem_len=70)))
    prompt = torch.zeros(2, 1, dtype=torch.long)
    assert torch.equal(generate(*made, prompt, 90, compile=True), generate(*made, prompt, 90, compile=False))
    assert len(interpreted) == 1


def test_positions_are_computed_once():
    """A table of sines is loaded with the weights, one for all layers, and no step computes them again."""
    step, tokens, state = step_of(around(stack(partial(TransformerXLAttention, mem_len=5), n_layers=2, positions=None)))
    exported = packages._traced(step, tokens, state)
    operations = {node.target for node in exported.graph.nodes}
    assert not operations & {torch.ops.aten.sin.default, torch.ops.aten.cos.default, torch.ops.aten.pow.Scalar}
    (table,) = (t for name, t in exported.constants.items() if name.startswith("table_"))
    distance = torch.arange(5, -1, -1, dtype=torch.double)[:, None]
    angles = distance / 10000 ** (torch.arange(0, 8, 2, dtype=torch.double) / 8)
    assert torch.allclose(table, torch.cat([angles.sin(), angles.cos()], 1), atol=1e-14)


def test_what_a_step_overwrites_is_computed_in_each():
    class Adding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            waves = torch.arange(4.0).sin()
            waves.view(2, 2).add_(x)
            return waves * 2 + torch.arange(4.0).cos()

    exported = torch.export.export(Adding(), (torch.ones(2, 2),), strict=False)
    packages._keep_tables(exported)
    assert torch.equal(exported.constants["table_0"], torch.arange(4.0).cos())
    module = exported.module()
    for x in (torch.ones(2, 2), torch.zeros(2, 2)):
        assert torch.equal(module(x), Adding()(x))


class Branching(nn.Module):
    """Adds to sines where a number is positive.

    Args:
        factor: Of what is added.
    """

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        waves, factor = torch.arange(4.0).sin(), self.factor

        def add(waves: Tensor, x: Tensor) -> Tensor:
            waves.add_(x * factor)
            return x.sum()

        torch.cond(x.sum() > 0, add, lambda waves, x: x.sum(), (waves, x))
        return waves * 2


@pytest.mark.skipif(torch.__version__ < "2.12", reason="a branch may overwrite a tensor from PyTorch 2.12 on")
@torch.no_grad()
def test_what_a_branch_overwrites_is_computed_in_each():
    exported = torch.export.export(Branching(), (torch.ones(4),), strict=False)
    packages._keep_tables(exported)
    assert not any(name.startswith("table_") for name in exported.constants)
    module = exported.module()
    for x in (torch.ones(4), -torch.ones(4), torch.ones(4)):
        assert torch.equal(module(x), (torch.arange(4.0).sin() + x.clamp(min=0)) * 2)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="a branch may overwrite a tensor from PyTorch 2.12 on")
@torch.no_grad()
def test_programs_that_differ_in_a_branch_have_different_libraries():
    keys = [packages._key(torch.export.export(Branching(f), (torch.ones(4),), strict=False)) for f in (1.0, 2.0, 1.0)]
    assert keys[0] == keys[2] != keys[1]


def test_a_program_says_which_states_it_takes(interpreted: list[Path]):
    step, tokens, state = step_of(around(stack(SoftmaxAttention)))
    program = packages.program(step, tokens, state)
    assert program.fits(state)
    assert program.fits(step_of(around(stack(SoftmaxAttention)), max_len=96)[2])
    assert not program.fits(step_of(around(stack(SoftmaxAttention)), rows=3)[2])
    linear = step_of(around(stack()))
    program = packages.program(*linear)
    assert program.fits(linear[2])
    assert not program.fits([t[..., None] for t in linear[2]])


@pytest.mark.parametrize("by", [0.1, float("nan")])
def test_a_program_with_other_numbers_is_refused(by: float, interpreted: list[Path], monkeypatch: pytest.MonkeyPatch):
    step, tokens, state = step_of(around(stack()))
    packages.program(step, tokens, state)
    for part in ("log-probabilities", "state"):

        def run(tokens, state, part=part):
            log_probs = step(tokens, state)
            (log_probs if part == "log-probabilities" else state[1]).add_(by)
            return log_probs

        monkeypatch.setattr(packages, "Program", lambda _, shapes, run=run: Program(run, shapes))
        with pytest.raises(CompilationError, match="it differs from Python's step by"):
            packages.program(step, tokens, state)
        assert not interpreted[-1].exists()


def test_a_damaged_library_is_made_again(interpreted: list[Path]):
    arguments = step_of(around(stack()))
    packages.program(*arguments)
    interpreted[0].write_bytes(b"half")
    with pytest.raises(CompilationError, match="is not a zip file"):
        packages.program(*arguments)
    packages.program(*arguments)
    assert len(interpreted) == 2


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError()])
def test_a_library_outlives_errors_that_are_not_its_own(
    error: Exception, interpreted: list[Path], monkeypatch: pytest.MonkeyPatch
):
    arguments = step_of(around(stack()))
    packages.program(*arguments)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(packages, "_loaded", fail)
    with pytest.raises(CompilationError, match=type(error).__name__):
        packages.program(*arguments)
    assert interpreted[0].exists()


def test_another_processor_has_another_library(interpreted: list[Path], monkeypatch: pytest.MonkeyPatch):
    arguments = step_of(around(stack()))
    packages.program(*arguments)
    monkeypatch.setattr(packages, "_processor", lambda: "flags: another")
    packages.program(*arguments)
    assert len(set(interpreted)) == 2


def test_nothing_is_compiled_where_others_can_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Inductor's own folders are at known places below /tmp."""
    found = []

    def compile_(exported, package_path: str, inductor_configs: dict[str, object]) -> None:
        found.append(Path(cache_dir()))
        assert not inductor_configs["aot_inductor.precompile_headers"]
        Path(package_path).write_text("made")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_)
    for _ in range(2):
        packages._compile(None, tmp_path / "it.pt2")
    assert [path.parent for path in found] == [tmp_path] * 2
    assert len(set(found)) == 2  # of two processes that compile the same at once
    assert [path.name for path in tmp_path.iterdir()] == ["it.pt2"]


def test_a_failed_compilation_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def fail(exported, package_path: str, **options: object) -> None:
        Path(package_path).write_text("half")
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    with pytest.raises(CompilationError, match="RuntimeError: the disk is full"):
        packages._compile(None, tmp_path / "it.pt2")
    assert not list(tmp_path.iterdir())


def test_a_step_that_reads_values_is_refused(interpreted: list[Path]):
    class Looking(LinearAttention):
        def attend(self, q, k, v, state, lengths):
            assert q.sum().item() < 1e9
            return super().attend(q, k, v, state, lengths)

    made, prompt = around(stack(Looking)), torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(ValueError, match=r"a step of Transformer \(Looking\) can't be compiled; leave compile out"):
        generate(*made, prompt, 1, compile=True)
    assert not Transformer.__subclasses__()  # the tracer's, which have the same name
