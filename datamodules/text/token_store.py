"""Cached files of tokens, made once per text. They are memory-mapped, so processes share them."""

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lit_effattn.datamodules.common.bars import progress_bar
from lit_effattn.datamodules.common.cache import cached_folder
from lit_effattn.datamodules.common.files import regular
from lit_effattn.datamodules.common.json_data import parse_json
from lit_effattn.datamodules.common.splits import SPLITS
from lit_effattn.datamodules.text.sources import Document, TextSource
from lit_effattn.datamodules.text.tokenizers import ByteTokenizer, Tokenizer

FORMAT = 1
"""Version of the file format. Increment it if the same texts give different files."""

_QUICK = 20_000_000  # less text, in bytes, shows no progress bar
_Advance = Callable[[int], None]


class SplitTokens(NamedTuple):
    """The tokens of a split.

    Attributes:
        tokens: (n,), mapped from a file, of the smallest unsigned type that holds them, without `<start>`.
        borders: (documents + 1,): document i is `tokens[borders[i] : borders[i + 1]]`, never empty.
    """

    tokens: np.ndarray
    borders: np.ndarray


class TokenStore:
    """A folder with the vocabulary of a source and the tokens of its splits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._about: dict[str, Any] = parse_json(regular(folder / "about.json").read_text())

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the tokens."""
        return Tokenizer.from_spec((self.folder / "tokenizer.json").read_text(encoding="utf-8"))

    def n_tokens(self, split: str) -> int:
        """Return the number of tokens in a split."""
        return self._about[split]["n_tokens"]

    def n_bytes(self, split: str) -> int:
        """Return the number of bytes of text in a split."""
        return self._about[split]["n_bytes"]

    def split(self, name: str) -> SplitTokens:
        """Open the tokens of a split."""
        dtype = np.dtype(self._about["dtype"])
        tokens = np.memmap(self.folder / f"{name}.bin", dtype, mode="r")
        return SplitTokens(tokens, np.load(self.folder / f"{name}.npy"))

    def is_whole(self) -> bool:
        """Return whether every file has the size it was written with."""
        sizes = self._about["sizes"]
        return all((self.folder / n).is_file() and (self.folder / n).stat().st_size == sizes[n] for n in sizes)


def tokenized(
    source: TextSource, kind: type[Tokenizer], vocab_size: int | None, cache: Path, given: Tokenizer | None = None
) -> TokenStore:
    """Tokenize a source, or open the tokens of an earlier run if neither the source nor the settings have changed.

    If several processes call this, one tokenizes and the others wait. The files are written to a temporary folder,
    which is renamed when they are complete. With a `given` tokenizer, of type `kind`, none is learnt.

    Raises:
        ValueError: If a text is not UTF-8, though `kind` needs it, or a split has no tokens.
    """
    folder = cache / f"{source.name}-{kind.kind}-{_digest(source, kind, vocab_size, given)}"
    cached_folder(folder, partial(_make, source, kind, vocab_size, given), _is_whole)
    return TokenStore(folder)


def _digest(source: TextSource, kind: type[Tokenizer], vocab_size: int | None, given: Tokenizer | None) -> str:
    vocabulary = [] if given is None else [given.to_json()]
    identity = json.dumps([FORMAT, source.name, source.identity, kind.kind, vocab_size, *vocabulary])
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def _is_whole(folder: Path) -> bool:
    try:
        return TokenStore(folder).is_whole()
    except (FileNotFoundError, ValueError):  # ValueError: invalid JSON, such as after a power failure
        return False


def _make(
    source: TextSource, kind: type[Tokenizer], vocab_size: int | None, given: Tokenizer | None, folder: Path
) -> None:
    sizes = source.n_bytes
    if given is None:
        with progress("Reading the vocabulary", sizes["train"] if sizes else None) as advance:
            tokenizer = kind.learn(_train_texts(source, kind, advance), vocab_size)
    else:
        tokenizer = given
    dtype = np.min_scalar_type(tokenizer.largest)  # <start> is not stored
    about: dict[str, Any] = {"dtype": dtype.name}
    with progress("Tokenizing", sum(sizes.values()) if sizes else None) as advance:
        for name in SPLITS:
            about[name] = _write(source, name, tokenizer, dtype, folder, advance)
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    about["sizes"] = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / "about.json").write_text(json.dumps(about))


def _train_texts(source: TextSource, kind: type[Tokenizer], advance: _Advance) -> Iterator[str]:
    for document in source.splits["train"]:
        for text, size in decoded(document, kind):
            yield text
            advance(size)


def _write(
    source: TextSource, name: str, tokenizer: Tokenizer, dtype: np.dtype, folder: Path, advance: _Advance
) -> dict[str, int]:
    n_bytes, borders = 0, array("q", [0])
    with (folder / f"{name}.bin").open("wb") as file:
        for document in source.splits[name]:
            n_tokens = borders[-1]
            for ids, size in encoded(document, tokenizer):
                file.write(ids.astype(dtype, copy=False).data)
                n_tokens, n_bytes = n_tokens + len(ids), n_bytes + size
                advance(size)
            if n_tokens > borders[-1]:
                borders.append(n_tokens)
        file.flush()
        os.fsync(file.fileno())
    if len(borders) == 1:
        raise ValueError(f"source={source.name!r}: its split {name!r} holds no text, so there is nothing to score")
    np.save(folder / f"{name}.npy", np.asarray(borders))
    return {"n_tokens": borders[-1], "n_bytes": n_bytes}


def decoded(document: Document, kind: type[Tokenizer]) -> Iterator[tuple[str, int]]:
    """Yield a document's text in pieces that a tokenizer can encode separately, each with its number of bytes.

    Raises:
        ValueError: If it is not UTF-8.
    """
    for offset, chunk in _chunks(document, kind):
        yield _decoded(document, offset, chunk), len(chunk)


def encoded(document: Document, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the tokens of a document in pieces, each with its number of bytes.

    Raises:
        ValueError: If it is not UTF-8, though the tokenizer needs it.
    """
    is_bytes = isinstance(tokenizer, ByteTokenizer)
    for offset, chunk in _chunks(document, type(tokenizer)):
        yield tokenizer.encode(chunk if is_bytes else _decoded(document, offset, chunk)), len(chunk)


def _chunks(document: Document, kind: type[Tokenizer]) -> Iterator[tuple[int, bytes]]:
    """Yield pieces of a document that can be encoded separately, each with its offset."""
    offset, rest = document.start, b""
    for block in document.blocks():
        rest += block
        if cut := kind.cut(rest):
            yield offset, rest[:cut]
            offset, rest = offset + cut, rest[cut:]
    if rest:
        yield offset, rest


def _decoded(document: Document, offset: int, chunk: bytes) -> str:
    try:
        return chunk.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{document.name}: byte {offset + error.start} is {chunk[error.start]:#04x}, which is "
            "not UTF-8; convert the file, or choose tokens='bytes', which accepts any"
        ) from error


@contextmanager
def progress(title: str, n_bytes: int | None) -> Iterator[_Advance]:
    """Show a progress bar for long texts, or texts of unknown length."""
    with progress_bar(disable=n_bytes is not None and n_bytes < _QUICK) as bar:
        task = bar.add_task(title, total=n_bytes)
        yield partial(bar.advance, task)
