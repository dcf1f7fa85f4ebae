"""Exported steps compute the model's results; a model that can't be exported is rejected."""

import ast
import gc
import json
import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_effattn import LanguageModel, PixelModel, SequenceClassifier, Transformer
from lit_effattn.attention import (
    InfiniteAttention,
    LinearAttention,
    PerformerAttention,
    SoftmaxAttention,
    SparseAttention,
    TransformerXLAttention,
)
from lit_effattn.attention.positions import GridPositions, LearnedPositions
from lit_effattn.checkpoints.build import Allowed, build
from lit_effattn.cli import main
from lit_effattn.datamodules.text.tokenizers import ByteTokenizer
from lit_effattn.interchange import export as exporting
from lit_effattn.interchange.export import METADATA, _state_length, export
from lit_effattn.nn.heads import MixtureOfLogisticsHead
from lit_effattn.sequence import tensors
from lit_effattn.tasks.base import Task
from tests.support.commands import REPOSITORY, fails
from tests.support.rounding import rounding

ROUNDED = rounding(torch.float32, 200, 5)  # of log-probabilities: one or two layers of 8 units, and their head


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
    return [torch.from_numpy(np.full(s["shape"], np.array(s["fill"], float), s["dtype"])) for s in about["state"]]


@needs("onnx", "onnxscript", "onnxruntime")
def test_the_page_serves_what_the_command_writes(tmp_path, monkeypatch, capsys):
    """The page's program, at a temperature near 0, writes the model's likeliest text."""
    monkeypatch.chdir(tmp_path)
    model = language_model(LinearAttention, PerformerAttention, embedding_scale=2.0)
    path = saved(model, tmp_path / "best.ckpt")
    main(["export", "--ckpt_path", path, "--check", "50"])
    (difference,) = re.findall(
        r"50 tokens compared with PyTorch: largest difference (\S+); onnxr", capsys.readouterr().out
    )
    assert float(difference) < ROUNDED
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.ckpt", "best.onnx"]
    page = (REPOSITORY / "docs/export.md").read_text(encoding="utf-8")
    code = re.findall(r"^```py\n(.*?)^```$", page, re.M | re.S)[0]
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
    model, path = pixel_model().double(), tmp_path / "image.pt2"
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
        torch.testing.assert_close(torch.cat(nll, 1), model.nll(levels))


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
    built = build(about["model"], LanguageModel, "model", Allowed(str(path)))
    built.load_state_dict(weights)
    assert all(torch.equal(a, b) for a, b in zip(built.parameters(), model.parameters(), strict=True))


