from pathlib import Path

import pytest

from lit_effattn.datamodules import TimitCorpus
from lit_effattn.datamodules.speech.timit import CORE_TEST_SPEAKERS, DEVELOPMENT_SPEAKERS

LABELS = (
    "0 3050 h#\n3050 4559 sh\n4559 5723 ix\n5723 6642 hv\n6642 8772 q\n8772 9190 bcl\n9190 10337 b\n10337 11517 h#\n"
)
SENTENCES = ("SA1", "SA2", "SI648", "SX108")


def timit(root: Path, lower: bool = False, audio: str = ".WAV") -> Path:
    """A folder like TIMIT's, of two training speakers and three others: development, core test, and neither."""
    for speaker in ("TRAIN/DR1/FCJF0", "TRAIN/DR8/MBCG0", "TEST/DR1/FAKS0", "TEST/DR1/MDAB0", "TEST/DR1/FJWB0"):
        for sentence in SENTENCES:
            for end in (".PHN", audio, ".TXT"):
                name = f"{speaker}/{sentence}{end}"
                path = root / (name.lower() if lower else name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(LABELS if end == ".PHN" else "")
    return root


def test_its_folder_in_capitals_or_not(tmp_path: Path):
    for lower in (False, True):
        root = timit(tmp_path / str(lower), lower)
        corpus = TimitCorpus(str(root))
        ids = {split: [u.id for u in corpus.utterances(split)] for split in ("train", "val", "test")}
        assert ids == {
            "train": ["fcjf0_si648", "fcjf0_sx108", "mbcg0_si648", "mbcg0_sx108"],
            "val": ["faks0_si648", "faks0_sx108"],
            "test": ["mdab0_si648", "mdab0_sx108"],
        }
        utterance, name = corpus.utterances("test")[0], "TEST/DR1/MDAB0/SI648.WAV"
        assert utterance.audio == root / (name.lower() if lower else name)
        assert utterance.speaker == "mdab0"
        assert utterance.phones == ("sil", "sh", "ix", "hh", "vcl", "b", "sil")  # q deleted
    (tmp_path / "False/TEST/DR1/MDAB0/._SI648.PHN").write_bytes(b"\0\5\x16\7")  # as macOS writes it
    (tmp_path / "False/TEST/DR1/MDAB0/SI648.WAV.wav").touch()  # a RIFF copy
    names = [u.audio.name for u in TimitCorpus(str(tmp_path / "False")).utterances("test")]
    assert names == ["SI648.WAV.wav", "SX108.WAV"]


def test_its_phones(tmp_path: Path):
    corpus = TimitCorpus(str(tmp_path))
    assert corpus.places == [tmp_path]
    assert (len(corpus.phones), len(corpus.folded), len(set(corpus.folded))) == (48, 48, 39)
    counts_as = dict(zip(corpus.phones, corpus.folded, strict=True))
    assert counts_as["vcl"] == counts_as["cl"] == "sil"
    assert counts_as["zh"] == "sh"
    assert (len(DEVELOPMENT_SPEAKERS), len(CORE_TEST_SPEAKERS)) == (50, 24)
    assert not DEVELOPMENT_SPEAKERS & CORE_TEST_SPEAKERS
    assert sum(speaker.startswith("f") for speaker in CORE_TEST_SPEAKERS) == 8


def test_what_is_not_there_is_told(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"TIMIT is not in .*no folder TRAIN.*LDC93S1.*DR1/FCJF0/SI1027\.PHN"):
        TimitCorpus(str(tmp_path / "nowhere")).prepare()
    timit(tmp_path)
    with pytest.warns(UserWarning, match="TIMIT has") as warned:
        TimitCorpus(str(tmp_path)).prepare()
    for expected, found in (("3696 utterances for 'train'", 4), ("400 utterances for 'val'", 2), ("192 utterances", 2)):
        assert any(expected in str(w.message) and f"but {found} were found" in str(w.message) for w in warned)
    (tmp_path / "TEST/DR1/MDAB0/SX108.WAV").unlink()
    with pytest.raises(FileNotFoundError, match=r"SX108\.WAV: there is no such file"):
        TimitCorpus(str(tmp_path)).utterances("test")
    for path in (tmp_path / "TEST/DR1/MDAB0").iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match="for 'test'"):
        TimitCorpus(str(tmp_path)).utterances("test")


def test_a_bad_label_is_named(tmp_path: Path):
    path = timit(tmp_path) / "TEST/DR1/MDAB0/SX108.PHN"
    for line in ("3050 4559 xx", "3050 4559", "", "3050 4559 cl", "3050 4559 sh ix"):
        path.write_text(f"0 3050 h#\n{line}\n4559 5723 ix\n")
        with pytest.raises(ValueError, match=r"SX108\.PHN:2: "):
            TimitCorpus(str(tmp_path)).utterances("test")
