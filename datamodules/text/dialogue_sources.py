"""Document-grounded conversations from files: CMU DoG (Zhou, Prabhumoye & Black 2018)."""

from collections.abc import Iterator
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lit_effattn.datamodules.common.faults import Fault, Faults
from lit_effattn.datamodules.common.files import regular
from lit_effattn.datamodules.common.json_data import parse_json

Shown = Literal["apart", "before", "when_shown"]

FOLDERS = {"train": "train", "val": "valid", "test": "test"}
_SECTIONS = ("0", "1", "2", "3")
_NUMBER = ("wikiDocumentIdx", "docLinkIdx", "index")  # keys of a document's number in all releases


class Passage(NamedTuple):
    """A section of a document, or a turn."""

    text: str  # not empty
    scored: bool  # whether it is a turn, which a model may predict


class DialogueSource(NamedTuple):
    """Conversations by split."""

    splits: dict[str, list[list[Passage]]]  # of train, val and test: conversations, as passages in the order of reading
    faults: Faults  # files that are left out
    identity: Any  # plain data that change if the texts change


def cmu_dog(root: Path, document: Shown) -> DialogueSource:
    """Read CMU DoG: `WikiData/*.json` and `Conversations/{train,valid,test}/*.json` in `root`.

    A turn is an element of a conversation's `history`; its `docIdx` is the section of the film's document that was
    shown at that time. Section 0 is made of the lines `key: value` of its parts. White space becomes one space. All
    turns are scored. Speakers, times and ratings are not used. Turns and sections without text are left out, and so
    are files that can't be read, which are reported.

    Args:
        root: The folder.
        document: Where sections are read. "apart": each section, and then the turns during which it was shown, is a
            conversation. "before": a conversation has all sections that were shown in it, and then all turns.
            "when_shown": each section comes before the first turn during which it was shown. But for "before", a
            section that is shown again after another is read again.

    Raises:
        FileNotFoundError: If a folder or its files are missing.
        ValueError: If a split has no conversation.
    """
    paths = {name: sorted((root / "Conversations" / folder).glob("*.json")) for name, folder in FOLDERS.items()}
    paths["documents"] = sorted((root / "WikiData").glob("*.json"))
    if missing := [name for name, files in paths.items() if not files]:
        raise FileNotFoundError(
            f"CMU DoG ({', '.join(missing)}) is not in {root.resolve()}: get "
            "https://github.com/festvox/datasets-CMU_DoG and put its folders Conversations and WikiData there, or name "
            "their folder with root. --config dialogue_infinite needs no download."
        )
    faults = Faults()
    documents = dict(_read_all(paths["documents"], _document, faults))
    splits = {}
    for name in FOLDERS:
        read = _read_all(paths[name], lambda data: _conversations(data, documents, document), faults)
        splits[name] = [[p for p in passages if p.text] for conversations in read for passages in conversations]
        if not splits[name]:
            raise ValueError(f"{paths[name][0].parent}: no conversation can be read; the first fault: {faults.first}")
    stats = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for files in paths.values() for p in files]
    return DialogueSource(splits, faults, [str(root.resolve()), document, stats])


def _read_all(paths: list[Path], read: Any, faults: Faults) -> Iterator[Any]:
    for path in paths:
        try:
            yield read(parse_json(regular(path).read_bytes()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            faults.add(Fault("unreadable", f"{path}: {type(error).__name__}: {error}; get the file again"))


def _document(data: Any) -> tuple[int, dict[str, str]]:
    """Return a document's number and its sections."""
    sections = {name: data[name] for name in _SECTIONS if name in data}
    parts = sections.pop("0")
    lines = [f"{key}: {', '.join(value) if isinstance(value, list) else value}" for key, value in parts.items()]
    return _number(data), {"0": "\n".join(map(_text, lines)), **{name: _text(text) for name, text in sections.items()}}


def _conversations(data: Any, documents: dict[int, dict[str, str]], document: Shown) -> list[list[Passage]]:
    if (number := _number(data)) not in documents:
        raise ValueError(f"its document {number!r:.40} is not in WikiData")
    sections = documents[number]
    turns = [(str(turn["docIdx"]), Passage(_text(turn["text"]), True)) for turn in data["history"]]
    by_section = [
        (Passage(sections[name], False), [turn for _, turn in group])
        for name, group in groupby((turn for turn in turns if turn[1].text), key=lambda turn: turn[0])
    ]
    if document == "before":
        shown = dict.fromkeys(section for section, _ in by_section)
        whole = [*shown, *(turn for _, turns in by_section for turn in turns)]
        return [whole] if shown else []
    apart = [[section, *turns] for section, turns in by_section]
    return apart if document == "apart" or not apart else [list(chain.from_iterable(apart))]


def _number(data: Any) -> int:
    return data[next((name for name in _NUMBER if name in data), _NUMBER[0])]


def _text(text: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{str(text)[:40]!r} must be a text")
    text.encode()  # raises for half of a surrogate pair, which JSON can hold and tokenizers reject
    return " ".join(text.split())
