"""Document-grounded dialogues from the command line, on small files in the format of CMU DoG."""

import json
from pathlib import Path

import pytest

from lit_effattn.cli import main
from tests.cli.test_command import CONFIGS
from tests.cli.test_every_kind import small
from tests.datamodules.text.test_dialogues import write
from tests.support.commands import fails

(CONFIG,) = (path for path in CONFIGS if path.stem == "cmudog_infinite")
NARROW = small(CONFIG)[: small(CONFIG).index("--data")]


@pytest.mark.filterwarnings("ignore")
def test_responses_of_a_trained_model_are_scored_and_written(capsys: pytest.CaptureFixture[str]):
    write(Path("data/cmu_dog"))
    flags = NARROW[2:]  # without --trainer.fast_dev_run
    flags += ["--data.vocab_size", "270", "--data.batch_size", "2", "--data.segment_len", "16", "--data.cache", "cache"]
    flags += ["--model.max_response_len", "5"]
    main(["fit", "--config", str(CONFIG), *flags, "--trainer.max_epochs", "1"])
    main(["test", "--ckpt_path", "last"])
    printed = capsys.readouterr().out
    assert all(f"test {name}: " in printed for name in ("perplexity", "f1", "rouge_l"))
    main(["predict", "--ckpt_path", "last"])
    (path,) = Path("runs").rglob("responses.jsonl")
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [entry["number"] for entry in entries] == list(range(3 * 6))
    assert [entry["reference"] for entry in entries[-2:]] == ["sad…", "test 2"]


def test_missing_files_are_asked_for(capsys: pytest.CaptureFixture[str]):
    message = fails(capsys, "fit", "--config", str(CONFIG), *NARROW)
    assert str(Path("data/cmu_dog").resolve()) in message
    assert "--config dialogue_infinite needs no download" in message
