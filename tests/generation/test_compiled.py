"""Compiled steps on the CPU: the same numbers, and one library for a program."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lit_effattn import Transformer
from lit_effattn.attention import LinearAttention, SoftmaxAttention
from lit_effattn.generation import compiled
from lit_effattn.generation.compiled import Step, Steps, program
from lit_effattn.generation.sampling import generate
from lit_effattn.nn.heads import CategoricalHead
from lit_effattn.sequence import SequenceModule, tensors
from tests.laws.cases import CAUSAL, TRACED, Case
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


def trace_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on each step has the program of the first."""
    export, traced = torch.export.export, []

    def first(*args, **options):
        if not traced:
            traced.append(export(*args, **options))
        return traced[0]

    monkeypatch.setattr(torch.export, "export", first)


@each(CAUSAL, TRACED)
def test_traced_steps_draw_the_same_tokens(case: Case, interpreted: list[Path]):
    """In states that begin small and grow, with one program, after a prompt of one token or three."""
    interpreted.clear()  # the programs of the case before
    made = around(case.build())
    for prompt in (torch.randint(7, (2, 1)), torch.randint(7, (2, 3))):
        assert torch.equal(generate(*made, prompt, 24, compile=True), generate(*made, prompt, 24))
    assert len(interpreted) == 1


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_library_of_machine_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It reads the weights that the model has now; another process finds it; a damaged one is made again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled.cpp_build.private_folder.cache_clear()
    made, prompt = around(stack()), torch.zeros(2, 1, dtype=torch.long)
    assert torch.equal(generate(*made, prompt, 70, compile=True), generate(*made, prompt, 70))
    assert "about 20 s" in capsys.readouterr().err
    (file,) = tmp_path.rglob("*.pt2")
    assert file.stat().st_size < 4e6  # no weights
    with torch.no_grad():
        made[2].proj.weight.mul_(-1)
    made_again: list[Path] = []
    monkeypatch.setattr(compiled, "_compile", lambda exported, path: made_again.append(path))
    assert torch.equal(generate(*made, prompt, 70, compile=True), generate(*made, prompt, 70))
    assert not made_again
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match="can't be compiled"):
        generate(*made, prompt, 70, compile=True)
    assert made_again == [file]
    compiled.cpp_build.private_folder.cache_clear()


def test_every_model_with_the_same_program_uses_one_library(interpreted: list[Path], monkeypatch: pytest.MonkeyPatch):
    """Of any weights and room; not of another option, type, number of rows, processor or threads."""

    def compiled_for(*args, **options) -> int:
        program(*step_of(*args, **options))
        return len(interpreted)

    made = around(stack(SoftmaxAttention))
    with monkeypatch.context() as patch:
        trace_once(patch)
        assert compiled_for(made) == 1
        patch.setattr(torch, "get_num_threads", lambda: 99)
        assert compiled_for(made) == 2
        patch.setattr(compiled, "_processor", lambda: "flags: another")
        assert compiled_for(made) == 3
        patch.setattr(compiled.cpp_build, "compiler_version", lambda: "another")
        assert compiled_for(made) == 4
    other = around(stack(SoftmaxAttention))
    with torch.no_grad():
        other[2].proj.weight.add_(1)
    assert compiled_for(other, max_len=128) == 4
    assert compiled_for(made, rows=3) == 5
    assert compiled_for(around(stack(SoftmaxAttention, norm_eps=1e-3))) == 6
    assert compiled_for(around(stack(SoftmaxAttention).float(), torch.float)) == 7


def test_a_damaged_library_is_made_again(interpreted: list[Path], monkeypatch: pytest.MonkeyPatch):
    trace_once(monkeypatch)
    arguments = step_of(around(stack()))
    program(*arguments)
    for damage in (b"half", b""):
        interpreted[0].write_bytes(damage)
        program(*arguments)
    assert len(interpreted) == 3
    interpreted[0].with_suffix(".sha256").unlink()
    program(*arguments)
    assert len(interpreted) == 4
    program(*arguments)
    assert len(interpreted) == 4


def test_a_compiler_that_fails_is_one_line(interpreted: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    command = tmp_path / "compiler"
    command.write_text("not a program")
    command.chmod(0o755)
    monkeypatch.setenv("CXX", str(command))
    with pytest.raises(ValueError, match=r"can't be compiled; leave compile out.* compiler can't be run"):
        generate(*around(stack()), torch.zeros(1, 1, dtype=torch.long), 1, compile=True)


def test_a_failed_compilation_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def fail(exported, package_path: str, **options: object) -> None:
        Path(package_path).write_text("half")
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    with pytest.raises(RuntimeError, match="the disk is full"):
        compiled._compile(None, tmp_path / "it.pt2")
    assert not list(tmp_path.iterdir())


def test_a_step_that_reads_values_is_refused(interpreted: list[Path]):
    class Looking(LinearAttention):
        def attend(self, q, k, v, state, lengths):
            assert q.sum().item() < 1e9
            return super().attend(q, k, v, state, lengths)

    made, prompt = around(stack(Looking)), torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(ValueError, match=r"a step of Transformer \(Looking\) can't be compiled; leave[^\n]*$"):
        generate(*made, prompt, 1, compile=True)
    assert not Transformer.__subclasses__()  # the tracer's, which have the same name


def test_tensors_that_share_memory_are_parted():
    """Else a library, which overwrites each of them, would count twice."""
    shared = torch.zeros(2, dtype=torch.long)
    turned = torch.randn(2, 3).T
    parted = compiled.apart((shared, (shared, turned), None))
    assert parted[0] is shared
    assert parted[1][0].data_ptr() != shared.data_ptr()
    assert parted[1][1].is_contiguous()
    assert torch.equal(parted[1][1], turned)


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="compile=True supports these steps on the CPU alone, not on meta"):
        Steps(*around(stack()), device=torch.device("meta"), compile=True)
