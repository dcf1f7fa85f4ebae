"""Pairs of paragraphs, English and German, from LibreOffice's help: real translations, available as Debian packages.

    apt-get download libreoffice-help-en-us libreoffice-help-de
    dpkg -x libreoffice-help-en-us_*.deb english
    dpkg -x libreoffice-help-de_*.deb german
    python -m scripts.libreoffice_pairs english german data/libreoffice

The last command writes train.tsv, val.tsv and test.tsv for `SequencePairs(corpus="files")`. Help pages of the same name
have paragraphs with the same ids, which makes the pairs. All pairs of a page are in the same split: test or validation
by a hash of its name, one page in 20 each. Pairs whose source text also occurs in train are left out of val and test,
and pairs whose source text occurs in val are left out of test. Each pair is written once. The texts are under the
Mozilla Public License 2.0.

Other languages of the help work as well. French, for example:

    python -m scripts.libreoffice_pairs english french data/libreoffice_fr
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from scripts import documented_parser

SPLITS = ("train", "val", "test")
_HELD_OUT = 20  # one page in 20 is for validation, another one for test
_BLOCKS = ("p", "h1", "h2", "h3", "h4", "h5")
_SPACES = ("br", "img")  # separate words, though they contain no text


class _Paragraphs(HTMLParser):
    """Collects the texts of the paragraphs and headings of a page by their ids, in their order.

    A text may have alternatives for systems and programs, such as Command and Ctrl. Only the default is read.
    """

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.texts: dict[str, list[str]] = defaultdict(list)
        self._id = ""  # of the open paragraph
        self._parts: list[str] = []
        self._skipped: list[bool] = []  # of each open span: whether it is an alternative

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open a paragraph or a span."""
        values = dict(attrs)
        name = values.get("id") or ""
        if tag in _BLOCKS:
            self._close()
            self._id = name
        elif tag == "span":
            self._skipped.append("hidden" in values and not name.startswith("default"))
        elif tag in _SPACES:
            self._parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        """Close a paragraph or a span."""
        if tag in _BLOCKS:
            self._close()
        elif tag == "span" and self._skipped:
            self._skipped.pop()

    def handle_data(self, data: str) -> None:
        """Add to the open paragraph."""
        if not any(self._skipped):
            self._parts.append(data)

    def _close(self) -> None:
        text = " ".join("".join(self._parts).split())
        if self._id and text:
            self.texts[self._id].append(text)
        self._id, self._parts, self._skipped = "", [], []


def paragraphs(page: Path) -> dict[str, list[str]]:
    """Return the texts of the paragraphs of a help page by their ids; several, if an id occurs several times."""
    parser = _Paragraphs()
    parser.feed(page.read_text(encoding="utf-8"))
    parser.close()
    return parser.texts


def aligned(source: Path, target: Path) -> Iterator[tuple[str, str]]:
    """Yield pairs of paragraphs of two pages. Ids that do not occur equally often in both are left out."""
    counterparts = paragraphs(target)
    for name, texts in paragraphs(source).items():
        if len(texts) == len(counterparts.get(name, ())):
            yield from zip(texts, counterparts[name], strict=True)


def split_of(page: str) -> str:
    """Return the split of a page, by its name."""
    number = int.from_bytes(hashlib.sha256(page.encode()).digest()[:8], "big") % _HELD_OUT
    return {0: "test", 1: "val"}.get(number, "train")


def divided(source: Path, target: Path, least: int, most: int) -> dict[str, list[tuple[str, str]]]:
    """Return the distinct pairs of each split whose texts have from `least` to `most` words on both sides.

    Pairs of two equal texts are left out: they are names and programs, which are not translated.
    """
    splits: dict[str, dict[tuple[str, str], None]] = {split: {} for split in SPLITS}
    for page in sorted(path.relative_to(source).as_posix() for path in source.rglob("*.html")):
        if (target / page).is_file():
            pairs = aligned(source / page, target / page)
            kept = (pair for pair in pairs if pair[0] != pair[1] and all(least <= len(t.split()) <= most for t in pair))
            splits[split_of(page)].update(dict.fromkeys(kept))
    seen: set[str] = set()
    for split in SPLITS:
        splits[split] = {pair: None for pair in splits[split] if pair[0] not in seen}
        seen.update(text for text, _ in splits[split])
    return {split: list(pairs) for split, pairs in splits.items()}


def text_folder(root: Path) -> Path:
    """Return the folder of the pages in an unpacked package.

    Raises:
        FileNotFoundError: If there is not exactly one.
    """
    folders = sorted(root.glob("usr/share/libreoffice/help/*/text"))
    if len(folders) != 1:
        lacking = f"{len(folders)} folders usr/share/libreoffice/help/*/text"
        raise FileNotFoundError(f"{root}: has {lacking}; unpack one package of the help there")
    return folders[0]


def main(args: list[str] | None = None) -> None:
    """Write the splits and print the number of pairs in each."""
    parser = documented_parser(__doc__)
    parser.add_argument("source", type=Path, help="folder of the unpacked package of the source language")
    parser.add_argument("target", type=Path, help="folder of the unpacked package of the target language")
    parser.add_argument("out", type=Path, help="folder to write train.tsv, val.tsv and test.tsv to")
    parser.add_argument("--min_words", type=int, default=4, help="fewest words of a text (default: %(default)s)")
    parser.add_argument("--max_words", type=int, default=50, help="most words of a text (default: %(default)s)")
    given = parser.parse_args(args)
    folders = text_folder(given.source), text_folder(given.target)
    given.out.mkdir(parents=True, exist_ok=True)
    for split, pairs in divided(*folders, given.min_words, given.max_words).items():
        lines = [f"{source}\t{target}\n" for source, target in pairs]
        (given.out / f"{split}.tsv").write_text("".join(lines), encoding="utf-8", newline="\n")
        print(f"{split}: {len(pairs):,} pairs")


if __name__ == "__main__":
    main()