@needs("onnx", "onnxscript", "onnxruntime")
def test_refusals(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("there.onnx").write_text("kept")
    kinds = {"softmax": SoftmaxAttention, "sparse": partial(SparseAttention, stride=4), "linear": LinearAttention}
    for name, kind in kinds.items():
        saved(language_model(LinearAttention, kind), tmp_path / f"{name}.ckpt")
    for name, options, message in (
        ("softmax", [], r"(?<!, )SoftmaxAttention keeps every position.*--max_len, .* the option window\b"),
        ("sparse", [], r"SparseAttention keeps every position.*--max_len, the largest"),
        ("softmax", ["--max_len", "0"], "max_len=0 must be at least 1"),
        ("linear", ["--max_len", "9"], "max_len=9 does not apply"),
        ("linear", ["--batch_size", "0"], "batch_size=0 must be at least 1"),
        ("linear", ["--output", "there.onnx"], r"there\.onnx exists already; .*--overwrite"),
    ):
        assert re.search(message, fails(capsys, "export", "--ckpt_path", f"{name}.ckpt", *options))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["linear.ckpt", "softmax.ckpt", "sparse.ckpt", "there.onnx"]
    assert Path("there.onnx").read_text() == "kept"


def test_what_differs_is_not_written_and_does_not_replace(tmp_path, monkeypatch):
    path = tmp_path / "model.pt2"
    path.write_text("kept")
    monkeypatch.setattr("lit_effattn.interchange.export.EQUAL", -1)
    with pytest.raises(ValueError, match=r"differs by .*; nothing was written"):
        export(pixel_model(), path, format="torch", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt2"]
    assert path.read_text() == "kept"
    monkeypatch.undo()
    export(pixel_model(), path, format="torch", overwrite=True, check=1)
    assert loaded(path)[1]["task"] == "PixelModel"


def test_what_gives_no_finite_numbers_is_not_written(tmp_path, monkeypatch):
    model = language_model(LinearAttention)
    model.embedding.weight.data[5:200] = torch.nan
    with pytest.raises(ValueError, match=r"the model's log-probabilities after token \d+ are not finite"):
        export(model, tmp_path / "x", format="torch", check=50)
    write, counts = exporting._write_torch, {}

    def broken(*args):
        run, counts["token"] = write(*args), 0

        def one_bad(tokens, state):
            log_probs, after = run(tokens, state)
            counts["token"] += 1
            return log_probs.clone().index_fill_(1, torch.tensor(2), bad) if counts[
                "token"
            ] > token else log_probs, after

        return one_bad

    monkeypatch.setattr(exporting, "_write_torch", broken)
    for bad, token in ((torch.nan, 0), (-torch.inf, 3)):  # noqa: B007 (`one_bad` uses it)
        with pytest.raises(ValueError, match=rf"exported step's log-probabilities after token {token} are not finite"):
            export(language_model(LinearAttention), tmp_path / "x", format="torch", check=5)
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
@needs("onnx", "onnxscript", "onnxruntime")
def test_small_constants_stay_in_onnx(tmp_path):
    """Queries of 0 have the feature eps alone: without it, and without what is added to the denominator, 0 / 0."""
    model = language_model(*(partial(PerformerAttention, features="relu", eps=eps) for eps in (0.0, 1e-9)))
    for block in model.backbone.blocks:
        for parameter in block.attention.q_proj.parameters():
            parameter.data.zero_()
    assert export(model, tmp_path / "x.onnx", format="onnx", check=20).difference < ROUNDED


class SearchingAttention(SoftmaxAttention):
    """A kind of the user's own, with an option of torch.searchsorted that no kind of the library uses."""

    options: ClassVar[dict[str, Any]] = {}

    def attend(self, *args, **kwargs):
        y, state = super().attend(*args, **kwargs)
        return y + torch.searchsorted(torch.arange(3.0), torch.ones(1), **self.options), state


@pytest.mark.exhaustive
@needs("onnx", "onnxscript", "onnxruntime")
def test_what_onnx_has_no_function_for_is_named_without_colours(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "_search_sorted", None)
    monkeypatch.setattr(torch.onnx, "export", without_translations(torch.onnx.export))
    with pytest.raises(ValueError, match="can't be exported") as refused:
        export(language_model(partial(SearchingAttention, window=4)), tmp_path / "x", format="onnx")
    assert str(refused.value).endswith("with format=onnx: No ONNX function found for aten.searchsorted")


@pytest.mark.exhaustive
@needs("onnx", "onnxscript", "onnxruntime")
def test_an_option_that_onnx_lacks_is_named_with_a_remedy(tmp_path, monkeypatch):
    for options, text in (
        ({"out_int32": True}, "out_int32 is not supported; convert the result"),
        ({"side": "right"}, "side is not supported; give right=True or right=False"),
        ({"sorter": torch.arange(3)}, "sorter is not supported; sort the sequence before"),
    ):
        monkeypatch.setattr(SearchingAttention, "options", options)
        with pytest.raises(ValueError, match="SearchingAttention can't be exported") as refused:
            export(language_model(partial(SearchingAttention, window=4)), tmp_path / "x", format="onnx")
        assert str(refused.value).endswith(f"with format=onnx: torch.searchsorted with {text}, or use format=torch")


@pytest.mark.exhaustive
@needs("onnx", "onnxscript", "onnxruntime")
def test_what_a_step_leaves_as_it_is_is_an_output(tmp_path):
    """Without a signal the ∞-former's counter stays, and has a name of its own after the step."""
    model = language_model(partial(InfiniteAttention, mem_len=2, segment_len=2, n_basis=0))
    assert export(model, tmp_path / "x.onnx", format="onnx", check=9).difference < ROUNDED


def without_translations(export):
    return lambda *args, custom_translation_table, **options: export(*args, **options)


@pytest.mark.exhaustive
def test_the_empty_state_of_rows_that_differ(tmp_path):
    """The metadata give the ∞-former's counter, one number a row."""
    kind = partial(InfiniteAttention, mem_len=2, segment_len=2, n_basis=4, n_samples=3, sticky=True, n_bins=4)
    model = language_model(kind)
    export(model, tmp_path / "x.pt2", format="torch", batch_size=3, check=1)
    _, about = loaded(tmp_path / "x.pt2")
    expected = list(tensors(model.backbone.initial_state(3)))
    assert all(a.equal(b) and a.dtype == b.dtype for a, b in zip(empty(about), expected, strict=True))
    assert [0, 1_000_003, 2_000_006] in [s["fill"] for s in about["state"]]


def test_positions_end(tmp_path):
    """The metadata say how many positions there are, and no more are compared."""
    grid = PixelModel(Transformer(8, 2, 1, attention=LinearAttention, positions=GridPositions), (3, 2, 1), 5).eval()
    learned = {}
    for kind in (LinearAttention, SoftmaxAttention):
        backbone = Transformer(8, 2, 1, attention=kind, positions=partial(LearnedPositions, max_len=9))
        learned[kind] = LanguageModel(backbone, 5, unit="token")
    softmax = learned[SoftmaxAttention]
    for model, max_len, expected in ((grid, None, 6), (learned[LinearAttention], None, 9), (softmax, 4, 4)):
        done = export(model, tmp_path / "x.pt2", format="torch", max_len=max_len, check=50, overwrite=True)
        assert done.checked == loaded(tmp_path / "x.pt2")[1]["max_len"] == expected
    with pytest.raises(ValueError, match=r"max_len=10: the model has vectors for 9 positions; give at most 9"):
        export(softmax, tmp_path / "y.pt2", format="torch", max_len=10)
    assert _state_length(softmax, 9) == 9
    assert _state_length(softmax, None) == 9


def test_other_tasks_and_missing_packages(tmp_path, monkeypatch):
    classifier = SequenceClassifier(Transformer(8, 2, 1, causal=False), ("a", "b"), vocab_size=5)
    with pytest.raises(ValueError, match=r"SequenceClassifier has no streaming step.*safetensors writes"):
        export(classifier, tmp_path / "x", format="onnx")
    for given in ({"batch_size": 2}, {"check": 9}):
        with pytest.raises(ValueError, match=r"batch_size=\d and check=\d+ are options of a step"):
            export(classifier, tmp_path / "x", format="safetensors", **given)
    with pytest.raises(ValueError, match=r"format='pickle' is not one of onnx, torch, safetensors"):
        export(classifier, tmp_path / "x", format="pickle")
    monkeypatch.setattr(
        "lit_effattn.interchange.export.find_spec", lambda name: None if name == "onnxscript" else object()
    )
    with pytest.raises(ValueError, match=r"needs onnxscript: pip install 'lit-effattn\[export\]'"):
        export(pixel_model(), tmp_path / "x", format="onnx")


@pytest.mark.parametrize("kind", [LinearAttention, pytest.param(PerformerAttention, marks=pytest.mark.exhaustive)])
def test_a_whole_pass_is_exported_without_operators_of_ours(kind):
    """Other programs have PyTorch's operators alone; the values are those of eager mode."""
    model = pixel_model(kind).double()
    levels = torch.tensor([[0, 4, 2, 2, 1, 3]])
    with torch.no_grad():
        program = torch.export.export(model, (levels,), strict=False)
        graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
        assert "lit_effattn" not in str([node.target for graph in graphs for node in graph.nodes])
        torch.testing.assert_close(program.module()(levels), model(levels))
    del program, graphs
    gc.collect()  # torch.export derives a class of the kind's name, which configurations would find
