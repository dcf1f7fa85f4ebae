"""Token stores: folders of tokenized texts, in shards.

| file | content |
|---|---|
| tokenizer.json | the tokenizer, as `Tokenizer.to_json` gives it |
| shard-00000.bin, .npy, .json | the tokens of its texts, without `<start>`: an array of `common.store` |
| shard-00000.titles | a line with the title of each text, where texts have titles |
| manifest.json | type of a token, splits, and all shards' counts and checksums; written last |
| plan.json | `lit-effattn data prepare`: the settings, the input files, and the parts of them that each shard holds |

Each shard belongs to one split, or, in a folder that was prepared from files without splits, texts are divided into
splits by their position.
"""

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lit_effattn.datamodules.common.files import regular
from lit_effattn.datamodules.common.json_data import parse_json
from lit_effattn.datamodules.common.sampling import digest
from lit_effattn.datamodules.common.splits import SPLITS
from lit_effattn.datamodules.common.store import ArrayWriter, StoredArray, damaged, read_header, write_text
from lit_effattn.datamodules.text.documents import Documents, MappedTokens
from lit_effattn.datamodules.text.tokenizers import Tokenizer

FORMAT = 2
"""Version of the file format. Increment it if the same texts give different files."""

MANIFEST, PLAN, TOKENIZER = "manifest.json", "plan.json", "tokenizer.json"
_DTYPES = ("uint8", "uint16", "uint32")


def shard_name(number: int) -> str:
    """Return the name of a shard's array."""
    return f"shard-{number:05d}"


class ShardWriter(ArrayWriter):
    """Writes a shard. Its .json has the number of units that the vocabulary lacks, if any."""

    def __init__(self, folder: Path, number: int, tokenizer: Tokenizer) -> None:
        super().__init__(folder, shard_name(number), token_type(tokenizer), compared=True)
        self._tokenizer, self._replaced_before = tokenizer, tokenizer.n_replaced

    def close(self, **more: Any) -> int:
        """Complete the shard, and return its number of texts."""
        if replaced := self._tokenizer.n_replaced - self._replaced_before:
            more["n_replaced"] = replaced
        return super().close(**more)


def replaced(tokenizer: Tokenizer, n: int) -> str:
    """Return a message of `n` units that the vocabulary of `tokenizer` lacks."""
    units, token = tokenizer.replaces
    return f"{n:,} {units} are not of the vocabulary, and read as {token}"


