"""Tokens as parallel streams, cut into segments, for models with a memory."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import Dataset

from lit_effattn.datamodules.common.packing import first_fit
from lit_effattn.datamodules.common.sampling import BatchSampler, ResumableLoader
from lit_effattn.datamodules.common.tokens import IGNORE, TokenBatch
from lit_effattn.datamodules.text.documents import Documents


class TokenStreams(Dataset[TokenBatch]):
    """A data set whose item t is the t-th segment of each of this process's streams.

    Each document is cut into segments of its own (unless `joined`). The sequence of all segments is divided into
    `num_replicas · batch_size` contiguous streams. Process r has `batch_size` of them, from stream r · `batch_size` on.
    The streams thus depend only on that product. A stream has the same row in all batches.

    A document's first token is predicted from `start`, every other token from the previous one, which may be in another
    segment or stream. Each token is the target of exactly one position.

    Args:
        tokens: (n,) unsigned integers, or documents.
        borders: (documents + 1,): document i is `tokens[borders[i] : borders[i + 1]]`.
        start: The token read before a document.
        segment_len: N, maximum length of a segment in tokens.
        batch_size: B, streams of this process.
        num_replicas: Number of processes.
        rank: This process, 0 to `num_replicas - 1`.
        joined: Segments cross the borders of documents, and only the last one may be short.
        packed: With `joined`: `starts` of a batch marks the first token of each document.
        drop_last: Make all streams equally long and drop the rest. With a single document or `joined`, also drop the
            last segment if it is short. Otherwise the lengths of streams differ by at most one segment; a stream that
            has ended gives empty rows (length 0).

    Raises:
        ValueError: With `drop_last`, if there are fewer tokens than a segment has, or fewer segments than streams.

    Examples:
        >>> streams = TokenStreams(
        ...     np.arange(5), np.array([0, 3, 5]), start=9, segment_len=2, batch_size=1, num_replicas=1, rank=0,
        ...     joined=False, drop_last=False,
        ... )
        >>> [(batch.inputs.tolist(), batch.targets.tolist()) for batch in (streams[0], streams[1], streams[2])]
        [([[9, 0]], [[0, 1]]), ([[1, 0]], [[2, -100]]), ([[9, 3]], [[3, 4]])]
    """

    shuffle_seed: int | None = None

    def __init__(
        self,
        tokens: np.ndarray | Documents,
        borders: np.ndarray,
        *,
        start: int,
        segment_len: int,
        batch_size: int,
        num_replicas: int,
        rank: int,
        joined: bool,
        drop_last: bool,
        packed: bool = False,
    ) -> None:
        self.start = start
        self.segment_len = segment_len
        self.batch_size = batch_size
        self.num_replicas = num_replicas
        self.rank = rank
        self.joined = joined
        self.packed = packed
        self.drop_last = drop_last
        self._divide(tokens, borders)

    def _divide(self, tokens: np.ndarray | Documents, borders: np.ndarray) -> None:
        self.tokens = tokens
        self.documents = borders
        # The units that are cut into segments: the documents, or all of them as one.
        self.borders = borders[[0, -1]] if self.joined else borders
        n_each = -(-np.diff(self.borders) // self.segment_len)
        if self.drop_last and len(n_each) == 1:
            n_each = np.diff(self.borders) // self.segment_len
        self.first = np.concatenate([[0], np.cumsum(n_each)])  # index of each document's first segment
        n_segments, n_streams = int(self.first[-1]), self.num_replicas * self.batch_size
        if self.drop_last:
            self._check(n_segments, n_streams)
            n_segments -= n_segments % n_streams
        ends = np.arange(n_streams + 1) * n_segments // n_streams
        self.begins, self.ends = ends[:-1], ends[1:]  # of each stream, as indices of segments

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of the documents; empty for plain arrays."""
        return getattr(self.tokens, "identity", {})

    def _check(self, n_segments: int, n_streams: int) -> None:
        if len(self.tokens) < self.segment_len:
            raise ValueError(
                f"segment_len={self.segment_len} is more than the {len(self.tokens)} training tokens; "
                "use a smaller one, or more text"
            )
        if n_segments < n_streams:
            processes = f" in each of {self.num_replicas} processes" if self.num_replicas > 1 else ""
            fits = n_segments // self.num_replicas
            remedy = f"use at most batch_size={fits}" if fits else f"use at most {n_segments} processes"
            raise ValueError(
                f"batch_size={self.batch_size}{processes} makes {n_streams} streams, but the text gives only "
                f"{n_segments} segments of segment_len={self.segment_len}; {remedy}, or shorter segments"
            )

    def __len__(self) -> int:
        return int((self.ends - self.begins).max())

    @property
    def rows(self) -> slice:
        """The streams of this process among those of all processes."""
        return slice(self.rank * self.batch_size, (self.rank + 1) * self.batch_size)

    def __getitem__(self, step: int) -> TokenBatch:
        begins, lengths, is_fresh = self._segments(step)
        rows = self.rows
        inputs, targets, starts = self._read(begins[rows], lengths[rows])
        offsets = begins[rows, None] + np.arange(self.segment_len)
        return TokenBatch(
            inputs=torch.from_numpy(inputs),  # (B, N)
            targets=torch.from_numpy(targets),  # (B, N)
            lengths=None if (lengths == self.segment_len).all() else torch.from_numpy(lengths[rows]),
            fresh=torch.from_numpy(is_fresh[rows]),
            starts=torch.from_numpy(starts) if self.packed else None,  # (B, N)
            offsets=None if self.drop_last else torch.from_numpy(offsets),  # (B, N)
        )

    def _segments(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the offset of each stream's segment, its length, and whether it resets the memory.

        All are of the streams of all processes, so that `lengths` of a batch is None on all processes or on none.
        """
        segments = self.begins + step
        present = segments < self.ends
        document = np.searchsorted(self.first, np.where(present, segments, 0), side="right") - 1
        begins = self.borders[document] + (segments - self.first[document]) * self.segment_len
        lengths = np.minimum(self.segment_len, self.borders[document + 1] - begins) * present
        return begins, lengths, present & ((step == 0) | (segments == self.first[document]))

    def _read(self, begins: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return inputs, targets, and where documents begin, (B, N) each."""
        inputs = np.zeros((len(begins), self.segment_len), np.int64)
        targets = np.full_like(inputs, IGNORE)
        starts = np.zeros(inputs.shape, bool)
        for row, (begin, length) in enumerate(zip(begins.tolist(), lengths.tolist(), strict=True)):
            if length == 0:
                continue
            first, last = np.searchsorted(self.documents, (begin, begin + length))
            before = begin - int(self.documents[first] != begin)  # the previous token of the same document, if any
            text = self.tokens[before : begin + length]
            targets[row, :length] = text[-length:]
            inputs[row, length + 1 - len(text) : length] = text[:-1]
            starts[row, self.documents[first:last] - begin] = True
        inputs[starts] = self.start
        return inputs, targets, starts


class WholeDocuments(TokenStreams):
    """Rows that hold whole documents, as many as fit; item t holds this process's rows of batch t.

    A row has no memory of an earlier one, so a document's tokens are all predicted with their full context, if the
    document is not longer than a segment. A longer one is cut into pieces of `segment_len` tokens, which do not see
    each other. The pieces of each `WINDOW` are put into rows by first fit: in their order, each into the first row that
    has room. `starts` of a batch marks the first position of each piece.

    With `drop_last`, the rest of the rows, fewer than a batch of all processes, is dropped. Arguments are those of
    `TokenStreams`, with `joined` and `packed`.
    """

    def _divide(self, tokens: np.ndarray | Documents, borders: np.ndarray) -> None:
        self.tokens, self.documents = tokens, borders
        sizes = np.diff(borders)
        n_each = -(-sizes // self.segment_len)
        document = np.repeat(np.arange(len(sizes)), n_each)
        within = np.arange(len(document)) - np.repeat(np.cumsum(n_each) - n_each, n_each)
        begins = borders[document] + within * self.segment_len
        lengths = np.minimum(self.segment_len, borders[document + 1] - begins)
        row, offset = first_fit(lengths, self.segment_len)
        order = np.lexsort((offset, row))
        self._begins, self._lengths, self._offsets = begins[order], lengths[order], offset[order]
        self._pieces = np.searchsorted(row[order], np.arange(row.max() + 2))  # the first piece of each row
        self._used = np.add.reduceat(self._lengths, self._pieces[:-1])  # positions of each row
        if self.drop_last:
            self._check(len(self._used), self.num_replicas * self.batch_size)

    def __len__(self) -> int:
        n_rows, n_streams = len(self._used), self.num_replicas * self.batch_size
        return n_rows // n_streams if self.drop_last else -(-n_rows // n_streams)

    def __getitem__(self, step: int) -> TokenBatch:
        n_rows, n_streams = len(self._used), self.num_replicas * self.batch_size
        rows = step * n_streams + np.arange(n_streams)
        if self.drop_last:
            rows %= n_rows  # an epoch in another order may have fewer rows
        present = rows < n_rows
        rows = np.where(present, rows, 0)
        lengths = self._used[rows] * present
        inputs = np.zeros((self.batch_size, self.segment_len), np.int64)
        targets, starts = np.full_like(inputs, IGNORE), np.zeros(inputs.shape, bool)
        offsets = np.zeros_like(inputs)
        for i, row in enumerate(rows[self.rows].tolist()):
            if not present[self.rows][i]:
                continue
            pieces = slice(*self._pieces[row : row + 2].tolist())
            read = self._read(self._begins[pieces], self._lengths[pieces])
            places = zip(self._begins[pieces], self._lengths[pieces], self._offsets[pieces], *read, strict=True)
            for begin, n, offset, *of_piece in places:
                for array, values in zip((inputs, targets), of_piece, strict=False):
                    array[i, offset : offset + n] = values[:n]
                starts[i, offset] = True
                offsets[i, offset : offset + n] = begin + np.arange(n)
        return TokenBatch(
            inputs=torch.from_numpy(inputs),  # (B, N)
            targets=torch.from_numpy(targets),  # (B, N)
            lengths=None if (lengths == self.segment_len).all() else torch.from_numpy(lengths[self.rows]),
            fresh=torch.from_numpy(present[self.rows]),
            starts=torch.from_numpy(starts),  # (B, N)
            offsets=None if self.drop_last else torch.from_numpy(offsets),  # (B, N)
        )


class ShuffledStreams(TokenStreams):
    """Streams of documents in another order every epoch, a pure function of (seed, epoch).

    An item is `(epoch, t)`, which worker processes and resumed runs read without further state. For each document,
    `documents` takes 16 bytes of memory and the order of the current epoch 24. Options are those of `TokenStreams`.
    """

    def __init__(self, documents: Documents, *, shuffle_seed: int, **options: Any) -> None:
        self.shuffle_seed = self._seed = shuffle_seed
        self._unshuffled, self._epoch = documents, 0
        super().__init__(*self._shuffled(0), **options)

    def _shuffled(self, epoch: int) -> tuple[Documents, np.ndarray]:
        rng = np.random.default_rng((self._seed, epoch))
        documents = self._unshuffled.reordered(rng.permutation(len(self._unshuffled.borders) - 1))
        return documents, documents.borders

    def __getitem__(self, item: tuple[int, int]) -> TokenBatch:  # type: ignore[override]
        epoch, step = item
        if epoch != self._epoch:
            self._epoch = epoch
            self._divide(*self._shuffled(epoch))
        return super().__getitem__(step)


class ShuffledWholeDocuments(ShuffledStreams, WholeDocuments):  # type: ignore[misc]
    """Rows of whole documents, in another order every epoch. All epochs have as many batches as the first."""

    def _check(self, n_segments: int, n_streams: int) -> None:
        if self._epoch == 0:  # a later order may have fewer rows
            super()._check(n_segments, n_streams)


class InOrder(BatchSampler):
    """A sampler of the indices 0, 1, … of a process's batches."""

    def __init__(self, streams: TokenStreams) -> None:
        super().__init__(len(streams), num_replicas=streams.num_replicas, rank=streams.rank, shuffle=False)
        self.n_batches = len(streams)

    def __len__(self) -> int:
        return self.n_batches

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.start, self.n_batches))


