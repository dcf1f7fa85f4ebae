"""Tokenization of sources of text into cached token stores, once per text."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from lit_effattn.datamodules.common.bars import progress_bar
from lit_effattn.datamodules.common.splits import SPLITS
from lit_effattn.datamodules.common.store import cached, write_about
from lit_effattn.datamodules.text.sources import Document, TextSource
from lit_effattn.datamodules.text.token_store import ShardWriter, TokenStore, write_manifest
from lit_effattn.datamodules.text.tokenizers import ByteTokenizer, Tokenizer

CACHE_FORMAT = 5
"""Version of the cached files. Increment it if the same texts give different files."""

_LONG = 100  # tokens of a document: shorter ones recur

_QUICK = 20_000_000  # less text, in bytes, shows no progress bar


def tokenized(
    source: TextSource, kind: type[Tokenizer], vocab_size: int | None, cache: Path, given: Tokenizer | None = None
) -> TokenStore:
    """Tokenize a source, or open the tokens of an earlier run if neither the source nor the settings have changed.

    If several processes call this, one tokenizes and the others wait. The files are written to a temporary folder,
    which is renamed when they are complete. Without a `given` tokenizer, which is of type `kind`, one is learnt from
    the training texts.

    Raises:
        ValueError: If a text is not UTF-8, though `kind` needs it, or a split has no tokens.
    """
    vocabulary = None if given is None else given.to_json()
    identity = [CACHE_FORMAT, source.name, source.identity, kind.kind, vocab_size, vocabulary]
    make = partial(_make, source, kind, vocab_size, given)
    return TokenStore(cached(cache, f"{source.name}-{kind.kind}", identity, make))


def _make(
    source: TextSource, kind: type[Tokenizer], vocab_size: int | None, given: Tokenizer | None, folder: Path
) -> None:
    sizes, tokenizer = source.n_bytes, given
    if tokenizer is None:
        with progress("Reading the vocabulary", sizes["train"] if sizes else None) as advance:
            pieces = (piece for document in source.splits["train"] for piece in decoded(document, kind, advance))
            tokenizer = kind.learn(pieces, vocab_size)
    shards = []
    with progress("Tokenizing", sum(sizes.values()) if sizes else None) as advance:
        for number, split in enumerate(SPLITS):
            shards.append(shard := ShardWriter(folder, number, tokenizer))
            for document in source.splits[split]:
                shard.add(encoded(document, tokenizer, advance), document.title)
            if not shard.close():
                raise ValueError(f"source={source.name!r}: its split {split!r} has no text; add some")
    n_shared = {split: shard.n_shared(shards[0], _LONG) for split, shard in zip(SPLITS[1:], shards[1:], strict=True)}
    write_manifest(folder, tokenizer, {"splits": SPLITS, "n_shared": n_shared}, len(SPLITS))
    write_about(folder, {})


def decoded(document: Document, kind: type[Tokenizer], advance: Callable[[int], object]) -> Iterator[str]:
    """Yield a document's text in pieces that a tokenizer can encode separately, each before `advance(its bytes)`.

    Raises:
        ValueError: If it is not UTF-8.
    """
    for offset, chunk in _chunks(document, kind):
        yield _decoded(document, offset, chunk)
        advance(len(chunk))


def encoded(
    document: Document, tokenizer: Tokenizer, advance: Callable[[int], object] = lambda n: None
) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the tokens of a document in pieces, each with its number of bytes, before `advance(the number)`.

    Raises:
        ValueError: If it is not UTF-8, though the tokenizer needs it.
    """
    is_bytes = isinstance(tokenizer, ByteTokenizer)
    for offset, chunk in _chunks(document, type(tokenizer)):
        yield tokenizer.encode(chunk if is_bytes else _decoded(document, offset, chunk)), len(chunk)
        advance(len(chunk))


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
def progress(title: str, n_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar for long texts, or texts of unknown length."""
    with progress_bar(disable=n_bytes is not None and n_bytes < _QUICK) as bar:
        yield partial(bar.advance, bar.add_task(title, total=n_bytes))
