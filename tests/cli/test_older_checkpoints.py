"""Checkpoints of older commits load, score the same, and resume to the same weights.

`tests/checkpoints/COMMIT/` has some that this commit wrote, and `expected.json`: what `test` measured, and sums of the
weights after a few more steps. Those of 32c8e6e are of that commit itself; they are of runs in mid-epoch, with dropout,
and with memory carried from step to step (`infinite`, `sharded`). An optimiser's states are positional, and so are the
fields of a memory: the sums differ if the order of parameters or fields does.
"""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_effattn import LanguageModel, PixelModel, SpeechRecognizer
from lit_effattn.checkpoints.io import read_checkpoint
from lit_effattn.cli import main
from lit_effattn.tasks import SequenceToSequence
from tests.cli.test_command_text import write_texts
from tests.seed_zero import as_stored, weighted_sum
from tests.support.commands import REPOSITORY, command, same
from tests.support.tones import Tones

STORED = REPOSITORY / "tests" / "checkpoints"
TASKS: dict[str, Any] = {
    "15b2119/language": LanguageModel,
    "15b2119/pixels": PixelModel,
    "15b2119/sorting": LanguageModel,
    "15b2119/speech": SpeechRecognizer,
    "32c8e6e/infinite": LanguageModel,
    "32c8e6e/performer": PixelModel,
    "32c8e6e/seq2seq": SequenceToSequence,
    "32c8e6e/sharded": LanguageModel,
}
OF_TWO = "32c8e6e/sharded"
ONE = ("--trainer.devices", "1", "--trainer.strategy", "auto")
TWO = ("--trainer.strategy", "lit_effattn.sharding.ShardedStrategy")
TWO += ("--trainer.strategy.save_distributed_checkpoint", "true")
STEPS = "8"
"""Until which step the runs of 32c8e6e are resumed; those of 15b2119 until epoch 3."""
every = pytest.mark.parametrize("name", TASKS)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def checkpoint(name: str) -> str:
    return str(STORED / f"{name}.ckpt")


def expected(name: str) -> dict[str, dict[str, float]]:
    commit, _, of = name.partition("/")
    return json.loads((STORED / commit / "expected.json").read_text(encoding="utf-8"))[of]


def prepare(name: str) -> None:
    """Write the data."""
    if name == "15b2119/language":
        write_texts()
    if name == "15b2119/speech":
        tones = Tones()
        tones.prepare()
        for split in ("train", "val", "test"):
            lines = [
                {"audio_filepath": str(u.audio), "phonemes": list(u.phones), "speaker": u.speaker}
                for u in tones.utterances(split)
            ]
            Path(f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))


def scores(name: str) -> dict[str, float]:
    """Return what `test` logs."""
    main(["test", "--ckpt_path", checkpoint(name), "--trainer.logger", "true", *(ONE if name == OF_TWO else ())])
    (file,) = Path().rglob("metrics.csv")
    (row,) = csv.DictReader(file.open(encoding="utf-8"))
    return {key: float(value) for key, value in row.items() if key.startswith("test/")}


def resumed(name: str) -> dict[str, torch.Tensor]:
    """Return the weights after a few more steps."""
    to = ("--trainer.max_epochs", "3") if name.startswith("15b2119") else ("--trainer.max_steps", STEPS)
    args = ["fit", "--ckpt_path", checkpoint(name), *to]
    if name == OF_TWO:
        done = command(*args, *TWO, two=True)
        assert done.returncode == 0, done.stderr
    else:
        main(args)
    (last,) = Path("runs").rglob("last.ckpt")
    content = read_checkpoint(last)
    assert content["global_step"] > read_checkpoint(checkpoint(name))["global_step"]
    return content["state_dict"]


def test_every_checkpoint_is_tested():
    assert {f"{path.parent.name}/{path.stem}" for path in STORED.glob("*/*.ckpt")} == {*TASKS}


@every
def test_it_loads_in_python(name: str):
    model = TASKS[name].load_from_checkpoint(checkpoint(name))
    saved = read_checkpoint(checkpoint(name))["state_dict"]
    assert same(model.state_dict(), saved)


@every
def test_it_scores_the_same(name: str):
    prepare(name)
    assert scores(name) == pytest.approx(expected(name)["scores"], rel=1e-6)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.processes if name == OF_TWO else ()) for name in TASKS]
)
def test_it_resumes_to_the_same_weights(name: str):
    prepare(name)
    sums = expected(name)["weights"]
    weights = resumed(name)
    relative, absolute = (
        (1e-6, 0.0) if as_stored() else (1e-4, 1e-4)
    )  # Adam divides gradients of rounding errors by theirs
    assert weights.keys() == sums.keys()
    for key, value in weights.items():
        size = weighted_sum(value.abs()).item()
        assert weighted_sum(value).item() == pytest.approx(sums[key], abs=relative * size + absolute), key
