"""Exported steps compute what the model computes in one pass, and what can't be exported is refused."""

import ast
import json
import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lit_effattn import LanguageModel, PixelModel, SequenceClassifier, Transformer
from lit_effattn.allowlist import Trust
from lit_effattn.attention import (
    LinearAttention,
    PerformerAttention,
    SoftmaxAttention,
    SparseAttention,
    TransformerXLAttention,
)
from lit_effattn.attention.linear import ReluFeatureMap
from lit_effattn.cli import main
from lit_effattn.datamodules.tokenizers import ByteTokenizer
from lit_effattn.export import METADATA, export
from lit_effattn.nn.heads import MixtureOfLogisticsHead
from lit_effattn.spec_build import build
from lit_effattn.spec_check import CheckpointJudge
from lit_effattn.tasks.base import Task
from tests.support.commands import REPOSITORY, fails


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs the packages {', '.join(missing)}")


def language_model(*kinds: object, **options: object) -> LanguageModel:
    torch.manual_seed(0)
    backbone = Transformer(8, 2, len(kinds), attention=list(kinds), positions="auto", init="xavier")
    tokenizer = ByteTokenizer().to_json()
    return LanguageModel(backbone, 257, unit="byte", tokenizer=tokenizer, embedding_std=1.0, **options).eval()


def pixel_model(kind: object = SoftmaxAttention) -> PixelModel:
    torch.manual_seed(0)
    return PixelModel(Transformer(8, 2, 1, attention=kind), (3, 2, 1), 5, head=MixtureOfLogisticsHead).eval()


def saved(model: Task, path: Path) -> str:
    torch.save({"state_dict": model.state_dict(), "hyper_parameters": dict(model.hparams)}, path)
    return str(path)


def loaded(path: Path) -> tuple[torch.nn.Module, dict]:
    extra = {METADATA: ""}
    with path.open("rb") as file:
        program = torch.export.load(file, extra_files=extra)
    return program.module(), json.loads(extra[METADATA])


def empty(about: dict) -> list[Tensor]:
    return [torch.full(s["shape"], float(s["fill"]), dtype=getattr(torch, s["dtype"])) for s in about["state"]]


@needs("onnx", "onnxscript", "onnxruntime")
def test_the_page_serves_what_the_command_writes(tmp_path, monkeypatch, capsys):
    """The page's program, at a temperature near 0, writes the model's likeliest text."""
    monkeypatch.chdir(tmp_path)
    model = language_model(LinearAttention, PerformerAttention, embedding_scale=2.0)
    path = saved(model, tmp_path / "best.ckpt")
    main(["export", "--ckpt_path", path, "--check", "50"])
    assert re.search(
        r"50 tokens compared with PyTorch: largest difference \d\.\de-0[67]; onnxr", capsys.readouterr().out
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.ckpt", "best.onnx"]
    page = (REPOSITORY / "docs/export.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```py\n(.*?)^```$", page, re.M | re.S)
    imports = {alias.name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import) for alias in node.names}
    assert imports == {"json", "numpy", "onnxruntime"}
    assert "ImportFrom" not in ast.dump(ast.parse(code))
    exec(code.replace('"def ", 200, 0.8', '"def ", 30, 1e-5'), names := {})
    start, *prompt = 256, *b"def "
    expected = model.sample(torch.tensor([[start, *prompt]]), 30, temperature=0)[0].tolist()
    assert names["drawn"] == expected
    assert len(set(expected)) > 3
    about = names["about"]
    assert about["kinds"] == ["LinearAttention", "PerformerAttention"]
    assert (about["vocabulary"], about["n_levels"], about["dtype"]) == ("bytes", 257, "float32")
    assert about["state"][4]["name"] == "state.layers.1.s"


def test_torch_streams_an_image(tmp_path):
    """The program's log-probabilities are those of one pass; its rows are separate; it keeps what it is given."""
    model, path = pixel_model(), tmp_path / "image.pt2"
    done = export(model, path, format="torch", batch_size=2)
    assert (done.path, done.checked) == (path, 6)
    program, about = loaded(path)
    assert (about["start"], about["image_shape"], about["max_len"]) == (5, [3, 2, 1], 6)
    levels = torch.tensor([[0, 4, 2, 2, 1, 3], [1, 1, 0, 4, 4, 2]])
    state, nll = empty(about), []
    for t in range(6):
        tokens = levels[:, t - 1 : t] if t else torch.full((2, 1), 5)
        kept = [s.clone() for s in state]
        log_probs, *after = program(tokens, *state)
        assert all(map(torch.equal, state, kept))
        state = after
        nll.append(-log_probs.gather(-1, levels[:, t : t + 1]))
    with torch.no_grad():
        assert torch.allclose(torch.cat(nll, 1), model.nll(levels), atol=1e-5)


