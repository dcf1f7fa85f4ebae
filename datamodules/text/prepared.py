"""Prepared text: a folder of token files that `lit-effattn data prepare` made, for texts larger than memory.

| file | content |
|---|---|
| plan.json | the settings, the input files, and the parts of them that each shard holds |
| tokenizer.json | the tokenizer, as `Tokenizer.to_json` gives it |
| shard-00000.bin | the tokens of its documents |
| shard-00000.npy | (2, documents + 1) int64: the documents' borders in tokens and in bytes of text |
| shard-00000.json | its counts and checksums; a shard without it is not finished |
| manifest.json | tokenizer, type of a token, and all shards' counts and checksums; written last |
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lit_effattn.datamodules.common.files import regular
from lit_effattn.datamodules.common.json_data import parse_json
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


class PreparedStore:
    """The tokens of a prepared folder by split.

    Of every `held_out` documents, in the order of the input, the first is for test and the second for validation.

    Args:
        folder: The folder.

    Raises:
        FileNotFoundError: If it is not a prepared folder.
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
        self._dtype, self._held_out, self._sizes = self._manifest()
        for number, size in enumerate(self._sizes):
            path = shard_path(folder, number, ".bin")
            if not path.is_file() or path.stat().st_size != size * self._dtype.itemsize:
                raise self._damaged(path)

    def _manifest(self) -> tuple[np.dtype[Any], int, list[int]]:
        """Return the type of a token, of how many documents some are held out, and each shard's number of tokens."""
        path = self.folder / MANIFEST
        try:
            about = parse_json(regular(path).read_text(encoding="utf-8"))
            version, dtype = about["format"], about["dtype"]
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(path) from error
        if version != FORMAT or dtype not in _DTYPES:
            raise ValueError(
                f"root={str(self.folder)!r} has the format {version} of {dtype}, but this version reads "
                f"format {FORMAT} of {', '.join(_DTYPES)}; prepare the text again, in another folder"
            )
        try:
            held_out, sizes = about["settings"]["held_out"], [shard["n_tokens"] for shard in about["shards"]]
        except (KeyError, TypeError) as error:
            raise self._damaged(path) from error
        if not all(isinstance(count, int) for count in (held_out, *sizes)) or held_out < 1:
            raise self._damaged(path)
        return np.dtype(dtype), held_out, sizes

    def _damaged(self, path: Path) -> ValueError:
        return ValueError(f"{path} is missing or damaged; delete {self.folder} and prepare the text again")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the tokens."""
        return Tokenizer.from_spec((self.folder / TOKENIZER).read_text(encoding="utf-8"))

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

    def split(self, name: str) -> tuple[Documents, np.ndarray]:
        """Open a split: its documents in the order of the input, and their borders.

        Raises:
            ValueError: If it has no documents.
        """
        begins, lengths, offset = [], [], 0
        for borders, selected in self._indices():
            begins.append(borders[0, :-1][selected[name]] + offset)
            lengths.append(np.diff(borders[0])[selected[name]])
            offset += int(borders[0, -1])
        if not sum(map(len, begins)):
            raise ValueError(
                f"root={str(self.folder)!r} has no documents in its split {name!r}: of {self._held_out} documents one "
                "is for validation and one for test; prepare more, or with a smaller --held_out, in another folder"
            )
        paths = [shard_path(self.folder, i, ".bin") for i in range(len(self._sizes))]
        tokens = MappedTokens(paths, self._sizes, self._dtype)
        documents = Documents(tokens, np.concatenate(begins), np.concatenate(lengths))
        return documents, documents.borders

    def _indices(self) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """Yield each shard's (2, documents + 1) borders, and by split a mask of its documents."""
        before = 0
        for number, size in enumerate(self._sizes):
            path = shard_path(self.folder, number, ".npy")
            try:
                borders = np.load(path, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError, EOFError) as error:
                raise self._damaged(path) from error
            if borders.dtype != np.int64 or borders.ndim != 2 or len(borders) != 2 or borders[0, -1] != size:
                raise self._damaged(path)
            place = (before + np.arange(borders.shape[1] - 1)) % self._held_out
            yield borders, {"train": place > 1, "val": place == 1, "test": place == 0}
            before += len(place)
