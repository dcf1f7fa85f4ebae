"""The `lit-effattn` command on speech, from recordings to transcripts."""

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from PIL import Image

from lit_effattn import datamodules
from lit_effattn.cli import main
from tests.cli.test_command import CONFIGS, SPEECH, built
from tests.support.cases import of_data_sets
from tests.support.commands import assert_same_end, fails, last, spec
from tests.support.tones import write

TINY = {
    "seed_everything": 0,
    "model": spec(
        "SpeechRecognizer",
        backbone=spec("Transformer", d_model=16, n_heads=2, n_layers=1, attention="LinearAttention", causal=False),
        front_end=spec("ConvSubsampling", factor=2, channels=4),
        optimizer=spec("torch.optim.RAdam", lr=0.001),
        lr_scheduler=spec("WarmupCosine", total_steps=6, warmup_steps=2),
    ),
    "data": spec(
        "SpeechData",
        corpus={"class_path": "tests.support.tones.Tones"},
        normalize="corpus",
        batch_frames=120,
        spec_augment=spec("SpecAugment", freq_mask=4, time_mask=3),
        wave_augment=spec("WaveAugment", speed=[0.95, 1.05]),
    ),
    "trainer": {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    },
}


TRUST = ["--trust", "tests.support.tones.Tones"]


def test_from_recordings_to_transcripts(capsys: pytest.CaptureFixture[str]):
    """Train and test; then recognise other recordings, with nothing left of the corpus."""
    main(["fit", "--config", "tiny.yaml"])
    main(["test", *TRUST, "--ckpt_path", "best"])
    output = capsys.readouterr().out
    assert re.search(r"^test PER: \d+\.\d\d %$", output, re.M)
    assert re.search(r"^test loss: \d+\.\d{4}$", output, re.M)
    assert "test utterances: 6\n" in output
    assert "test impossible: 0\n" in output
    if find_spec("flashlight"):
        beam = [
            "test",
            *TRUST,
            "--ckpt_path",
            "best",
            "--model.decoder",
            "BeamDecoder",
            "--model.decoder.beam_size",
            "5",
        ]
        main(beam)
        assert "test PER: " in capsys.readouterr().out
        assert "lm=nowhere.arpa: no such file" in fails(capsys, *beam, "--model.decoder.lm", "nowhere.arpa")

    main(["predict", *TRUST, "--ckpt_path", "best"])
    of_test = transcripts(capsys.readouterr().out)
    assert [entry["id"] for entry in of_test] == [f"test-{i}" for i in range(6)]
    assert [entry["id"] for entry in of_test if not entry["reference"]] == []

    shutil.rmtree("data")
    shutil.rmtree("cache")
    Path("mine").mkdir()
    write(Path("mine/one.wav"), ("a", "i", "s"))
    write(Path("mine/two.flac"), ("u",))
    write(Path("three.wav"), ("s", "s"))
    main(["predict", *TRUST, "--ckpt_path", "best", "--data.audio", '["mine", "three.wav"]'])
    own = transcripts(capsys.readouterr().out)
    assert len(own) == 3
    assert sorted(Path(entry["id"]).stem for entry in own) == ["one", "three", "two"]
    for entry in own:
        assert "reference" not in entry
        assert entry["seconds"] > 0
        for phone in entry["phones"]:
            assert phone["phone"] in ("a", "i", "u", "s")
            assert 0 <= phone["start"] < phone["end"] <= entry["seconds"]
            assert 0 < phone["confidence"] <= 1

    Path("text.wav").write_text("no sound")
    before = list(Path("runs").rglob("predictions*"))
    for name in ("text.wav", "nowhere.wav"):
        assert name in fails(capsys, "predict", *TRUST, "--ckpt_path", "last", "--data.audio", f"[{name}]")
    assert list(Path("runs").rglob("predictions*")) == before


def transcripts(output: str) -> list[dict]:
    """Read those that a command tells of, and look at their pictures."""
    path = Path(re.search(r"^transcripts of \d+ utterances: (.*)$", output, re.M)[1])
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    drawn = [entry["picture"] for entry in entries if "picture" in entry]
    assert 0 < len(drawn) <= 4
    for name in drawn:
        Image.open(path.with_name(name)).verify()
    return entries


def test_a_run_that_stopped_within_an_epoch_ends_like_one_that_never_stopped():
    main(["fit", "--config", "tiny.yaml", "--trainer.default_root_dir", "whole"])
    main(["fit", "--config", "tiny.yaml", "--trainer.default_root_dir", "parts", "--trainer.max_steps", "1"])
    main(["fit", *TRUST, "--ckpt_path", str(last("parts")), "--trainer.max_steps", "-1"])
    assert_same_end(last("whole"), last("parts"))


@pytest.mark.filterwarnings("ignore:LightningCLI's args")
@pytest.mark.parametrize("config", of_data_sets(c for c in CONFIGS if c.stem.startswith(SPEECH)))
def test_every_configuration_builds_and_says_what_it_needs(config: Path):
    """Those that run offline take a step, with utterances that are here; others say what belongs where."""
    data = yaml.safe_load(config.read_text())["data"]["init_args"]
    args = ["--data.corpus", "tests.support.tones.Tones", "--data.batch_frames", "100"]
    if config.stem.startswith("espeak"):
        args += ["--data.eval_batch_frames", "100", "--trainer.enable_progress_bar", "false"]
        main(["fit", "--config", str(config), "--trainer.fast_dev_run", "1", *args])
    else:
        built(config, *args, device="cpu").model.configure_optimizers()
        corpus = getattr(datamodules, data["corpus"]["class_path"])(**data["corpus"]["init_args"])
        with pytest.raises(FileNotFoundError) as missing:
            corpus.prepare()
        assert str(Path("data").resolve()) in str(missing.value)
    assert not Path("runs").exists()
