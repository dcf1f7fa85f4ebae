"""A stream gives what the whole recording gives, for every causal kind, front end and division into pieces."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_effattn import LSTM, Transformer
from lit_effattn.attention import (
    CompressiveAttention,
    InfiniteAttention,
    LinearAttention,
    PerformerAttention,
    ShawAttention,
    SoftmaxAttention,
    TransformerXLAttention,
    WindowedLinearAttention,
)
from lit_effattn.checkpoints.files import DamagedError
from lit_effattn.datamodules import Filterbanks
from lit_effattn.datamodules.speech.filterbanks import RunningNormalization
from lit_effattn.datamodules.speech.utterances import SpeechBatch
from lit_effattn.generation import Kept
from lit_effattn.nn.front_ends import ConvSubsampling, FrameStacking, Projection
from lit_effattn.sequence import tensors
from lit_effattn.tasks import SpeechRecognizer
from lit_effattn.tasks.ctc import BeamDecoder, GreedyDecoder
from lit_effattn.tasks.kept_states import load_stream, save_state, save_stream
from lit_effattn.tasks.speech_stream import KeptStream, RecognizedPhone, SpeechStream, stream_features

PHONES = ("a", "b", "c", "d")
KINDS: dict[str, Any] = {
    "softmax": partial(SoftmaxAttention, window=8),
    "shaw": partial(ShawAttention, window=8),
    "xl": partial(TransformerXLAttention, mem_len=8, same_length=True),
    "compressive": partial(CompressiveAttention, mem_len=8, segment_len=1),
    "infinite": partial(InfiniteAttention, mem_len=8, segment_len=1),
    "linear": LinearAttention,
    "performer": PerformerAttention,
    "windowed": WindowedLinearAttention,
    "lstm": None,
}
FRONT_ENDS = {
    "projection": Projection,
    "stacking": partial(FrameStacking, factor=3),
    "conv": partial(ConvSubsampling, factor=4, channels=3),
}
SIZES = {"odd": [1, 0, 3001, 159, 161, 2678], "blocks": [400] * 15}  # samples of pieces


def model(kind: str, front_end: str = "conv", look_ahead: int = 0) -> SpeechRecognizer:
    torch.manual_seed(0)
    backbone = LSTM(16, 2) if kind == "lstm" else Transformer(16, 2, 2, attention=KINDS[kind])
    made = SpeechRecognizer(backbone, 10, PHONES, front_end=FRONT_ENDS[front_end], look_ahead=look_ahead).eval()
    if look_ahead:
        torch.manual_seed(2)  # else all outputs of the LSTM are blank
        torch.nn.init.normal_(made.backbone.convolution.weight, std=5)
    return made


def whole(recognizer: SpeechRecognizer, features: torch.Tensor) -> torch.Tensor:
    n = features.size(0)
    nothing = torch.zeros(1, 0, dtype=torch.long)
    batch = SpeechBatch(features[None], torch.tensor([n]), nothing, torch.tensor([0]), ["a"])
    with torch.inference_mode():
        return recognizer(batch)[0][0]


def heard(stream: SpeechStream, pieces: list[torch.Tensor]) -> list[RecognizedPhone]:
    """The phones of the last pieces of a stream."""
    return [phone for i, p in enumerate(pieces) for phone in stream(p, last=i == len(pieces) - 1)]


def read(stream: SpeechStream, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    return [stream.log_probs(p, last=i == len(pieces) - 1) for i, p in enumerate(pieces)]


def sound(n: int) -> torch.Tensor:
    return 0.3 * torch.randn(n, generator=torch.Generator().manual_seed(1))


CASES = [
    *((kind, "conv", 0) for kind in KINDS),
    *((kind, "conv", 3) for kind in ("linear", "xl", "lstm")),
    ("linear", "projection", 0),
    ("linear", "stacking", 0),
    ("linear", "stacking", 200),  # more than the whole
]


@pytest.mark.parametrize("sizes", SIZES)
def test_a_stream_is_the_whole(sizes: str):
    banks, samples = Filterbanks(8000, n_mels=10), sound(sum(SIZES[sizes])).double()
    features = RunningNormalization()(banks(samples))
    pieces = [*samples.split(SIZES[sizes]), samples[:0]]
    for case in CASES:
        recognizer = model(*case).double()
        first, second = (SpeechStream(recognizer, banks, RunningNormalization()) for _ in range(2))
        streamed = torch.cat(read(first, pieces))
        torch.testing.assert_close(streamed, whole(recognizer, features))
        phones = heard(second, pieces)
        (labels,) = GreedyDecoder()(streamed[None], torch.tensor([len(streamed)]), PHONES)
        assert [phone.phone for phone in phones] == [PHONES[label - 1] for label in labels], case
        assert labels, case  # the outputs of a new model are not all blank


def test_a_stream_that_looks_ahead_is_as_much_later():
    """Without look-ahead 8 frames follow from 34 feature vectors and the 3 after the last; 3 fewer with it."""
    samples = sound(34 * 80 + 120)  # hop 80 samples, frame 200
    n = [len(SpeechStream(model("lstm", "conv", a), Filterbanks(8000, n_mels=10)).log_probs(samples)) for a in (0, 3)]
    assert n == [8, 5]
    for dtype in (torch.float32, torch.float64):
        recognizer = model("lstm", "conv", 3).to(dtype)
        assert SpeechStream(recognizer, Filterbanks(8000, n_mels=10))(torch.zeros(0), last=True) == []
        assert SpeechStream(recognizer, Filterbanks(8000, n_mels=10)).log_probs(samples, last=True).dtype == dtype


def test_statistics_are_found_whatever_the_name_of_the_data():
    saved = {
        "datamodule_hyper_parameters": {"sample_rate": 8000, "n_mels": 10, "normalize": "corpus"},
        "callbacks": {},
        "MySpeechData": {"features": "Filterbanks", "statistics": torch.ones(3, 10)},
    }
    features = stream_features(saved, "a.ckpt")
    assert features is not None
    assert features.statistics is saved["MySpeechData"]["statistics"]


def test_times_and_confidence_are_those_of_the_first_frame(monkeypatch: pytest.MonkeyPatch):
    """Of the labels _ a a _ a b b at 20 ms a frame: a at 20, a at 80, b at 100 ms."""
    recognizer = model("linear")
    stream = SpeechStream(recognizer, Filterbanks(8000, n_mels=10))
    labels = torch.tensor([0, 1, 1, 0, 1, 2, 2])
    log_probs = torch.full((7, 5), 0.1).scatter(1, labels[:, None], 0.6).log()
    pieces = iter([log_probs[:2], log_probs[2:2], log_probs[2:6], log_probs[6:]])
    monkeypatch.setattr(stream, "log_probs", lambda samples, last: next(pieces))
    phones = [tuple(phone) for _ in range(4) for phone in stream(torch.zeros(0))]
    assert phones == [("a", 0.04, 0.6), ("a", 0.16, 0.6), ("b", 0.2, 0.6)]  # factor 4, 10 ms


def test_a_beam_stream_gives_the_phones_of_the_whole(tmp_path: Path):
    pytest.importorskip("flashlight")
    recognizer, samples = model("linear").double(), sound(6000).double()
    banks, decoder = Filterbanks(8000, n_mels=10), BeamDecoder(5)
    stream = SpeechStream(recognizer, banks, decoder=decoder)
    phones, log_probs = heard(stream, [*samples.split(500)]), whole(recognizer, banks(samples))
    (labels,) = decoder(log_probs[None], torch.tensor([len(log_probs)]), PHONES)
    assert [phone.phone for phone in phones] == [PHONES[label - 1] for label in labels]
    with pytest.raises(ValueError, match="the hypotheses of a search can't be kept; use GreedyDecoder"):
        save_stream(stream, tmp_path / "s.state")


@pytest.mark.parametrize(
    ("kind", "front_end", "look_ahead"),
    [("softmax", "conv", 0), ("linear", "stacking", 3), ("xl", "conv", 3), ("lstm", "conv", 9)],
)
def test_a_stream_goes_on_from_its_file_as_from_memory(kind: str, front_end: str, look_ahead: int, tmp_path: Path):
    """Another stream goes on after any piece. Going on changes neither the position in memory nor the file."""
    recognizer, banks = model(kind, front_end, look_ahead), Filterbanks(8000, n_mels=10)
    pieces = [*sound(6000).split([150, 1, 0, 700, 1149, 2900, 1100]), torch.zeros(0)]
    streams = [SpeechStream(recognizer, banks, RunningNormalization()) for _ in range(4)]
    expected, other, loaded, back = streams
    whole, log_probs, positions = [], [], []
    for i, piece in enumerate(pieces):
        save_stream(expected, tmp_path / f"{i}.state")
        positions.append((expected.kept, len(whole)))
        whole += expected(piece, last=i == len(pieces) - 1)
        log_probs.append(other.log_probs(piece, last=i == len(pieces) - 1))
    assert whole
    for i, (kept, n_before) in enumerate(positions):
        load_stream(loaded, tmp_path / f"{i}.state")
        pairs = [*zip(leaves(loaded.kept), leaves(kept), strict=True)]
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)
        assert heard(loaded, pieces[i:]) == whole[n_before:]
        back.kept = kept
        assert torch.equal(torch.cat(read(back, pieces[i:])), torch.cat(log_probs[i:]))
        back.kept = kept
        assert heard(back, pieces[i:]) == whole[n_before:]


def leaves(kept: KeptStream) -> list[torch.Tensor]:
    return [*tensors(tuple(kept))]


def test_streams_that_do_not_go_on(tmp_path: Path):
    recognizer, banks, file = model("linear"), Filterbanks(8000, n_mels=10), tmp_path / "s.state"
    stream = SpeechStream(recognizer, banks, RunningNormalization())
    stream(sound(2000))
    save_stream(stream, file)
    with pytest.raises(ValueError, match=r"a stream with other options; .*: sample_rate 8000, .*, normalize running"):
        load_stream(SpeechStream(recognizer, banks), file)
    with pytest.raises(ValueError, match="a stream with other options"):
        load_stream(SpeechStream(recognizer, Filterbanks(11025, n_mels=10), RunningNormalization()), file)
    other = model("lstm")
    with pytest.raises(ValueError, match="other weights; give the checkpoint that wrote it"):
        load_stream(SpeechStream(other, banks, RunningNormalization()), file)
    kept = Kept(recognizer.backbone.initial_state(1), torch.zeros(1, 1, dtype=torch.long), 1)
    save_state(kept, file, recognizer)
    with pytest.raises(DamagedError, match="`lit-effattn predict --stream FILE --save_state` writes them"):
        load_stream(stream, file)


def test_the_state_stays_as_large():
    for kind in KINDS:
        stream, sizes = SpeechStream(model(kind), Filterbanks(8000, n_mels=10)), list[int]()
        for _ in range(4):
            stream(sound(8000))
            sizes.append(sum(t.numel() for t in tensors(stream.state)))
        assert len(set(sizes)) == 1, kind


def test_what_can_not_stream_is_refused():
    recognizer, banks = SpeechRecognizer(Transformer(16, 2, 1, causal=False), 10, PHONES), Filterbanks(8000, n_mels=10)
    with pytest.raises(ValueError, match="causal=False, so it needs the whole recording"):
        SpeechStream(recognizer, banks)
    with pytest.raises(ValueError, match="the filterbanks have n_mels=20, but the model n_mels=10"):
        SpeechStream(model("linear"), Filterbanks(8000, n_mels=20))
    for samples in (torch.zeros(1, 800), torch.zeros(800, dtype=torch.int16)):  # would give no phones, or wrong ones
        with pytest.raises(ValueError, match=r"samples is torch.* of shape .*; expected floats .* of shape \(n,\)"):
            SpeechStream(model("linear"), banks)(samples)
    SpeechStream(model("linear"), banks)(torch.zeros(800, dtype=torch.double))
