"""`lit-effattn predict --stream` on a model that was trained on tones."""

import io
import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
import yaml
from safetensors.torch import load_file

from lit_effattn.cli import main
from lit_effattn.tasks.speech_stream import SpeechStream
from tests.cli.test_command_speech import TINY, TRUST
from tests.support.commands import fails

RECORDING = "data/tones/test/0.wav"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of one epoch."""
    folder = tmp_path_factory.mktemp("stream")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        Path("speech.yaml").write_text(yaml.safe_dump(TINY))
        main(["fit", "--config", "speech.yaml", "--model.backbone.causal", "true", "--trainer.max_epochs", "1"])
    return folder


@pytest.fixture(autouse=True)
def _there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))


def transcribed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    main(["predict", *TRUST, "--ckpt_path", "last", "--stream", *args])
    return capsys.readouterr().out


def test_a_file_a_pipe_and_predict_agree(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Blocks are of 1 s of a file, of 100 ms of a pipe, or as long as asked for."""
    main(["predict", *TRUST, "--ckpt_path", "last", "--data.audio", RECORDING])
    (line,) = next(Path("runs").rglob("transcripts.jsonl")).read_text().splitlines()
    phones = [phone["phone"] for phone in json.loads(line)["phones"]]
    assert phones
    sizes, log_probs = list[int](), SpeechStream.log_probs
    monkeypatch.setattr(
        SpeechStream, "log_probs", lambda self, x, last=False: sizes.append(len(x)) or log_probs(self, x, last=last)
    )
    samples, rate = soundfile.read(RECORDING)
    pcm = (samples * 2**15).round().astype("<i2").tobytes()
    for name, data, args, longest in (
        (RECORDING, b"", [], len(samples)),
        (RECORDING, b"", ["--block_ms", "1"], rate // 1000),
        ("-", pcm, [], rate // 10),
        ("-", Path(RECORDING).read_bytes(), ["--block_ms", "20"], rate // 50),
    ):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
        sizes.clear()
        assert transcribed(capsys, name, *args).split() == phones
        assert max(sizes) == longest < rate
    times = [row.split("\t") for row in transcribed(capsys, RECORDING, "--times").splitlines()]
    assert [name for _, name, _ in times] == phones
    starts = [phone["start"] for phone in json.loads(line)["phones"]]
    np.testing.assert_allclose([float(start) for start, *_ in times], starts, atol=0.006)


def test_a_beam_is_that_of_predict(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("flashlight")
    args = ["--ckpt_path", "last", "--data.audio", RECORDING, "--model.decoder", "BeamDecoder"]
    main(["predict", *TRUST, *args, "--model.decoder.beam_size", "5"])
    paths = sorted(Path("runs").rglob("transcripts.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    phones = [phone["phone"] for phone in json.loads(paths[-1].read_text())["phones"]]
    assert transcribed(capsys, RECORDING, "--beam_size", "5").split() == phones


def test_a_stream_goes_on_from_a_saved_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Two parts of a recording, cut at a border of blocks, print what the whole prints."""
    recordings = [soundfile.read(f"data/tones/test/{i}.wav") for i in range(6)]
    samples, rate = np.concatenate([samples for samples, _ in recordings]), recordings[0][1]
    cut, file = rate // 10 * 10, str(tmp_path / "s.state")
    for name, part in {"whole": samples, "first": samples[:cut], "rest": samples[cut:]}.items():
        soundfile.write(tmp_path / f"{name}.wav", part, rate)
    whole = transcribed(capsys, str(tmp_path / "whole.wav"), "--times")
    first = transcribed(capsys, str(tmp_path / "first.wav"), "--times", "--save_state", file)
    rest = transcribed(capsys, str(tmp_path / "rest.wav"), "--times", "--state", file)
    assert first + rest == whole
    assert first
    assert rest
    (tmp_path / "x.state").write_text("x")
    for args, words in (
        (["--state", str(tmp_path / "x.state")], "x.state can't be read as a state"),
        (["--save_state", str(tmp_path / "x.state")], "x.state exists and is not a saved state"),
        (["--state", file, "--normalize", "running"], "a stream with other options"),
    ):
        assert words in fails(capsys, "predict", *TRUST, "--ckpt_path", "last", "--stream", RECORDING, *args)


class Microphone(io.BytesIO):
    """A pipe that Ctrl-C ends."""

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if size and not data:
            raise KeyboardInterrupt
        return data


def interrupted(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        transcribed(capsys, *args, "--times")
    assert stopped.value.code == 130
    return capsys.readouterr().out


def test_ctrl_c_ends_a_microphone(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """It ends the stream, which prints the last phones, or saves what was heard."""
    file, log_probs, ends = tmp_path / "s.state", SpeechStream.log_probs, list[bool]()
    data = (soundfile.read(RECORDING)[0] * 2**15).round().astype("<i2").tobytes()
    monkeypatch.setattr(
        SpeechStream, "log_probs", lambda self, x, last=False: ends.append(last) or log_probs(self, x, last=last)
    )
    rows = transcribed(capsys, RECORDING, "--times")
    transcribed(capsys, RECORDING, "--save_state", str(file))
    whole = load_file(file)
    file.unlink()
    for args in ([], ["--save_state", str(file)]):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=Microphone(data)))
        assert interrupted(capsys, "-", *args) == rows
        assert ends[-1] == (not args)
    assert [*load_file(file)["counts"]] == [*whole["counts"]]
    before = file.read_bytes()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=Microphone()))
    assert interrupted(capsys, "-", "--save_state", str(file)).strip() == ""
    assert file.read_bytes() == before


def test_ctrl_c_within_a_block_waits_for_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    file, log_probs, n = str(tmp_path / "s.state"), SpeechStream.log_probs, list[int]()
    samples, rate = soundfile.read(RECORDING)
    soundfile.write(tmp_path / "rest.wav", samples[rate // 5 :], rate)
    whole = transcribed(capsys, RECORDING, "--times")

    def stopped(self: SpeechStream, samples: torch.Tensor, last: bool = False) -> torch.Tensor:
        n.append(len(samples))
        if len(n) == 2:
            signal.raise_signal(signal.SIGINT)
        return log_probs(self, samples, last=last)

    with monkeypatch.context() as patch:
        patch.setattr(SpeechStream, "log_probs", stopped)
        first = interrupted(capsys, RECORDING, "--block_ms", "100", "--save_state", file)
    assert n == [rate // 10] * 2
    assert first + transcribed(capsys, str(tmp_path / "rest.wav"), "--times", "--state", file) == whole


def test_what_was_decoded_of_a_damaged_file_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Its last phones too, before the message; a saved state is not written."""
    samples, rate = soundfile.read(RECORDING)
    path = tmp_path / "cut.flac"
    soundfile.write(path, np.tile(samples, 20), rate)
    path.write_bytes(path.read_bytes()[:-1000])
    state, log_probs, ends = tmp_path / "s.state", SpeechStream.log_probs, list[bool]()
    monkeypatch.setattr(
        SpeechStream, "log_probs", lambda self, x, last=False: ends.append(last) or log_probs(self, x, last=last)
    )
    capsys.readouterr()
    for args in (["--times"], ["--save_state", str(state)]):
        with pytest.raises(SystemExit):
            main(["predict", *TRUST, "--ckpt_path", "last", "--stream", str(path), *args])
        output = capsys.readouterr()
        assert "cut.flac: its " in output.err
        assert output.out
        assert ends[-1] == (args == ["--times"])
    assert not state.exists()


def test_names_of_phones_do_not_control_the_terminal(capsys: pytest.CaptureFixture[str], folder: Path):
    checkpoint = torch.load(next(folder.rglob("last.ckpt")), weights_only=True)
    phones = checkpoint["hyper_parameters"]["phones"]
    checkpoint["hyper_parameters"]["phones"] = type(phones)(f"\x1b[2J{phone}\n" for phone in phones)
    torch.save(checkpoint, "hostile.ckpt")
    capsys.readouterr()
    for times in ([], ["--times"]):
        main(["predict", *TRUST, "--ckpt_path", "hostile.ckpt", "--stream", RECORDING, *times])
        shown = capsys.readouterr().out
        assert r"\x1b[2J" in shown
        assert "\x1b" not in shown
        assert r"\n" in shown


def test_a_model_whose_phones_depend_on_the_blocks_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    transcribed(capsys, RECORDING)
    main(["predict", *TRUST, "--ckpt_path", "last", "--stream", RECORDING])
    assert "block_ms" not in capsys.readouterr().err
    args = ["--model.backbone.causal", "true", "--trainer.max_epochs", "1", "--trainer.default_root_dir", str(tmp_path)]
    kind = ["--model.backbone.attention", "TransformerXLAttention", "--model.backbone.attention.mem_len", "8"]
    main(["fit", "--config", "speech.yaml", *args, *kind])
    capsys.readouterr()
    main(["predict", *TRUST, "--ckpt_path", str(next(tmp_path.rglob("last.ckpt"))), "--stream", RECORDING])
    said = capsys.readouterr().err
    assert said.count("the phones may depend on --block_ms") == 1
    assert "same_length: true" in said


def test_errors_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
):
    def refused(*args: str, checkpoint: str = "last") -> str:
        return fails(capsys, "predict", *TRUST, "--ckpt_path", checkpoint, "--stream", *args)

    def saved(part: str, **values: object) -> str:
        """Save the checkpoint with other values."""
        content = torch.load(next(folder.rglob("last.ckpt")), weights_only=True)
        content[part].update(values)
        torch.save(content, "other.ckpt")
        return "other.ckpt"

    file = tmp_path / "s.state"
    transcribed(capsys, RECORDING, "--save_state", str(file))
    before = file.read_bytes()
    assert "there is no such file" in refused("nosuch.wav", "--save_state", str(file))
    assert file.read_bytes() == before
    assert "block_ms=0 must be" in refused(RECORDING, "--block_ms", "0")
    assert "beam_size=0 must be" in refused(RECORDING, "--beam_size", "0")
    assert "model:digits" in refused(RECORDING, checkpoint="model:digits")
    keyboard = SimpleNamespace(buffer=SimpleNamespace(isatty=lambda: True))
    for stdin, kind in ((None, "closed"), (keyboard, "a terminal")):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", stdin)
            message = f"-: the standard input is {kind}; send the sound through a pipe, or name a file"
            assert message in refused("-")
    for part, values, message in (
        ("SpeechData", {"statistics": torch.zeros(2)}, "it lacks the statistics of its training data"),
        ("datamodule_hyper_parameters", {"n_mels": "x"}, "it has no sample_rate and n_mels of SpeechData"),
        (
            "datamodule_hyper_parameters",
            {"normalize": "utterance"},
            "normalize='utterance', whose statistics look ahead",
        ),
    ):
        assert message in refused(RECORDING, checkpoint=saved(part, **values))
    main(["predict", *TRUST, "--ckpt_path", "other.ckpt", "--normalize", "running", "--stream", RECORDING])
