"""Token stores: folders of tokenized texts, in shards. Tokens are memory-mapped, so processes share them.

| file | content |
|---|---|
| tokenizer.json | the tokenizer, as `Tokenizer.to_json` gives it |
| shard-00000.bin | the tokens of its texts, without `<start>`, of the smallest unsigned type |
| shard-00000.npy | (2, texts + 1) int64: the texts' borders in tokens and in bytes of UTF-8 |
| shard-00000.utf8 | the texts, where they are read again: those of pairs |
| shard-00000.titles | a line with the title of each text, where texts have titles |
| shard-00000.json | its counts and checksums; a shard without it is not finished |
| manifest.json | type of a token, splits, and all shards' counts and checksums; written last |
| plan.json | `lit-effattn data prepare`: the settings, the input files, and the parts of them that each shard holds |

Each shard belongs to one split, or, in a folder that was prepared from files without splits, texts are divided into
splits by their position.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lit_effattn.datamodules.common.files import regular
from lit_effattn.datamodules.common.json_data import parse_json
from lit_effattn.datamodules.common.sampling import digest
from lit_effattn.datamodules.common.splits import SPLITS
from lit_effattn.datamodules.text.documents import Documents, MappedTokens
from lit_effattn.datamodules.text.tokenizers import Tokenizer

FORMAT = 1
"""Version of the file format. Increment it if the same texts give different files."""

MANIFEST, PLAN, TOKENIZER = "manifest.json", "plan.json", "tokenizer.json"
_DTYPES = ("uint8", "uint16", "uint32")


def shard_path(folder: Path, number: int, suffix: str) -> Path:
    """Return the path of a shard's file."""
    return folder / f"shard-{number:05d}{suffix}"


class Shard:
    """The texts of one shard.

    Attributes:
        tokens: (n,) unsigned integers, the tokens of all texts.
        borders: (2, texts + 1): text i has the tokens from `borders[0, i]` to before `borders[0, i + 1]`, and the bytes
            from `borders[1, i]` to before `borders[1, i + 1]`.
    """

    def __init__(self, folder: Path, number: int, dtype: np.dtype[Any], borders: np.ndarray) -> None:
        self.tokens = np.memmap(shard_path(folder, number, ".bin"), dtype, mode="r")
        self.borders = borders
        self._path = shard_path(folder, number, ".utf8")

    def lengths(self) -> np.ndarray:
        """(texts,), number of tokens of each text."""
        return np.diff(self.borders[0])

    def ids(self, i: int) -> np.ndarray:
        """The tokens of text i."""
        return self.tokens[self.borders[0, i] : self.borders[0, i + 1]]

    def text(self, i: int) -> str:
        """Text i as it was given. The shard must have been written with `keep_text`."""
        return self._utf8[self.borders[1, i] : self.borders[1, i + 1]].tobytes().decode()

    @cached_property
    def _utf8(self) -> np.ndarray:
        return np.memmap(self._path, np.uint8, mode="r")


class ShardWriter:
    """Writes a shard. Each of its files appears when it is complete, the .json last.

    Args:
        folder: Folder of the store.
        number: Number of the shard.
        tokenizer: Tokenizer of the texts.
        keep_text: Write the texts, too.
    """

    def __init__(self, folder: Path, number: int, tokenizer: Tokenizer, *, keep_text: bool = False) -> None:
        self._path = shard_path(folder, number, ".bin")
        self._dtype = token_type(tokenizer)
        self._unfinished = self._path.with_suffix(".unfinished")
        self._file = self._unfinished.open("wb")
        self._utf8 = self._path.with_suffix(".utf8").open("wb") if keep_text else None
        self._digest = hashlib.sha256()
        self._borders = array("q", [0]), array("q", [0])  # in tokens, in bytes
        self._titles: list[str] = []
        self._tokenizer, self._replaced_before = tokenizer, tokenizer.n_replaced

    def add(self, pieces: Iterable[tuple[np.ndarray, bytes]], title: str = "") -> None:
        """Add a text, given as the tokens and the bytes of its pieces. A text without tokens is left out."""
        n_tokens, n_bytes = (borders[-1] for borders in self._borders)
        for ids, utf8 in pieces:
            data = ids.astype(self._dtype, copy=False).tobytes()
            self._file.write(data)
            self._digest.update(data)
            if self._utf8 is not None:
                self._utf8.write(utf8)
            n_tokens, n_bytes = n_tokens + len(ids), n_bytes + len(utf8)
        if n_tokens > self._borders[0][-1]:
            self._borders[0].append(n_tokens)
            self._borders[1].append(n_bytes)
            self._titles.append(title)
        elif self._utf8 is not None:
            raise ValueError("a text that is kept must have tokens")  # else the borders of all later ones are wrong

    def close(self, **more: Any) -> int:
        """Complete the shard, and return its number of texts. Its .json has the entries `more`, too."""
        if self._utf8 is not None:
            _close(self._utf8)
        _close(self._file)
        self._unfinished.replace(self._path)
        with self._unfinished.open("wb") as file:
            np.save(file, np.array(self._borders, np.int64))
            _close(file)
        self._unfinished.replace(self._path.with_suffix(".npy"))
        n_tokens, n_bytes = (borders[-1] for borders in self._borders)
        counts = {"n_documents": len(self._borders[0]) - 1, "n_tokens": n_tokens, "n_bytes": n_bytes}
        if any(self._titles):
            write_text(self._path.with_suffix(".titles"), "".join(f"{title}\n" for title in self._titles))
        if replaced := self._tokenizer.n_replaced - self._replaced_before:
            more["n_replaced"] = replaced
        about = {**counts, **more, "tokens_sha256": self._digest.hexdigest()}
        write_text(self._path.with_suffix(".json"), json.dumps(about))
        return counts["n_documents"]


