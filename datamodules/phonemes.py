"""Which phones there are, which count as the same, and how words become phones."""

import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_effattn.datamodules.utterances import Utterance

_NAMED = 5  # so many of what is wrong are named, the rest is counted

# ------------------------------------------------------------------------------------------------------------- TIMIT

_48 = (
    "aa ae ah ao aw ax ay b ch cl d dh dx eh el en epi er ey f g hh ih ix iy jh k l m n ng ow oy p r s sh sil t th uh "
    "uw v vcl w y z zh"
)
TIMIT_48 = tuple(_48.split())
"""What models of TIMIT are trained on: Lee & Hon 1989, "Speaker-independent phone recognition using hidden Markov
models", table 1."""

_TO_48 = {
    "ax-h": "ax",
    "axr": "er",
    "bcl": "vcl",
    "dcl": "vcl",
    "em": "m",
    "eng": "ng",
    "gcl": "vcl",
    "h#": "sil",
    "hv": "hh",
    "kcl": "cl",
    "nx": "n",
    "pau": "sil",
    "pcl": "cl",
    "tcl": "cl",
    "ux": "uw",
}
_TO_39 = {
    "ao": "aa",
    "ax": "ah",
    "cl": "sil",
    "el": "l",
    "en": "n",
    "epi": "sil",
    "ix": "ih",
    "vcl": "sil",
    "zh": "sh",
}


def timit_48(label: str) -> str | None:
    """What one of TIMIT's 61 labels is among the 48; None for the glottal stop q, which is deleted.

    Raises:
        KeyError: If it is none of the 61.
    """
    return None if label == "q" else _TIMIT_61[label]


def timit_39(phone: str) -> str:
    """What one of the 48 counts as when errors are counted; all silences and closures are sil."""
    return _TO_39.get(phone, phone)


_TIMIT_61 = {phone: phone for phone in TIMIT_48 if phone not in ("cl", "sil", "vcl")} | _TO_48

# ------------------------------------------------------------------------------------------------------------ espeak

_CONSONANTS = "p b t d k ɡ tʃ dʒ f v θ ð s z ʃ ʒ h m n ŋ l ɹ j w ɾ"  # 25
_VOWELS = "i ɪ e ɛ æ a ɑ ɒ ɔ o ʊ u ʌ ɜ ə aɪ aʊ eɪ oʊ əʊ ɔɪ"  # 21
ESPEAK_PHONES = tuple(sorted((_CONSONANTS + " " + _VOWELS).split()))
"""The 46 phones of espeak-ng's English dialects, in IPA, without marks of stress and length.

No two phones of a dialect differ in length alone, but for spellings of one sound (i, iː), so the mark tells nothing.
What ends in ə, ɹ or l, such as eə, ɔːɹ, əl, is two phones; which of the two it is written as depends on the dialect.
Variants that are rare or confined to a dialect are folded into their nearest: the weak ᵻ and ɐ into ɪ and ə, the
rhotic ɚ into ɜ, Scottish ʉ, r and ʍ into u, ɹ and w. What espeak writes for a pause or a transition is no phone.
"""

_ESPEAK_OTHERS = {
    **dict.fromkeys(["", "ʲ", "ʔ"], ""),
    **{"r": "ɹ", "ʍ": "w", "t̪": "t", "ᵻ": "ɪ", "ɐ": "ə", "ɚ": "ɜ", "ʉ": "u", "aa": "a"},
    **{"ei": "eɪ", "əu": "əʊ", "ʌʊ": "əʊ", "æʊ": "aʊ", "ʌʉ": "aʊ", "oɪ": "ɔɪ", "əɪ": "ɜ"},
    **{"eə": "ɛ ə", "ɛə": "ɛ ə", "iə": "i ə", "ʊə": "ʊ ə", "ɑə": "ɑ ə", "ɔə": "ɔ ə", "oə": "o ə"},
    **{"aɪə": "aɪ ə", "aɪɚ": "aɪ ɜ", "əl": "ə l", "n̩": "ə n"},
    **{
        "ɔɹ": "ɔ ɹ",
        "ɑɹ": "ɑ ɹ",
        "ɛɹ": "ɛ ɹ",
        "ɪɹ": "ɪ ɹ",
        "ʊɹ": "ʊ ɹ",
        "ʉɹ": "u ɹ",
        "oɹ": "o ɹ",
        "əɹ": "ə ɹ",
        "ʌɹ": "ʌ ɹ",
    },
}
_ESPEAK = {phone: (phone,) for phone in ESPEAK_PHONES} | {k: tuple(v.split()) for k, v in _ESPEAK_OTHERS.items()}