class EpochInOrder(InOrder):
    """A sampler of the items (epoch, 0), (epoch, 1), … of `ShuffledStreams`."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((self.epoch, step) for step in super().__iter__())


class StreamLoader(ResumableLoader):
    """A loader over `TokenStreams` that resumes an interrupted epoch with exactly the next segments.

    Another number of processes makes other streams. They start from their beginnings, with a warning, and the
    interrupted epoch ends after its remaining number of batches.
    """

    dataset: TokenStreams

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, its batches returned so far, its total number of batches, and the streams' settings."""
        return {**super().state_dict(), **self._settings()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from the position in `state_dict`.

        Raises:
            ValueError: If the segment length, the number of streams per process or the order of documents differs.
        """
        state, settings = dict(state_dict), self._settings()
        saved = {name: state.pop(name, None) for name in settings}
        for name in ("batch_size", "segment_len", "shuffle_seed"):
            if not _same(saved[name], settings[name]):
                raise ValueError(
                    f"{name}={settings[name]}, but the interrupted run had {_short(saved[name])}: its streams "
                    "cannot be continued; resume with the value that it was started with"
                )
        if not _same(saved["n_processes"], settings["n_processes"]):
            rank_zero_warn(
                f"Training continues with {settings['n_processes']} processes instead of "
                f"{_short(saved['n_processes'])}: the streams are divided differently, so they restart at the "
                "beginning of the text, with empty memories."
            )
            state |= {"batches": 0, "n_batches": len(self)}
        super().load_state_dict(state)

    def _settings(self) -> dict[str, int | None]:
        streams = self.dataset
        return {
            "n_processes": streams.num_replicas,
            "batch_size": streams.batch_size,
            "segment_len": streams.segment_len,
            "shuffle_seed": streams.shuffle_seed,
        }


def _same(saved: Any, value: int | None) -> bool:
    """Return whether a value in a checkpoint, of any type, equals `value`."""
    return type(saved) is type(value) and saved == value


def _short(value: Any) -> str:
    return " ".join(str(value).split())[:40]