def token_type(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Return the smallest type of a text's tokens."""
    return np.min_scalar_type(tokenizer.largest)


def write_manifest(folder: Path, tokenizer: Tokenizer, settings: dict[str, Any], n_shards: int) -> dict[str, Any]:
    """Complete a store, and return the content of its manifest.

    Args:
        folder: Folder of the store, with its shards.
        tokenizer: Tokenizer of the texts.
        settings: Plain data, with `splits`, the split of each shard; or with `splits` None and `held_out`: of so many
            texts one is for test and one for validation.
        n_shards: Number of shards.
    """
    shards = [parse_json(shard_path(folder, number, ".json").read_text()) for number in range(n_shards)]
    manifest = {
        **{"format": FORMAT, "settings": settings, "tokenizer": repr(tokenizer), "dtype": token_type(tokenizer).name},
        **{count: sum(shard[count] for shard in shards) for count in ("n_documents", "n_tokens", "n_bytes")},
        "shards": shards,
    }
    write_text(folder / TOKENIZER, tokenizer.to_json())
    write_text(folder / MANIFEST, json.dumps(manifest))
    return manifest


def write_text(path: Path, text: str) -> None:
    """Write a file that is either complete or absent."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        file.write(text.encode())
        _close(file)
    unfinished.replace(path)


def _close(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


class TokenStore:
    """The tokens of a folder by split.

    In a folder prepared from files without splits, of every `held_out` texts, in the order of the input, the first is
    for test and the second for validation.

    Args:
        folder: The folder.

    Raises:
        FileNotFoundError: If it is not a token store.
        ValueError: If it is not finished, damaged, or of another version.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / MANIFEST).is_file():
            if (folder / PLAN).is_file():
                raise ValueError(f"root={str(folder)!r} is not finished; run its `lit-effattn data prepare` again")
            raise FileNotFoundError(
                f"root={str(folder)!r} has no {MANIFEST}; make it with: lit-effattn data prepare INPUT {folder}"
            )
        self._read_manifest()
        for number, size in enumerate(self._sizes):
            path = shard_path(folder, number, ".bin")
            if not path.is_file() or path.stat().st_size != size * self._dtype.itemsize:
                raise self._damaged(path)

    def _read_manifest(self) -> None:
        path = self.folder / MANIFEST
        try:
            about = parse_json(regular(path).read_text(encoding="utf-8"))
            version, dtype = about["format"], about["dtype"]
            if known := version == FORMAT and dtype in _DTYPES:
                settings, self._sizes = about["settings"], [shard["n_tokens"] for shard in about["shards"]]
                self._about = [settings.get("held_out"), settings.get("splits"), about["shards"]]
                self._splits = settings.get("splits")
                self._held_out = settings["held_out"] if self._splits is None else 1
                if self._splits is not None and (
                    len(self._splits) != len(self._sizes) or sorted({*self._splits}) != sorted(SPLITS)
                ):
                    raise ValueError(self._splits)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(path) from error
        if not known:
            raise ValueError(
                f"root={str(self.folder)!r} has the format {version} of {dtype}, but this version reads "
                f"format {FORMAT} of {', '.join(_DTYPES)}; prepare the text again, in another folder"
            )
        if not all(isinstance(count, int) for count in (self._held_out, *self._sizes)) or self._held_out < 1:
            raise self._damaged(path)
        self._dtype = np.dtype(dtype)

    def _damaged(self, path: Path) -> ValueError:
        return ValueError(f"{path} is missing or damaged; delete {self.folder} and prepare the text again")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the tokens."""
        return Tokenizer.from_spec(regular(self.folder / TOKENIZER).read_text(encoding="utf-8"))

    @property
    def digest(self) -> str:
        """A digest of the tokens and of their division into texts and splits."""
        return digest(self._about)

    def n_tokens(self, split: str) -> int:
        """Return the number of tokens in a split."""
        return self._counts[split][0]

    def n_bytes(self, split: str) -> int:
        """Return the number of bytes of text in a split."""
        return self._counts[split][1]

    @cached_property
    def _counts(self) -> dict[str, list[int]]:
        counts = {split: [0, 0] for split in SPLITS}
        for borders, selected in self._indices():
            lengths = np.diff(borders)  # (2, documents + 1) -> (2, documents)
            for split, of_split in selected.items():
                counts[split] = [a + int(b) for a, b in zip(counts[split], lengths[:, of_split].sum(1), strict=True)]
        return counts

    def split(self, name: str) -> Documents:
        """Open a split: its documents in the order of the input.

        Raises:
            ValueError: If it has no documents.
        """
        begins, lengths, offset = [], [], 0
        for borders, selected in self._indices():
            begins.append(borders[0, :-1][selected[name]] + offset)
            lengths.append(np.diff(borders[0])[selected[name]])
            offset += int(borders[0, -1])
        if not sum(map(len, begins)):
            why = "its files have no text"
            if self._splits is None:
                why = (
                    f"of {self._held_out} documents one is for validation and one for test; prepare more, or with a "
                    "smaller --held_out, in another folder"
                )
            raise ValueError(f"root={str(self.folder)!r} has no documents in its split {name!r}: {why}")
        paths = [shard_path(self.folder, number, ".bin") for number in range(len(self._sizes))]
        tokens = MappedTokens(paths, self._sizes, self._dtype)
        n_documents, n_tokens = sum(map(len, lengths)), int(sum(map(np.sum, lengths)))
        identity = {"documents": n_documents, "tokens": n_tokens, "digest": self.digest}
        return Documents(tokens, np.concatenate(begins), np.concatenate(lengths), identity)

    @property
    def n_replaced(self) -> int:
        """Number of letters in all splits that are not of the vocabulary, where the tokenizer counts them."""
        return sum(shard.get("n_replaced", 0) for shard in self._about[2])

    def titles(self, name: str) -> list[str]:
        """Return the titles of the documents of a split, in their order; an empty list if none has one."""
        titles: list[str] = []
        for number, (borders, selected) in enumerate(self._indices()):
            path = shard_path(self.folder, number, ".titles")
            of_shard = np.full(borders.shape[1] - 1, "", object)
            if path.is_file():
                of_shard[:] = regular(path).read_text(encoding="utf-8").split("\n")[:-1]
            titles += of_shard[selected[name]].tolist()
        return titles if any(titles) else []

    def shard(self, split: str) -> Shard:
        """Open the shard of a split, in a store with one shard for each."""
        number = self._splits.index(split)
        return Shard(self.folder, number, self._dtype, self._borders(number))

    def _borders(self, number: int) -> np.ndarray:
        """Return the (2, texts + 1) borders of a shard, which rise from 0 to the shard's number of tokens."""
        path = shard_path(self.folder, number, ".npy")
        try:
            borders = np.load(regular(path), mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise self._damaged(path) from error
        if borders.dtype != np.int64 or borders.ndim != 2 or len(borders) != 2 or not borders.shape[1]:
            raise self._damaged(path)
        if borders[:, 0].any() or borders[0, -1] != self._sizes[number] or (np.diff(borders) < 0).any():
            raise self._damaged(path)
        return borders

    def _indices(self) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
        """Yield each shard's (2, documents + 1) borders, and by split an index of its documents."""
        before = 0
        for number in range(len(self._sizes)):
            borders = self._borders(number)
            if self._splits is not None:
                yield borders, {split: slice(None if split == self._splits[number] else 0) for split in SPLITS}
                continue
            position = (before + np.arange(borders.shape[1] - 1)) % self._held_out
            yield borders, {"train": position > 1, "val": position == 1, "test": position == 0}
            before += len(position)
