"""Tokens as parallel streams, cut into segments: what a model with a memory reads."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import Dataset, DistributedSampler

from lit_effattn.datamodules.sampling import ResumableLoader
from lit_effattn.datamodules.tokens import IGNORE, TokenBatch


class TokenStreams(Dataset[TokenBatch]):
    """Item t is the t-th segment of each of this process's streams.

    The documents, each cut into segments of its own (unless ``joined``), lie one after the other; this sequence of
    segments is divided into ``num_replicas · batch_size`` contiguous streams, of which process r has those from
    r · ``batch_size`` on. Streams thus depend on that product alone. A stream's row of the batches is the same
    throughout.

    A document's first token is predicted from ``start``, every other one from the one before it, whatever segment or
    stream that is in: each is the target of exactly one position.

    Args:
        tokens: (n,) of unsigned integers, `borders` as in `SplitTokens`.
        borders: (documents + 1,), where documents begin and end.
        start: The token read before a document.
        segment_len: N, tokens a segment has at most.
        batch_size: B, streams of this process.
        num_replicas: Number of processes.
        rank: This process, 0 to ``num_replicas - 1``.
        joined: Segments reach over the borders of documents; only the last one may be short.
        drop_last: All streams are equally long, and what is left over is dropped; from a single document or joined
            ones, also its last segment if it is short. Otherwise streams differ by one segment at most, and where one
            has no more, its row is empty (length 0).

    Raises:
        ValueError: With ``drop_last``, if there are fewer tokens than a segment has, or fewer segments than streams.

    Example:
        >>> streams = TokenStreams(
        ...     np.arange(5), np.array([0, 3, 5]), start=9, segment_len=2, batch_size=1, num_replicas=1, rank=0,
        ...     joined=False, drop_last=False,
        ... )
        >>> [(batch.inputs.tolist(), batch.targets.tolist()) for batch in (streams[0], streams[1], streams[2])]
        [([[9, 0]], [[0, 1]]), ([[1, 0]], [[2, -100]]), ([[9, 3]], [[3, 4]])]
    """

    def __init__(
        self,
        tokens: np.ndarray,
        borders: np.ndarray,
        *,
        start: int,
        segment_len: int,
        batch_size: int,
        num_replicas: int,
        rank: int,
        joined: bool,
        drop_last: bool,
    ) -> None:
        self.tokens = tokens
        self.documents = borders
        self.start = start
        self.segment_len = segment_len
        self.batch_size = batch_size
        self.num_replicas = num_replicas
        self.rank = rank
        # What is cut into segments: the documents, or all of them as one.
        self.borders = borders[[0, -1]] if joined else borders
        n_each = -(-np.diff(self.borders) // segment_len)
        if drop_last and len(n_each) == 1:
            n_each = np.diff(self.borders) // segment_len
        self.first = np.concatenate([[0], np.cumsum(n_each)])  # of each document, the number of its first segment
        n_segments, n_streams = int(self.first[-1]), num_replicas * batch_size
        if drop_last:
            self._check(n_segments, n_streams)
            n_segments -= n_segments % n_streams
        ends = np.arange(n_streams + 1) * n_segments // n_streams
        self.begins, self.ends = ends[:-1], ends[1:]  # of each stream, in segments

    def _check(self, n_segments: int, n_streams: int) -> None:
        if len(self.tokens) < self.segment_len:
            raise ValueError(
                f"segment_len={self.segment_len} is more than the {len(self.tokens)} tokens there are to train on; "
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

    def __getstate__(self) -> dict[str, Any]:
        # For workers that are not forked: numpy would send them all that it maps.
        tokens = self.tokens
        return self.__dict__ | ({"tokens": (tokens.filename, tokens.dtype)} if isinstance(tokens, np.memmap) else {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state["tokens"], tuple):
            filename, dtype = state["tokens"]
            state["tokens"] = np.memmap(filename, dtype, mode="r")
        self.__dict__.update(state)

    def __len__(self) -> int:
        return int((self.ends - self.begins).max())

    def __getitem__(self, step: int) -> TokenBatch:
        segments = self.begins + step  # of all processes, so that all give `lengths` or none does
        present = segments < self.ends
        document = np.searchsorted(self.first, np.where(present, segments, 0), side="right") - 1
        begins = self.borders[document] + (segments - self.first[document]) * self.segment_len
        lengths = np.minimum(self.segment_len, self.borders[document + 1] - begins) * present
        fresh = present & ((step == 0) | (segments == self.first[document]))
        mine = slice(self.rank * self.batch_size, (self.rank + 1) * self.batch_size)
        inputs, targets = self._read(begins[mine], lengths[mine])
        return TokenBatch(
            inputs=torch.from_numpy(inputs),  # (B, N)
            targets=torch.from_numpy(targets),  # (B, N)
            lengths=None if (lengths == self.segment_len).all() else torch.from_numpy(lengths[mine]),
            fresh=torch.from_numpy(fresh[mine]),
        )

    def _read(self, begins: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inputs = np.zeros((len(begins), self.segment_len), np.int64)
        targets = np.full_like(inputs, IGNORE)
        for row, (begin, length) in enumerate(zip(begins.tolist(), lengths.tolist(), strict=True)):
            if length == 0:
                continue
            targets[row, :length] = self.tokens[begin : begin + length]
            inputs[row, 1:length] = targets[row, : length - 1]
            inputs[row, 0] = self.tokens[begin - 1]  # at 0 the last token, overwritten: a document starts there
            first, last = np.searchsorted(self.documents, (begin, begin + length))
            inputs[row, self.documents[first:last] - begin] = self.start
        return inputs, targets


class InOrder(DistributedSampler[int]):
    """The numbers 0, 1, … of a process's batches; Lightning leaves a ``DistributedSampler`` alone."""

    def __init__(self, streams: TokenStreams) -> None:
        super().__init__(streams, num_replicas=streams.num_replicas, rank=streams.rank, shuffle=False)
        self.n_batches = len(streams)
        self.start = 0  # batches that `ResumableLoader` skips, trained on before the interruption

    def __len__(self) -> int:
        return self.n_batches

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.n_batches))


class StreamLoader(ResumableLoader):
    """A loader over `TokenStreams` that goes on, after an interruption, with exactly the next segments.

    With another number of processes there are other streams: they start afresh, with a warning, and the interrupted
    epoch ends after as many batches as it had left.
    """

    dataset: TokenStreams

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the batches given out in it, how many it has, and what the streams depend on."""
        return {**super().state_dict(), **self._division()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken.

        Raises:
            ValueError: If the segments have another length or each process another number of streams.
        """
        state, now = dict(state_dict), self._division()
        was = {name: state.pop(name) for name in now}
        for name in ("batch_size", "segment_len"):
            if was[name] != now[name]:
                raise ValueError(
                    f"{name}={now[name]}, but the interrupted run had {was[name]}: its streams cannot go on; "
                    "resume with what it was started with"
                )
        if was != now:
            rank_zero_warn(
                f"Training goes on with {now['n_processes']} processes instead of {was['n_processes']}: other streams, "
                "which start afresh, at the beginning of the text and without a memory."
            )
            state |= {"batches": 0, "n_batches": len(self)}
        super().load_state_dict(state)

    def _division(self) -> dict[str, int]:
        streams = self.dataset
        return {
            "n_processes": streams.num_replicas,
            "batch_size": streams.batch_size,
            "segment_len": streams.segment_len,
        }
