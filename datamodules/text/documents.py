"""Documents in any order, read as one text from files that are too large for memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


class MappedTokens:
    """The tokens of several files, of known sizes, as one text. Processes share the files, mapped at the first read."""

    def __init__(self, paths: Sequence[Path], sizes: Sequence[int], dtype: np.dtype) -> None:
        self._paths, self._dtype = list(paths), dtype
        self._ends = np.cumsum(sizes)
        self.file_begins = self._ends - sizes
        self._opened: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, part: slice) -> np.ndarray:
        """Return `[start:stop]`, which must be within one file."""
        file = int(np.searchsorted(self._ends, part.start, side="right"))
        if file not in self._opened:
            mapped = np.memmap(self._paths[file], self._dtype, mode="r")
            self._opened[file] = np.asarray(mapped)  # whose slices are faster
        tokens = self._opened[file]
        offset = int(self._ends[file]) - len(tokens)
        return tokens[part.start - offset : part.stop - offset]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": {}}  # numpy would pickle the mapped tokens, not the file's name


class Documents:
    """Documents of a text, in any order, as one text. They take 16 bytes of memory each.

    Args:
        tokens: The text. A document is within one of its files.
        begins: (documents,), offset of each document in `tokens`.
        lengths: (documents,), number of tokens of each, at least 1.

    Examples:
        >>> documents = Documents(np.arange(9), np.array([6, 0]), np.array([3, 2]))
        >>> documents[1:5].tolist()
        [7, 8, 0, 1]
    """

    def __init__(
        self,
        tokens: "np.ndarray | MappedTokens",
        begins: np.ndarray,
        lengths: np.ndarray,
        identity: dict[str, Any] | None = None,
    ) -> None:
        self._tokens, self._begins = tokens, begins
        self.identity = identity or {}
        self.borders = np.zeros(len(lengths) + 1, np.int64)  # document i is `self[borders[i] : borders[i + 1]]`
        np.cumsum(lengths, out=self.borders[1:])
        # What is read in one piece: a document, or a run of neighbours in one file if most documents have a neighbour.
        self._runs = begins, self.borders
        alone = begins[1:] != begins[:-1] + lengths[:-1]
        if isinstance(tokens, MappedTokens):
            alone |= np.isin(begins[1:], tokens.file_begins)
        if 2 * alone.sum() < len(alone):
            first = np.flatnonzero(np.concatenate([[True], alone]))
            self._runs = begins[first], np.append(self.borders[first], self.borders[-1])

    def __len__(self) -> int:
        return int(self.borders[-1])

    def __getitem__(self, part: slice) -> np.ndarray:
        """Return `[start:stop]`, which may cross borders of documents."""
        begins, borders = self._runs
        first = int(np.searchsorted(borders, part.start, side="right")) - 1
        last = int(np.searchsorted(borders, part.stop))
        pieces = []
        for run in range(first, last):
            border, end = borders[run : run + 2].tolist()
            shift = int(begins[run]) - border
            pieces.append(self._tokens[max(part.start, border) + shift : min(part.stop, end) + shift])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def reordered(self, order: np.ndarray) -> "Documents":
        """Return the documents of these indices, in their order."""
        return Documents(self._tokens, self._begins[order], np.diff(self.borders)[order], self.identity)