def token_type(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Return the smallest type of a text's tokens."""
    return np.min_scalar_type(tokenizer.largest)


def write_manifest(folder: Path, tokenizer: Tokenizer, settings: dict[str, Any], n_shards: int) -> dict[str, Any]:
    """Complete a store, and return the content of its manifest.

    `settings` are plain data. Their `splits` are the splits of the shards. If they are None, one of every `held_out`
    texts is for test and one for validation.
    """
    shards = [read_header(folder, shard_name(number)) for number in range(n_shards)]
    totals = {"n_documents": "n_items", "n_tokens": "n_rows", "n_bytes": "n_bytes"}
    manifest = {
        **{"format": FORMAT, "settings": settings, "tokenizer": repr(tokenizer), "dtype": token_type(tokenizer).name},
        **{total: sum(shard[count] for shard in shards) for total, count in totals.items()},
        "shards": shards,
    }
    write_text(folder / TOKENIZER, tokenizer.to_json())
    write_text(folder / MANIFEST, json.dumps(manifest))
    return manifest


class TokenStore:
    """The tokens of a folder by split.

    In a folder prepared from files without splits, of every `held_out` texts, in the order of the input, the first is
    for test and the second for validation.

    `n_shared` is the number of the longer texts of "val" and "test" that are in "train", too, where they were compared.

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
            path = folder / f"{shard_name(number)}.bin"
            if not path.is_file() or path.stat().st_size != size * self._dtype.itemsize:
                raise damaged(path)

    def _read_manifest(self) -> None:
        path = self.folder / MANIFEST
        try:
            about = parse_json(regular(path).read_text(encoding="utf-8"))
            version, dtype = about["format"], about["dtype"]
            if known := version == FORMAT and dtype in _DTYPES:
                settings, self._sizes = about["settings"], [shard["n_rows"] for shard in about["shards"]]
                self._shards = [{**shard, "dtype": dtype, "row": []} for shard in about["shards"]]
                self._about = [settings.get("held_out"), settings.get("splits"), about["shards"]]
                self._splits, self.n_shared = settings.get("splits"), dict(settings.get("n_shared", {}))
                self._held_out = settings["held_out"] if self._splits is None else 1
                if self._splits is not None and (
                    len(self._splits) != len(self._sizes) or sorted({*self._splits}) != sorted(SPLITS)
                ):
                    raise ValueError(self._splits)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(path) from error
        if not known:
            raise ValueError(
                f"root={str(self.folder)!r} has the format {version} of {dtype}, but this version reads "
                f"format {FORMAT} of {', '.join(_DTYPES)}; prepare the text again, in another folder"
            )
        if not all(isinstance(count, int) for count in (self._held_out, *self._sizes)) or self._held_out < 1:
            raise damaged(path)
        self._dtype = np.dtype(dtype)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the tokens."""
        return Tokenizer.from_spec(regular(self.folder / TOKENIZER).read_text(encoding="utf-8"))

    @property
    def digest(self) -> str:
        """A digest of the tokens and of their division into texts and splits."""
        return digest(self._about)

    @cached_property
    def n_tokens(self) -> dict[str, int]:
        """The number of tokens in each split."""
        counts = dict.fromkeys(SPLITS, 0)
        for borders, selected in self._indices():
            for split, of_split in selected.items():
                counts[split] += int(np.diff(borders[0])[of_split].sum())
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
        paths = [self.folder / f"{shard_name(number)}.bin" for number in range(len(self._sizes))]
        tokens = MappedTokens(paths, self._sizes, self._dtype)
        n_documents, n_tokens = sum(map(len, lengths)), int(sum(map(np.sum, lengths)))
        identity = {"documents": n_documents, "tokens": n_tokens, "digest": self.digest}
        return Documents(tokens, np.concatenate(begins), np.concatenate(lengths), identity)

    @property
    def replaced(self) -> str:
        """A message of what the vocabulary lacks in all splits: `4 characters are not …`; "" if it lacks nothing."""
        n = sum(shard.get("n_replaced", 0) for shard in self._about[2])
        return replaced(self.tokenizer, n) if n else ""

    def titles(self, name: str) -> list[str]:
        """Return the titles of the documents of a split, in their order; an empty list if none has one."""
        titles: list[str] = []
        for number, (borders, selected) in enumerate(self._indices()):
            path = self.folder / f"{shard_name(number)}.titles"
            of_shard = np.full(borders.shape[1] - 1, "", object)
            if path.is_file():
                of_shard[:] = regular(path).read_text(encoding="utf-8").split("\n")[:-1]
            titles += of_shard[selected[name]].tolist()
        return titles if any(titles) else []

    def shard(self, split: str) -> StoredArray:
        """Open the shard of a split, in a store with one shard for each."""
        return self._opened(self._splits.index(split))

    def _opened(self, number: int) -> StoredArray:
        return StoredArray(self.folder, shard_name(number), self._shards[number])

    def _indices(self) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
        """Yield each shard's (2, documents + 1) borders, and by split an index of its documents."""
        before = 0
        for number in range(len(self._sizes)):
            borders = self._opened(number).borders
            if self._splits is not None:
                yield borders, {split: slice(None if split == self._splits[number] else 0) for split in SPLITS}
                continue
            position = (before + np.arange(borders.shape[1] - 1)) % self._held_out
            yield borders, {"train": position > 1, "val": position == 1, "test": position == 0}
            before += len(position)
