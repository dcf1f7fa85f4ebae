import importlib.util
import json
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import soundfile

from lit_effattn.datamodules import EspeakCorpus
from lit_effattn.datamodules.speech import espeak
from lit_effattn.datamodules.speech.espeak import Speaker, Synthesizer, speakers, timed_phones
from lit_effattn.datamodules.speech.phonemes import ESPEAK_PHONES

LINCOLN = "four score and seven years ago our fathers brought forth on this continent a new nation"
SENTENCES = [[f"{word} is the word", f"we say {word} once"] for word in LINCOLN.split()]


def is_here() -> bool:
    try:
        espeak.espeak_library()
    except ModuleNotFoundError:
        return False
    return True


needs_espeak = pytest.mark.skipif(not is_here(), reason="espeak-ng is not installed: pip install 'lit-effattn[speech]'")


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


@needs_espeak
def test_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(espeak, "library_sentences", lambda: SENTENCES)
    corpus = EspeakCorpus(str(tmp_path / "a"), minutes=0.2)
    corpus.prepare()
    texts: dict[str, set[str]] = {}
    for split, least in (("train", 9.6), ("val", 1.2), ("test", 1.2)):
        lines = [json.loads(line) for line in (tmp_path / "a" / f"{split}.jsonl").read_text().splitlines()]
        utterances = corpus.utterances(split)
        assert [u.audio for u in utterances] == [tmp_path / "a" / line["audio_filepath"] for line in lines]
        assert least <= sum(u.duration or 0 for u in utterances) < least + 5
        assert {u.speaker for u in utterances} <= {s.voice for s in speakers(split)}
        for utterance, line in zip(utterances, lines, strict=True):
            samples, rate = soundfile.read(utterance.audio)
            assert (rate, len(samples) / rate) == (16_000, pytest.approx(utterance.duration, abs=1e-4))
            assert np.abs(samples).max() > 0.1
            assert utterance.phones == tuple(line["phonemes"])
            assert set(line["phonemes"]) <= set(ESPEAK_PHONES)
            assert 6 < len(line["phonemes"]) / line["duration"] < 20
            starts, ends = zip(*line["times"], strict=True)
            assert len(starts) == len(line["phonemes"])
            assert list(starts) == sorted(starts)
            assert all(start <= end for start, end in line["times"])
            assert ends[-1] <= line["duration"]
        texts[split] = {line["text"] for line in lines}
    assert not texts["train"] & texts["val"]
    assert not texts["train"] & texts["test"]
    assert not texts["val"] & texts["test"]
    assert all(texts["test"].isdisjoint(pieces) or texts["test"].issuperset(pieces) for pieces in SENTENCES)

    before = contents(tmp_path / "a")
    espeak.make_corpus(tmp_path / "b", 0.2)
    assert contents(tmp_path / "b") == before  # bit for bit
    corpus.prepare()  # is there already
    assert contents(tmp_path / "a") == before
    with pytest.raises(FileExistsError, match=r"'minutes': 0\.2.*'minutes': 1.*delete it or name another"):
        EspeakCorpus(str(tmp_path / "a"), minutes=1).prepare()
    monkeypatch.setattr(espeak, "library_sentences", lambda: SENTENCES[:2])
    with pytest.raises(ValueError, match=r"documentation gives only.*fewer minutes"):
        espeak.make_corpus(tmp_path / "c", 1)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"a", "b"}