def test_steps_have_the_memory_of_evaluation(tmp_path):
    model = language_model(partial(TransformerXLAttention, mem_len=4), eval_mem_len=7)
    export(model, tmp_path / "xl.pt2", format="torch", check=20)
    _, about = loaded(tmp_path / "xl.pt2")
    assert [s["shape"] for s in about["state"] if len(s["shape"]) == 3] == [[1, 7, 8]]
    assert model.backbone.blocks[0].attention.mem_len == 4


@needs("safetensors")
def test_safetensors_hold_the_model(tmp_path):
    from safetensors import safe_open

    model = language_model(SoftmaxAttention, tie=True)
    path = tmp_path / "model.safetensors"
    export(model, path, format="safetensors")
    with safe_open(path, "pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = json.loads(file.metadata()[METADATA])
    built = build(about["model"], LanguageModel, "model", CheckpointJudge(str(path), Trust([])))
    built.load_state_dict(weights)
    assert all(torch.equal(a, b) for a, b in zip(built.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (SoftmaxAttention, [], r"SoftmaxAttention keeps every position.*--max_len, .* with the option window\b"),
        (partial(SparseAttention, stride=4), [], r"SparseAttention keeps every position.*--max_len, the most pos"),
        (SoftmaxAttention, ["--max_len", "0"], "max_len=0 must be at least 1"),
        (LinearAttention, ["--max_len", "9"], "max_len=9 does not apply"),
        (LinearAttention, ["--batch_size", "0"], "batch_size=0 must be at least 1"),
        (LinearAttention, ["--output", "there.onnx"], r"there\.onnx exists already; .*--overwrite"),
    ],
)
@needs("onnx", "onnxscript", "onnxruntime")
def test_refusals(kind, options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("there.onnx").write_text("kept")
    path = saved(language_model(kind, kind), tmp_path / "model.ckpt")
    assert re.search(message, fails(capsys, "export", "--ckpt_path", path, *options))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.ckpt", "there.onnx"]
    assert Path("there.onnx").read_text() == "kept"


def test_what_differs_is_not_written_and_does_not_replace(tmp_path, monkeypatch):
    path = tmp_path / "model.pt2"
    path.write_text("kept")
    monkeypatch.setattr("lit_effattn.export.EQUAL", -1)
    with pytest.raises(ValueError, match=r"differs by .*; nothing was written"):
        export(pixel_model(), path, format="torch", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt2"]
    assert path.read_text() == "kept"
    monkeypatch.undo()
    export(pixel_model(), path, format="torch", overwrite=True, check=1)
    assert loaded(path)[1]["task"] == "PixelModel"


def test_other_tasks_and_missing_packages(tmp_path, monkeypatch):
    classifier = SequenceClassifier(Transformer(8, 2, 1, causal=False), ("a", "b"), vocab_size=5)
    with pytest.raises(ValueError, match=r"SequenceClassifier has no streaming step.*safetensors writes"):
        export(classifier, tmp_path / "x", format="onnx")
    with pytest.raises(ValueError, match=r"format='pickle' is not one of onnx, torch, safetensors"):
        export(classifier, tmp_path / "x", format="pickle")
    monkeypatch.setattr("lit_effattn.export.find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(ValueError, match=r"needs onnxscript: pip install 'lit-effattn\[export\]'"):
        export(pixel_model(), tmp_path / "x", format="onnx")


@pytest.mark.parametrize(
    "kind", [LinearAttention, partial(LinearAttention, feature_map=ReluFeatureMap), PerformerAttention]
)
def test_a_whole_pass_is_exported_without_operators_of_ours(kind):
    """Other programs have PyTorch's operators alone; the values are those of eager mode."""
    model = pixel_model(kind)
    levels = torch.tensor([[0, 4, 2, 2, 1, 3]])
    with torch.no_grad():
        program = torch.export.export(model, (levels,), strict=False)
        graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
        assert "lit_effattn" not in str([node.target for graph in graphs for node in graph.nodes])
        assert torch.allclose(program.module()(levels), model(levels), atol=1e-5)
