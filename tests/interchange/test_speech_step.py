"""The exported step of a recogniser gives what the recogniser gives for the whole recording."""

import gc
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

from lit_effattn import SpeechRecognizer, Transformer
from lit_effattn.attention import LinearAttention, SoftmaxAttention
from lit_effattn.cli import main
from lit_effattn.datamodules import Filterbanks
from lit_effattn.datamodules.speech.filterbanks import SCALE, RunningNormalization, moments, normalized
from lit_effattn.interchange.export import METADATA, export
from lit_effattn.interchange.steps import SpeechStep, _FilterbankLayer
from lit_effattn.nn.front_ends import ConvSubsampling
from lit_effattn.sequence import tensors
from lit_effattn.tasks.ctc import GreedyDecoder
from lit_effattn.tasks.speech_stream import StreamFeatures
from tests.interchange.test_export import empty, needs
from tests.support.commands import REPOSITORY, fails
from tests.support.rounding import rounding
from tests.tasks.test_speech_stream import KINDS, PHONES, model, sound, whole

BANKS = Filterbanks(8000, n_mels=10)  # frames of 200 samples, 80 apart
N = 3051  # samples: 36 windows, 9 frames of the model
STATISTICS = moments(BANKS(sound(8000)))

Run = Callable[..., tuple[Tensor, list[Tensor]]]


