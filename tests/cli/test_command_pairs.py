"""The command with pairs of sequences: training, resuming, scores, translations, and what is refused."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_effattn.cli import main
from lit_effattn.cli.command import CLI
from lit_effattn.settings.arguments import Arguments
from lit_effattn.tasks import SequenceToSequence
from tests.support.cases import of_data_sets
from tests.support.commands import REPOSITORY, TWO, assert_same_end, ends, fails, last, spec

STACK: dict[str, Any] = {
    "d_model": 16,
    "n_heads": 2,
    "n_layers": 1,
    "attention": {"class_path": "LinearAttention"},
    "dropout": 0.2,
}
TINY: dict[str, Any] = {
    "seed_everything": 3,
    "model": spec(
        "SequenceToSequence",
        backbone=spec(
            "EncoderDecoder",
            encoder=spec("Transformer", **STACK, causal=False),
            decoder=spec("Transformer", **STACK, cross_attention={"class_path": "PerformerCrossAttention"}),
        ),
        tie="target",
        label_smoothing=0.1,
        metrics=["exact_match", "error_rate", "bleu"],
        beam=2,
        optimizer=spec("torch.optim.RAdam", lr=0.003),
        lr_scheduler=spec("InverseSquareRoot", warmup_steps=5),
    ),
    "data": spec(
        "SequencePairs",
        corpus="files",
        root="pairs",
        source_tokens="characters",
        target_tokens="words",
        batch_tokens=60,
        cache="cache",
    ),
    "trainer": {
        "max_epochs": 2,
        "enable_progress_bar": False,
        "logger": False,
        "callbacks": [spec("FeatureRedraw", every_n_steps=4)],
    },
}


def pair(i: int) -> str:
    word = "abcd"[i % 4] + "efg"[i % 3] * (1 + i % 5)
    return f"{word}\t{' '.join(word.upper())}\n"


@pytest.fixture(autouse=True)
def _beside_pairs(empty_folder: None) -> None:
    Path("pairs").mkdir()
    for split, begin, end in (("train", 0, 40), ("val", 40, 49), ("test", 49, 60)):
        Path("pairs", f"{split}.tsv").write_text("".join(map(pair, range(begin, end))))


def fit(*args: str) -> Path:
    main(["fit", "--config", "tiny.yaml", *args])
    return last("runs" if "--trainer.default_root_dir" not in args else args[-1]).parent.parent


def test_training_scoring_and_writing(capsys: pytest.CaptureFixture[str]):
    """The corpus is needed to test, but neither to translate a file nor a single text."""
    run = fit("--model.decode_every_n_epochs", "1")
    capsys.readouterr()
    main(["test", "--ckpt_path", "best"])
    out = capsys.readouterr().out
    assert re.search(r"^test perplexity: [\d.]+$", out, re.M)
    assert re.search(r"^test exact_match: [\d.]+$", out, re.M)
    assert re.search(r"^test error_rate: [\d.]+$", out, re.M)
    assert re.search(r"^test sequences: 11$", out, re.M)
    assert "bleu is that of sacrebleu, nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:" in out
    shutil.rmtree("pairs")
    shutil.rmtree("cache")
    Path("words.txt").write_text("aeee\ndff\nbg\n")
    main(["predict", "--ckpt_path", "last", "--data.source_file", "words.txt"])
    (path,) = run.rglob("predictions/translations.jsonl")
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [entry["source"] for entry in entries] == ["aeee", "dff", "bg"]
    assert (path.parent / "attention_1.png").is_file()
    capsys.readouterr()
    main(["predict", "--ckpt_path", "last", "dff", "aeee"])
    outputs = {entry["source"]: entry["outputs"][0]["text"] for entry in entries}
    assert [f"{word}: {outputs[word]}" for word in ("dff", "aeee")] == capsys.readouterr().out.splitlines()[-4:-2]
    options = ["--n", "2", "--beam", "3", "--length_penalty", "0.6"]
    main(["generate", "--ckpt_path", "last", "--source", "dff", "--save_state", "dff.state", *options])
    output = capsys.readouterr().out
    main(["generate", "--ckpt_path", "last", "--state", "dff.state", *options])
    assert capsys.readouterr().out.splitlines()[:2] == output.splitlines()[:2]
    model = SequenceToSequence.load_from_checkpoint(run / "checkpoints" / "last.ckpt").eval()
    best = model.texts(model.search(model.encode("dff")[None], beam=3, n_best=2))[0]
    assert [line.split("  ")[1] for line in output.splitlines()[:2]] == best


def test_a_resumed_run_equals_an_uninterrupted_one():
    whole = fit("--trainer.default_root_dir", "whole")
    assert torch.load(last("whole"), weights_only=True)["global_step"] > 6
    main(["fit", "--config", "tiny.yaml", "--trainer.default_root_dir", "part", "--trainer.max_steps", "5"])
    main(["fit", "--ckpt_path", str(last("part")), "--trainer.max_steps", "-1"])
    assert_same_end(whole / "checkpoints" / "last.ckpt", last("part"))


CONFIGS = sorted(
    path for path in Path(REPOSITORY, "configs").glob("*.yaml") if "class_path: SequencePairs" in path.read_text()
)


@pytest.mark.parametrize("config", of_data_sets(CONFIGS))
def test_every_configuration_works_as_far_as_it_needs_no_download(config: Path, capsys: pytest.CaptureFixture[str]):
    """Those of pronunciations take a step of training and validation; others say what they miss, and are built."""
    args = ["fit", "--config", str(config), "--trainer.fast_dev_run", "1", "--trainer.enable_progress_bar", "false"]
    if config.stem.startswith("g2p"):
        held_out = "".join(f"{'ab'[i % 2]}{chr(97 + i // 26)}{chr(97 + i % 26)}  AH B\n" for i in range(200))
        Path("small.dict").write_text(f"{held_out}lit  L IH T\nwould  W UH D\n")
        main([*args, "--data.root", "small.dict", "--data.batch_tokens", "64"])
        return
    output = fails(capsys, *args)
    assert str(yaml.safe_load(config.read_text())["data"]["init_args"]["root"]) in output
    assert re.search(r"; (python -m scripts\.|get it from https://)", output)
    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        patch.setattr(CLI, "_run_subcommand", lambda *_: None)
        sizes = ["--data.vocab_size", "300", "--data.batch_tokens", "64"]
        files = [
            "--data.corpus",
            "files",
            "--data.root",
            "lines",
            "--data.source_suffix",
            "a",
            "--data.target_suffix",
            "b",
        ]
        Path("lines").mkdir()
        for name in ("train.a", "train.b", "val.a", "val.b", "test.a", "test.b"):
            Path("lines", name).write_text("one line\nanother\n")
        made = CLI(Arguments([*args, *sizes, *files]))
        made.model.configure_optimizers()


def test_what_cannot_be_generated(capsys: pytest.CaptureFixture[str]):
    """The options reach the trainer as they were parsed; the model is not trained."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CLI, "_run_subcommand", lambda *_: None)
        made = CLI(Arguments(["fit", "--config", "tiny.yaml", "--trainer.fast_dev_run", "1"]))
    options: dict[str, Any]
    for options, words in (
        ({}, "--source is missing"),
        ({"source": "a", "prompt": "a"}, "--prompt a: SequenceToSequence has no such option"),
        ({"source": "a", "state": "s.state"}, "--source and --state were both given: a state has its own source"),
        ({"source": "a", "temperature": 0.5}, "--temperature 0.5: SequenceToSequence has no such option"),
    ):
        with pytest.raises(ValueError, match=words):
            made.trainer.generate(made.model, **options)
    assert "cross_attention" in fails(
        capsys, "fit", "--config", "tiny.yaml", "--model.backbone.decoder.cross_attention", "null"
    )


@pytest.mark.exhaustive
@pytest.mark.processes
def test_two_processes_score_as_one():
    fit("--trainer.max_epochs", "1")
    one, two = (ends("test", "--ckpt_path", "last", *processes).splitlines() for processes in ([], TWO))
    assert sorted(line for line in two if line.startswith("test ")) == sorted(
        line for line in one if line.startswith("test ")
    )