@needs_espeak
def test_what_is_said():
    """An s is above 4 kHz, a vowel below. A breathy voice is the same at any time: its seed was the time in seconds."""
    with closing(Synthesizer()) as voice:
        american = voice.say(Speaker("en-us+m1", 160, 50), "a better cat")
        british = voice.say(Speaker("en+f1", 160, 50), "a better cat")
        spoken = voice.say(Speaker("en-us+m1", 140, 50), "see sow saw sigh say so")
        with pytest.raises(ChildProcessError, match=r"no voice 'en-us\+nobody'"):
            voice.say(Speaker("en-us+nobody", 160, 50), "a")
    assert " ".join(american.phones) == "ə b ɛ ɾ ɜ k æ t"
    assert " ".join(british.phones) == "ə b ɛ t ə k a t"
    assert spoken.phones[::2] == ["s"] * 6
    spectra = [np.abs(np.fft.rfft(spoken.samples[int(a * 16_000) : int(b * 16_000)])) ** 2 for a, b in spoken.times]
    high = [spectrum[len(spectrum) // 2 :].sum() / spectrum.sum() for spectrum in spectra]
    assert min(high[::2]) > 0.5
    assert max(high[1::2]) < 0.1
    samples = []
    for seconds in (0, 1.01):
        time.sleep(seconds)
        with closing(Synthesizer()) as voice:
            samples.append(voice.say(Speaker("en+f5", 200, 50), "see").samples)
    assert np.array_equal(*samples)


@needs_espeak
def test_what_is_missing_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(espeak, "find_spec", lambda name: None)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    monkeypatch.setattr(espeak, "library_sentences", lambda: pytest.fail("read the documentation for nothing"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    with pytest.raises(FileExistsError, match="has files that are not a corpus"):
        espeak.make_corpus(tmp_path / "full", 1)
    assert (tmp_path / "full" / "thesis.txt").exists()
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lit-effattn\[speech\]'.*libespeak-ng1"):
        espeak.make_corpus(tmp_path / "new", 1)
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr("ctypes.util.find_library", lambda name: "libespeak-ng.so.0")
    with closing(Synthesizer()) as voice, pytest.raises(ChildProcessError, match=r"libespeak-ng\.so\.0"):
        voice.say(Speaker("en+f1", 160, 50), "a")


def test_sounds_become_phones_with_times():
    sounds = [("", 0), ("b", 100), ("ˈaɪə", 200), ("l", 500), ("ʲ", 500), ("", 600), ("ɾ", 700)]
    phones, times = timed_phones(sounds, 1000, 1000)
    assert phones == ["b", "aɪ", "ə", "l", "ɾ"]
    assert times == [(0.1, 0.2), (0.2, 0.35), (0.35, 0.5), (0.5, 0.5), (0.7, 1.0)]
    assert timed_phones([], 0, 1000) == ([], [])


def test_speakers_share_dialects_and_nothing_else():
    voices = {split: [s.voice.split("+") for s in speakers(split)] for split in ("train", "val", "test")}
    dialects = {split: {dialect for dialect, _ in v} for split, v in voices.items()}
    variants = {split: {variant for _, variant in v} for split, v in voices.items()}
    assert dialects["train"] == dialects["val"] == dialects["test"]
    assert len(dialects["train"]) == 8
    assert [len(variants[split]) for split in ("train", "val", "test")] == [9, 2, 2]
    assert len(set.union(*variants.values())) == 13
    found = speakers("train")
    assert len(found) == len(set(found)) == 72
    assert len({s.rate for s in found}) > 3
    assert len({s.pitch for s in found}) > 3
    assert found == speakers("train")


def test_sentences(monkeypatch: pytest.MonkeyPatch):
    """Those of a text, cut evenly; those of the library are the same at each call."""
    text = """The first line
    goes on, and ends.  This one; too, is plain.

    Not `this` one.  Nor has this 1.  Nor XML here at all.  No end to this one

    And too short.  Don't ask: what is Python for?  As I said it is not camelCase.  I say so again."""
    assert list(espeak.sentences_of(text)) == ["the first line goes on and ends", "i say so again"]
    assert espeak.cut("a b c") == ["a b c"]
    words = [str(i) for i in range(25)]
    pieces = espeak.cut(" ".join(words))
    assert " ".join(pieces).split() == words
    assert [len(piece.split()) for piece in pieces] == [8, 8, 9]
    root = Path(importlib.util.__file__).parent
    monkeypatch.setattr(espeak, "library_files", lambda _: [root / "abc.py", root / "util.py"])
    found = espeak.library_sentences()
    pieces = [piece for sentence in found for piece in sentence]
    assert len(pieces) == len(set(pieces)) > 100
    assert found == espeak.library_sentences()
    assert max(len(piece.split()) for piece in pieces) == 12