def chunks(features: Tensor, factor: int, look_ahead: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The inputs of the steps for (T, F), with anything in the padding, and as many more as the model looks ahead."""
    for t in range(-(-len(features) // factor) + look_ahead):
        part = features[t * factor : (t + 1) * factor]
        padded = features.new_full((factor, features.size(1)), 7.0)
        padded[: len(part)] = part
        yield padded, torch.tensor(len(part))


def stepped(run: Run, state: list[Tensor], rows: list[Tensor], recognizer: SpeechRecognizer) -> Tensor:
    """Log-probabilities (B, T', V) of steps on rows of equal length (T, F), without the first `look_ahead` ones."""
    outputs = []
    for inputs in zip(*(chunks(row, recognizer.subsampling, recognizer.look_ahead) for row in rows), strict=True):
        log_probs, *state = run(*(torch.stack(parts) for parts in zip(*inputs, strict=True)), *state)
        outputs.append(log_probs)
    return torch.stack(outputs[recognizer.look_ahead :], 1)


@pytest.mark.parametrize(
    ("kind", "front_end", "look_ahead"),
    [*((k, "conv", 0) for k in KINDS), ("linear", "conv", 3), ("lstm", "stacking", 2), ("xl", "projection", 1)],
)
@torch.no_grad()
def test_steps_are_the_whole(kind: str, front_end: str, look_ahead: int):
    """Two rows of 37 feature vectors: the last of 10 frames of factor 4 has one, the last of 13 of factor 3 too."""
    recognizer = model(kind, front_end, look_ahead).double()
    rows = list(torch.randn(2, 37, 10, generator=torch.Generator().manual_seed(0)).double())
    step = SpeechStep(recognizer, 2, None, None)
    streamed = stepped(step, list(tensors(step.empty)), rows, recognizer)
    torch.testing.assert_close(streamed, torch.stack([whole(recognizer, row) for row in rows]))


class Wide(ConvSubsampling):
    """Says that it depends on more frames before than it does."""

    def __init__(self, n_features: int, d_model: int) -> None:
        super().__init__(n_features, d_model, channels=2)
        self.context = (9, 3)


@torch.no_grad()
def test_a_front_end_that_reads_several_frames_again():
    torch.manual_seed(0)
    backbone = Transformer(16, 2, 1, attention=LinearAttention)
    recognizer = SpeechRecognizer(backbone, 10, PHONES, front_end=Wide).double().eval()
    step = SpeechStep(recognizer, 1, None, None)
    assert step.empty.features.shape == (1, 12, 10)
    row = torch.randn(23, 10).double()
    streamed = stepped(step, list(tensors(step.empty)), [row], recognizer)
    torch.testing.assert_close(streamed[0], whole(recognizer, row))


def test_filterbanks_by_matrices():
    for samples in (sound(680), sound(680).cumsum(0) / 9 + 0.2, torch.zeros(680)):  # noise, low frequencies, silence
        layer = _FilterbankLayer(BANKS, 7)
        expected, frames = BANKS(samples.double()), SCALE * samples.unfold(0, 200, 80)
        # Sums of 200 terms are inexact by ε; the root of an energy, a weighted norm of them, by ε √(sum of weights).
        inexact = rounding(torch.float32, 200) * layer.transform.abs().max() * frames.norm(dim=-1, keepdim=True)
        error = 2 * (inexact * BANKS.weights().sum(0).sqrt() / expected.div(2).exp()).log1p()
        assert ((layer(samples[None])[0] - expected).abs() <= error + rounding(torch.float32, 1, 20)).all()


@torch.no_grad()
def test_samples_are_made_into_features():
    """The matrices of the filterbanks have float32's digits, on any processor."""
    recognizer, samples = model("linear", look_ahead=2).double(), sound(N).double()
    x = BANKS(samples)
    for features, expected in (
        (StreamFeatures(BANKS, STATISTICS), normalized(x, STATISTICS)),
        (StreamFeatures(BANKS, running=True), RunningNormalization()(x)),
        (StreamFeatures(BANKS), x),
    ):
        step = SpeechStep(recognizer, 1, None, features).double()
        state, outputs = tensors(step.empty), []
        for t in range(11):
            part = samples.new_zeros(1, 440)
            given = samples[320 * t : 320 * t + 440]
            part[0, : len(given)] = given
            log_probs, *state = step(part, torch.tensor([4 if t < 9 else 0]), *state)
            outputs.append(log_probs)
        torch.testing.assert_close(torch.cat(outputs[2:]), whole(recognizer, expected), rtol=1e-3, atol=1e-3)


def exported(path: Path) -> tuple[Run, dict[str, Any]]:
    """The program in a file, as a function of tensors, and its metadata."""
    if path.suffix == ".pt2":
        extra = {METADATA: ""}
        program = torch.export.load(path, extra_files=extra).module()
        return program, json.loads(extra[METADATA])
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    names = [given.name for given in session.get_inputs()]

    def run(*given: Tensor) -> list[Tensor]:
        arrays = {name: t.numpy() for name, t in zip(names, given, strict=True)}
        return [torch.from_numpy(array) for array in session.run(None, arrays)]

    return run, json.loads(session.get_modelmeta().custom_metadata_map[METADATA])


EXPORTED = [
    ("lstm", "stacking", "torch"),
    *(
        pytest.param(kind, "conv", format, marks=pytest.mark.exhaustive)
        for kind in KINDS
        for format in ("onnx", "torch")
    ),
]


@needs("onnx", "onnxscript", "onnxruntime")
@pytest.mark.parametrize(("kind", "front_end", "format"), EXPORTED)
def test_an_exported_step_is_the_whole(kind: str, front_end: str, format: str, tmp_path: Path):
    recognizer = model(kind, front_end, 2)
    path = tmp_path / {"onnx": "step.onnx", "torch": "step.pt2"}[format]
    done = export(recognizer, path, format=format, batch_size=2, check=5)
    assert (done.checked, done.unit) == (5, "frame")
    run, about = exported(path)
    assert (about["phones"], about["look_ahead"], about["n_mels"]) == (list(PHONES), 2, 10)
    assert about["frame_seconds"] == 0.01 * about["subsampling"] == 0.01 * recognizer.subsampling
    rows = list(torch.randn(2, 37, 10, generator=torch.Generator().manual_seed(0)))
    streamed = stepped(run, empty(about), rows, recognizer)
    expected = torch.stack([whole(recognizer, row) for row in rows])
    tolerance = rounding(torch.float32, 2 * 8 * 16, 10)  # two layers; the look-ahead has weights of 5
    torch.testing.assert_close(streamed, expected, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------------------------------------ the command


def checkpoint(recognizer: SpeechRecognizer, path: Path, normalize: str | None = "corpus") -> str:
    saved = {
        "state_dict": recognizer.state_dict(),
        "hyper_parameters": dict(recognizer.hparams),
        "datamodule_hyper_parameters": {"sample_rate": 8000, "n_mels": 10, "normalize": normalize},
        "SpeechData": {"features": "", "statistics": STATISTICS},
    }
    torch.save(saved, path)
    return str(path)


@needs("onnx", "onnxscript", "onnxruntime")
def test_the_page_recognises_what_the_model_recognises(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recognizer = model("linear", look_ahead=2)
    main(["export", "--ckpt_path", checkpoint(recognizer, tmp_path / "best.ckpt"), "--check", "7"])
    assert re.search(r"7 frames compared with PyTorch: .* ms a frame, the model", capsys.readouterr().out)
    page = (REPOSITORY / "docs/export.md").read_text(encoding="utf-8")
    (code,) = [code for code in re.findall(r"^```py\n(.*?)^```$", page, re.M | re.S) if "wave" in code]
    assert set(re.findall(r"^import (\w+)", code, re.M)) == {"json", "wave", "numpy", "onnxruntime"}
    for n_samples, n_frames in ((N, 9), (250, 1), (199, 0)):
        soundfile.write("a.wav", sound(n_samples).numpy(), 8000, subtype="PCM_16")
        exec(code, names := {})
        samples = torch.from_numpy(soundfile.read("a.wav", dtype="float32")[0])
        features = normalized(BANKS(samples), STATISTICS)
        log_probs = whole(recognizer, features) if n_frames else torch.zeros(0, 5)
        (labels,) = GreedyDecoder()(log_probs[None], torch.tensor([n_frames]), PHONES)
        assert names["recognised"] == [PHONES[label - 1] for label in labels]
        assert names["n_frames"] == n_frames == len(log_probs)
        assert len(labels) > 2 or n_samples < N
    assert names["about"]["sound"] == {"sample_rate": 8000, "frame": 200, "hop": 80}


def test_refusals(tmp_path: Path, capsys):
    for normalize, options, message in (
        ("utterance", [], "trained with normalize='utterance', whose statistics look ahead.*--normalize running"),
        ("corpus", ["--max_len", "9"], "max_len=9 does not apply"),
        ("corpus", ["--format", "safetensors", "--normalize", "running"], "normalize='running' does not apply"),
    ):
        path = checkpoint(model("linear"), tmp_path / "best.ckpt", normalize)
        assert re.search(message, fails(capsys, "export", "--ckpt_path", path, "--format", "torch", *options))
    assert [file.name for file in tmp_path.iterdir()] == ["best.ckpt"]


def test_no_class_of_the_same_name_is_left(tmp_path: Path):
    """A configuration names Transformer, which must then be one class: `lit-effattn` after `export` in a notebook."""
    model = SpeechRecognizer(Transformer(16, 2, 1, attention=LinearAttention), 10, PHONES)
    gc.disable()
    try:
        export(model, tmp_path / "x.pt2", format="torch", check=1)
    finally:
        gc.enable()
    assert [kind.__name__ for kind in Transformer.__subclasses__()].count("Transformer") == 0


def test_what_has_no_step(tmp_path: Path):
    def made(kind: Any = LinearAttention, causal: bool = True, **options: Any) -> SpeechRecognizer:
        return SpeechRecognizer(Transformer(16, 2, 1, attention=kind, causal=causal), 10, PHONES, **options)

    class Later(ConvSubsampling):
        def __init__(self, n_features: int, d_model: int) -> None:
            super().__init__(n_features, d_model)
            self.context = (3, 4)

    write = partial(export, target=tmp_path / "x.pt2", format="torch")
    with pytest.raises(ValueError, match="causal=False, so it needs the whole recording"):
        write(made(causal=False))
    with pytest.raises(ValueError, match=r"Later: context=\(3, 4\), .* whose context ends at 3, its factor less 1"):
        write(made(front_end=Later))
    with pytest.raises(ValueError, match=r"SoftmaxAttention keeps every position.*--max_len"):
        write(made(SoftmaxAttention))
    with pytest.raises(ValueError, match="normalize='running' does not apply"):
        write(made(), normalize="running")
    assert write(made(SoftmaxAttention), max_len=6).checked == 6
    assert np.isfinite(write(made(), overwrite=True).difference)