def espeak_phones(name: str) -> tuple[str, ...]:
    """What espeak-ng's name of a sound, in IPA, stands for: no, one or two phones of `ESPEAK_PHONES`.

    Raises:
        ValueError: If it is not known.
    """
    bare = re.sub("[ˈˌː:]", "", name)
    if bare not in _ESPEAK:
        raise ValueError(
            f"espeak-ng's sound {name!r} is none that its English had in version 1.52; install that version: "
            "pip install 'lit-effattn[speech]'"
        )
    return _ESPEAK[bare]


# ----------------------------------------------------------------------------------------------------------- lexicons

_VARIANT = re.compile(r"(.+)\((\d+)\)")


class Lexicon:
    """Pronunciations in the format of CMUdict: a line a word, ``WORD  P HH OW N Z``, of any case.

    Lines that begin with ``;;;`` and what follows `` #`` are comments. Of the variants of a word, ``WORD(1)`` and so
    on, or one word in several lines, the first counts.

    Args:
        path: The file.
        stress: Keep the digit that a vowel ends with (AH0, AH1), which makes three phones of each.
    """

    def __init__(self, path: str | Path, *, stress: bool = False) -> None:
        self.path = Path(path)
        self.stress = stress

    @cached_property
    def phones(self) -> tuple[str, ...]:
        """All that occur in it, sorted."""
        return tuple(sorted({phone for phones in self._words.values() for phone in phones}))

    def check(self) -> None:
        """See that the file is there.

        Raises:
            FileNotFoundError: If it is not; says where one gets one.
        """
        if not self.path.is_file():
            raise FileNotFoundError(
                f"lexicon={str(self.path)!r}: there is no such file ({self.path.resolve()}); put a lexicon in "
                "CMUdict's format there. English: cmudict.dict of https://github.com/cmusphinx/cmudict, or for "
                "LibriSpeech librispeech-lexicon.txt of https://www.openslr.org/11"
            )

    def words(self, text: str) -> list[str]:
        """The words of a text as the lexicon spells them: without punctuation around them, in capitals."""
        stripped = (word.strip('.,;:!?"()[]“”…-–—') for word in text.upper().split())
        return [word for word in stripped if word]

    def pronounce(self, words: Iterable[str]) -> tuple[str, ...]:
        """The phones of words.

        Raises:
            KeyError: If one is unknown.
        """
        return tuple(phone for word in words for phone in self._words[word])

    def __contains__(self, word: str) -> bool:
        return word in self._words

    @cached_property
    def _words(self) -> dict[str, tuple[str, ...]]:
        self.check()
        words: dict[str, tuple[str, ...]] = {}
        for number, line in enumerate(_text(self.path).splitlines(), 1):
            parts = re.split(r"\s#", line, maxsplit=1)[0].split()
            if not parts or line.startswith(";;;"):
                continue
            if len(parts) == 1:
                raise ValueError(f"{self.path}:{number}: {parts[0]!r} has no phones; expected WORD  P HH OW N Z")
            variant = _VARIANT.fullmatch(parts[0])
            phones = parts[1:] if self.stress else [phone.rstrip("012") for phone in parts[1:]]
            words.setdefault((variant[1] if variant else parts[0]).upper(), tuple(phones))
        if not words:
            raise ValueError(f"{self.path}: holds no word; expected lines such as WORD  P HH OW N Z")
        return words


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return path.read_text(encoding="latin-1")  # as CMUdict was until 0.7b


def pronounced(spoken: Iterable[tuple[Utterance, str | None]], lexicon: Lexicon, name: str) -> list[Utterance]:
    """Give utterances the phones of their texts; leave out, and count in a warning, those with unknown words.

    Args:
        spoken: Utterances and what was said in words; None: the utterance has its phones.
        lexicon: Knows the words.
        name: Of where they are from, for the warning.

    Raises:
        ValueError: If not one utterance is left.
    """
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
        f"{first_few(unknown, 'word')}; add what they are pronounced like"
    )
    if not known:
        raise ValueError(message)
    rank_zero_warn(message)
    return known


def first_few(names: Iterable[str], what: str) -> str:
    """So many of a kind, and the first of them: ``7 words (A, B, C, D, E, …)``."""
    names = list(names)
    more = ", …" if len(names) > _NAMED else ""
    return f"{len(names)} {what}{'' if len(names) == 1 else 's'} ({', '.join(names[:_NAMED])}{more})"
