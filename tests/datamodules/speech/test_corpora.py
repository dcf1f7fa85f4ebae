import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lit_effattn.datamodules import EspeakCorpus, LibriSpeechCorpus, ManifestCorpus, Pronouncer
from lit_effattn.datamodules.speech.corpora import read_manifest
from lit_effattn.datamodules.speech.phonemes import ESPEAK_PHONES

LEXICON = "HELLO  HH AH0 L OW1\nWORLD  W ER1 L D\nREAD  R IY1 D\n"


def spaced(names: str) -> tuple[str, ...]:
    return tuple(names.split())


def manifest(path: Path, *lines: dict[str, Any] | str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
    return str(path)


def lexicon(root: Path) -> str:
    (root / "lexicon").write_text(LEXICON)
    return str(root / "lexicon")


def line(audio: str = "a.wav", **others: Any) -> dict[str, Any]:
    return {"audio_filepath": audio, "duration": 1.5} | others


def test_lines_of_a_manifest(tmp_path: Path):
    path = manifest(
        tmp_path / "m" / "x.jsonl",
        line(text="hello"),
        "",
        line("b/c.flac", phonemes="a b", speaker=7, offset=12345.25, duration=1),
        line("/d.wav", phonemes=["a", "ʃ"], id="d", lang="en", duration=None),
        line("b/c.flac", text="x", phonemes="b"),
    )
    found = read_manifest(Path(path))
    assert [x.where for x in found] == [f"{path}:{i}" for i in (1, 3, 4, 5)]
    assert [x.text for x in found] == ["hello", None, None, "x"]
    utterances = [x.utterance for x in found]
    assert [u.id for u in utterances] == ["a.wav", "b/c.flac:12345.25", "d", "b/c.flac"]
    assert [u.audio for u in utterances] == [
        tmp_path / "m/a.wav",
        tmp_path / "m/b/c.flac",
        Path("/d.wav"),
        tmp_path / "m/b/c.flac",
    ]
    assert [u.phones for u in utterances] == [None, ("a", "b"), ("a", "ʃ"), ("b",)]
    assert [u.speaker for u in utterances] == [None, "7", None, None]
    assert [(u.start, u.duration) for u in utterances] == [(0, 1.5), (12345.25, 1), (0, None), (0, 1.5)]


def test_bad_lines_are_named(tmp_path: Path):
    numbers = [
        (line() | {"text": "x", key: value}, f"{key}={shown} must be a number")
        for key in ("offset", "duration")
        for value, shown in (("1", "'1'"), (True, "True"), (-1, "-1"), ([1], r"\[1\]"), (float("nan"), "nan"))
    ]
    names = [
        (line() | {"text": "x", key: value}, f"{key}=.{{1,60}} must be")
        for key in ("speaker", "id", "audio_filepath", "text")
        for value in (1.5, True, "", ["x"])
    ]
    phones = [(line(phonemes=value), "phonemes=.* must be a list") for value in ([], ["a b"], "", 1, {})]
    for bad, message in [
        ('{"audio_filepath": "a.wav"', "is not JSON"),
        (200_000 * "[", "is not JSON .*nested too deeply"),
        ("[1]", "is not a JSON object"),
        ({"duration": 1, "text": "x"}, "lacks audio_filepath"),
        (line(), "neither text nor phonemes"),
        (line(text="x", duration=0), "duration=0 must be more than 0"),
        ('{"audio_filepath": "a.wav", "text": "x", "offset": 1e400}', "offset=inf must be a number"),
        (line(text="x", offset=10**400), "offset=10{20,49} must be a number"),
        (line("a\0.wav", text="x"), r"audio_filepath='a\\x00\.wav' can't be the name of a file"),
        (line("\ud800.wav", text="x"), r"has half of a character, '\\ud800'"),
        *numbers,
        *names,
        *phones,
    ]:
        path = manifest(tmp_path / "x.jsonl", line(text="x"), bad)
        with pytest.raises(ValueError, match=rf"x\.jsonl:2: .*{message}"):
            read_manifest(Path(path))
    assert read_manifest(Path(manifest(tmp_path / "x.jsonl", line("caf\udce9.wav", text="x"))))  # a name in Latin-1


def test_bad_lines_are_counted_and_a_line_in_another_encoding_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"(?s):1: .*:5: .*and 3 more"):
        read_manifest(Path(manifest(tmp_path / "x.jsonl", *["?"] * 8)))
    path = Path(manifest(tmp_path / "x.jsonl", line(text="x"), '{"audio_filepath": "b.wav", "text": "été"}'))
    path.write_bytes(path.read_text(encoding="utf-8").encode("latin-1"))
    with pytest.raises(ValueError, match=r"x\.jsonl:2: is not UTF-8 \(.* at byte 37\); correct or delete"):
        read_manifest(path)
    with pytest.raises(FileNotFoundError, match=r"no such manifest.*audio_filepath"):
        read_manifest(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no utterance"):
        read_manifest(Path(manifest(tmp_path / "x", "")))
    with pytest.raises(ValueError, match=r"x:2: 'a\.wav' is also in .*x:1;"):
        read_manifest(Path(manifest(tmp_path / "x", line(text="x"), line(text="y"))))


def test_a_manifest_in_another_encoding(tmp_path: Path):
    text = (json.dumps(line(phonemes="a ʃ"), ensure_ascii=False) + "\n") * 2
    text = text.replace("a.wav", "b.wav", 1)
    expected = [("b.wav", ("a", "ʃ")), ("a.wav", ("a", "ʃ"))]
    for data in (text.encode("utf-8-sig"), gzip.compress(text.encode())):
        (tmp_path / "x.jsonl").write_bytes(data)
        assert [(x.utterance.id, x.utterance.phones) for x in read_manifest(tmp_path / "x.jsonl")] == expected
    for data in (text.encode("utf-16"), text.encode("utf-16-le"), gzip.compress(text.encode())[:-20], b"\x89PNG\r\n"):
        (tmp_path / "x.jsonl").write_bytes(data)
        with pytest.raises(ValueError, match=r"x\.jsonl: its (content|compression) is"):
            read_manifest(tmp_path / "x.jsonl")


def test_recordings_that_are_trained_and_scored_on_are_counted(tmp_path: Path):
    (tmp_path / "link.wav").symlink_to("b.wav")
    (tmp_path / "val").mkdir()
    lines = {
        "train": [line(), line("b.wav")],
        "val/val": [
            line("c.wav"),
            line("../b.wav"),
            line(str(tmp_path / "a.wav"), offset=1),
            line("../link.wav", id="l"),
        ],
        "test": [line("b.wav", offset=1.5)],
    }
    paths = [manifest(tmp_path / f"{s}.jsonl", *(x | {"phonemes": "a"} for x in of)) for s, of in lines.items()]
    with pytest.warns(UserWarning, match=r"val\.jsonl: 3 recordings are in the training manifest, too") as warned:
        ManifestCorpus(*paths).prepare()
    assert len(warned) == 1


def three(root: Path, *lines: dict[str, Any]) -> list[str]:
    """The same manifest in three folders."""
    return [manifest(root / split / "manifest.json", *lines) for split in ("train", "val", "test")]


def test_manifests_with_phonemes_and_with_texts(tmp_path: Path):
    train, val, test = three(tmp_path, line(phonemes="b a"), line("b.wav", phonemes="c"))
    corpus = ManifestCorpus(train, val, manifest(Path(test), line(phonemes="z")))
    corpus.prepare()
    assert corpus.phones == corpus.folded == ("a", "b", "c")
    assert [(u.id, u.phones) for u in corpus.utterances("val")] == [("val/a.wav", ("b", "a")), ("val/b.wav", ("c",))]
    assert corpus.utterances("test")[0].audio == tmp_path / "test" / "a.wav"
    manifests = three(tmp_path, line(text="Hello, world."), line("b.wav", text="foo"), line("c.wav", phonemes="L L"))
    with pytest.raises(ValueError, match=r"manifest\.json:1: has a text, but no phonemes; give a lexicon"):
        ManifestCorpus(*manifests).prepare()
    with pytest.raises(FileNotFoundError, match="lexicon="):
        ManifestCorpus(*manifests, lexicon=str(tmp_path / "nowhere")).prepare()
    for options, message in (({"stress": True}, "stress=True needs a"), ({"g2p": Reader()}, "g2p was given without a")):
        with pytest.raises(ValueError, match=f"{message} lexicon"):
            ManifestCorpus(*manifests, **options)
    corpus = ManifestCorpus(*manifests, lexicon=lexicon(tmp_path))
    assert corpus.phones == spaced("AH D ER HH IY L OW R W")
    with pytest.warns(UserWarning, match=r"1 of 3 utterances are left out.*1 word \(FOO\)"):
        found = corpus.utterances("train")
    assert [u.phones for u in found] == [spaced("HH AH L OW W ER L D"), ("L", "L")]
    assert "OW1" in ManifestCorpus(*manifests, lexicon=lexicon(tmp_path), stress=True).phones
    spelt = ManifestCorpus(*manifests, lexicon=lexicon(tmp_path), g2p=Reader()).utterances("val")
    assert [u.phones for u in spelt] == [spaced("HH AH L OW W ER L D"), spaced("R IY D"), ("L", "L")]
    librispeech(tmp_path, "test-clean", ("61-1-0000", "FOO"))
    (read,) = LibriSpeechCorpus(str(tmp_path), lexicon(tmp_path), g2p=Reader()).utterances("test")
    assert read.phones == spaced("R IY D")


def test_phones_are_scored_as_the_folding_says(tmp_path: Path):
    manifests, folding = three(tmp_path, line(phonemes="a b c d")), tmp_path / "f.json"
    with pytest.raises(FileNotFoundError, match=r"folding='.*f\.json': there is no such file"):
        ManifestCorpus(*manifests, folding=str(folding)).prepare()
    for content, message in {
        "{": r"folding='.*f\.json' is not JSON",
        '{"a": 1}': "is not an object such as",
        '{"a": "z"}': "names 'z', which is not one of the 4 phones a b c d; correct it",
        '{"a": "b", "b": "c"}': "scores 'a' as 'b', but 'b' as 'c'; score both as the same phone",
    }.items():
        folding.write_text(content)
        with pytest.raises(ValueError, match=message):
            ManifestCorpus(*manifests, folding=str(folding)).prepare()
    folding.write_text('{"c": "b", "a": ""}')
    corpus = ManifestCorpus(*manifests, folding=str(folding))
    corpus.prepare()
    assert (corpus.phones, corpus.folded) == (("a", "b", "c", "d"), ("", "b", "b", "d"))


class Reader(Pronouncer):
    """Reads every word as READ is read."""

    def pronounce(self, words: Iterable[str]) -> dict[str, tuple[str, ...]]:
        return dict.fromkeys(words, ("R", "IY", "D"))


def librispeech(root: Path, subset: str, *utterances: tuple[str, str]) -> None:
    """As https://www.openslr.org/12 unpacks it."""
    for name, text in utterances:
        speaker, chapter, _ = name.split("-")
        folder = root / "LibriSpeech" / subset / speaker / chapter
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.flac").touch()
        with (folder / f"{speaker}-{chapter}.trans.txt").open("a") as file:
            file.write(f"{name} {text}\n")


def test_librispeech(tmp_path: Path):
    librispeech(tmp_path, "train-clean-100", ("19-198-0000", "HELLO"), ("19-198-0001", "WORLD"), ("26-1-0000", "READ"))
    librispeech(tmp_path, "train-other-500", ("20-1-0000", "READ"))
    (tmp_path / "LibriSpeech/train-other-500/20/1/._20-1.trans.txt").write_bytes(b"\0\5\x16\7")  # as macOS writes it
    librispeech(tmp_path, "dev-clean", ("84-1-0000", "HELLO"))
    librispeech(tmp_path, "test-clean", ("61-1-0000", "WORLD"), ("61-1-0001", "FOO"))
    corpus = LibriSpeechCorpus(
        str(tmp_path), lexicon(tmp_path), train=("train-clean-100", "train-other-500"), stress=True
    )
    corpus.prepare()
    found = corpus.utterances("train")
    assert [u.id for u in found] == ["19-198-0000", "19-198-0001", "26-1-0000", "20-1-0000"]
    assert [u.speaker for u in found] == ["19", "19", "26", "20"]
    assert found[0].audio == tmp_path / "LibriSpeech/train-clean-100/19/198/19-198-0000.flac"
    assert found[0].audio.is_file()
    assert found[0].phones == ("HH", "AH0", "L", "OW1")
    assert corpus.phones == spaced("AH0 D ER1 HH IY1 L OW1 R W")
    with pytest.warns(UserWarning, match=r"LibriSpeech test-clean: 1 of 2 .*FOO"):
        assert len(corpus.utterances("test")) == 1
    with pytest.warns(UserWarning, match="val: train-clean-100 of LibriSpeech are in train, too"):
        LibriSpeechCorpus(str(tmp_path), lexicon(tmp_path), val=("dev-clean", "train-clean-100")).prepare()
    (tmp_path / "LibriSpeech/dev-clean/84/1/84-1-0001.flac").touch()
    with pytest.raises(FileNotFoundError, match=r"84-1-0001\.flac: has no transcript \(1 of dev-clean"):
        corpus.utterances("val")
    message = r"lacks LibriSpeech's dev-other: get dev-other\.tar\.gz from .*openslr\.org/12"
    corpus = LibriSpeechCorpus(str(tmp_path), lexicon(tmp_path), val=("dev-other",))
    for call in (corpus.prepare, lambda: corpus.utterances("val")):
        with pytest.raises(FileNotFoundError, match=message):
            call()
    (tmp_path / "LibriSpeech" / "dev-other").mkdir()
    with pytest.raises(ValueError, match="dev-other: has no transcripts"):
        corpus.utterances("val")
    with pytest.raises(FileNotFoundError, match="lexicon="):
        LibriSpeechCorpus(str(tmp_path), "nowhere").prepare()
    espeak = EspeakCorpus(str(tmp_path / "nothing"))
    assert espeak.phones == espeak.folded == ESPEAK_PHONES  # known without a corpus
    with pytest.raises(FileNotFoundError, match="no such manifest"):
        espeak.utterances("train")
    with pytest.raises(ValueError, match="minutes=0 must be"):
        EspeakCorpus(minutes=0)
