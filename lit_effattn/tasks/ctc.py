"""Connectionist temporal classification: sequences of labels without times (Graves et al. 2006)."""

from __future__ import annotations

import math
import tempfile
from abc import ABC, abstractmethod
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_effattn.checks import at_least
from lit_effattn.datamodules.speech.utterances import BLANK
from lit_effattn.hparams import HasInitArgs
from lit_effattn.sequence import valid_positions

if TYPE_CHECKING:
    from torchaudio.functional import TokenSpan


UNDECIDED = 1000
"""Number of frames after which a beam search on a stream decides for its likeliest hypothesis."""

_NOT_KEPT = "the hypotheses of a search can't be kept; use GreedyDecoder, and leave --beam_size out"


@torch.compiler.disable(reason="torch.compile can't infer the shape of the result of ctc_loss")
def ctc_nll(log_probs: Tensor, lengths: Tensor, labels: Tensor, label_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return −ln p(y|x) in nats, and whether an alignment exists.

        p(y|x) = Σ_{π ∈ B⁻¹(y)} Π_t p_t(π_t),  B merges repeats, then drops blanks       Graves et al. 2006, equation 3

    A label needs a frame, and one more for the blank between two equal labels. If a row has too few frames, no
    alignment exists and p(y|x) = 0. The row's loss and gradient are then 0.

    Args:
        log_probs: (B, T, V), log-probabilities, float32 at least; label 0 is the blank.
        lengths: (B,), number of frames of each row.
        labels: (B, U), 1 … V − 1; any value in the padding.
        label_lengths: (B,), number of labels of each row.

    Returns:
        (B,) nats, and (B,) booleans, True for rows with an alignment.
    """
    possible = lengths >= frames_needed(labels, label_lengths)
    # Impossible rows are given no labels: an infinite loss would have a NaN gradient.
    nats = F.ctc_loss(
        log_probs.transpose(0, 1),  # (T, B, V)
        F.pad(labels, (0, 1)).long(),  # at least one column is required
        lengths.long(),
        label_lengths.masked_fill(~possible, 0).long(),
        blank=BLANK,
        reduction="none",
    )
    return nats.masked_fill(~possible, 0), possible


def frames_needed(labels: Tensor, label_lengths: Tensor) -> Tensor:
    """Return the minimum number of frames, labels + adjacent repeats: (B, U), (B,) -> (B,)."""
    repeated = (labels[:, 1:] == labels[:, :-1]) & valid_positions(label_lengths, labels.size(1))[:, 1:]
    return label_lengths + repeated.sum(1)


def align(log_probs: Tensor, labels: list[int]) -> list[TokenSpan]:
    """Return the frames of each label in the likeliest alignment.

        π* = argmax_{π ∈ B⁻¹(y)} Σ_t ln p_t(π_t)

    For the labels that `GreedyDecoder` returns, π* is its path.

    Args:
        log_probs: (T, V), on the CPU.
        labels: Labels, with an alignment.

    Returns:
        For each label its run of frames in π*, from `start` to before `end`, and the mean of p_t(label) over the run,
        `score`. A trained model gives most frames to the blank, so a run of one or two frames covers only a part of
        its phone.
    """
    if not labels:
        return []  # `forced_align` rejects it
    from torchaudio.functional import forced_align, merge_tokens  # imports slowly

    path, scores = forced_align(log_probs[None].contiguous(), torch.tensor([labels]), blank=BLANK)
    return merge_tokens(path[0], scores[0].exp(), blank=BLANK)


class StreamedLabel(NamedTuple):
    """A label of a stream.

    Attributes:
        label: 1 … V − 1.
        frame: Its first frame, counted from the beginning of the stream.
        score: p_t(label) at that frame.
    """

    label: int
    frame: int
    score: float


class LabelStream(ABC):
    """Chooses the labels of a stream, given the probabilities of some frames at a time. A returned label is final."""

    @abstractmethod
    def __call__(self, log_probs: Tensor, *, last: bool = False) -> list[StreamedLabel]:
        """Return the labels that are now known.

        Args:
            log_probs: (n, V), log-probabilities of the next frames, on the CPU; n may be 0.
            last: Whether the stream ends with them.
        """

    @property
    def kept(self) -> tuple[int, int]:
        """The label of the last frame and the number of frames so far. Setting it goes on from there.

        Raises:
            ValueError: If more than these is needed to go on, as by default.
        """
        raise ValueError(_NOT_KEPT)

    @kept.setter
    def kept(self, kept: tuple[int, int]) -> None:
        raise ValueError(_NOT_KEPT)


class Decoder(HasInitArgs, ABC):
    """Chooses labels, given each frame's probabilities."""

    @abstractmethod
    def __call__(self, log_probs: Tensor, lengths: Tensor, phones: tuple[str, ...]) -> list[list[int]]:
        """Return each row's labels.

        Args:
            log_probs: (B, T, V), log-probabilities, float32 at least.
            lengths: (B,), number of frames of each row.
            phones: Names of the labels 1 … V − 1.
        """

    def stream(self, phones: tuple[str, ...]) -> LabelStream:
        """Return a `LabelStream` that chooses the labels that this decoder chooses for the whole.

        Raises:
            ValueError: If the decoder supports no streams, as by default.
        """
        raise ValueError(f"{type(self).__name__} can't decode a stream; choose GreedyDecoder or BeamDecoder")


class GreedyDecoder(Decoder):
    """Takes each frame's likeliest label: best path decoding (Graves et al. 2006, section 3.2).

    y = B(argmax p_1, …, argmax p_T),  B merges repeats, then drops blanks
    """

    def __call__(self, log_probs: Tensor, lengths: Tensor, phones: tuple[str, ...]) -> list[list[int]]:
        """See `Decoder.__call__`."""
        rows = zip(log_probs.argmax(-1).tolist(), lengths.tolist(), strict=True)
        return [[label for label, _ in groupby(path[:n]) if label != BLANK] for path, n in rows]

    def stream(self, phones: tuple[str, ...]) -> LabelStream:
        """Return a stream that gives each label at its first frame."""
        return _GreedyStream()


class _GreedyStream(LabelStream):
    def __init__(self) -> None:
        self._label = BLANK  # of the last frame
        self._n_frames = 0

    def __call__(self, log_probs: Tensor, *, last: bool = False) -> list[StreamedLabel]:
        labels = []
        for frame in log_probs:
            label = int(frame.argmax())
            if label not in (BLANK, self._label):
                labels.append(StreamedLabel(label, self._n_frames, float(frame[label].exp())))
            self._label = label
            self._n_frames += 1
        return labels

    @property
    def kept(self) -> tuple[int, int]:
        """The label of the last frame and the number of frames so far."""
        return self._label, self._n_frames

    @kept.setter
    def kept(self, kept: tuple[int, int]) -> None:
        self._label, self._n_frames = kept


class BeamDecoder(Decoder):
    """Searches for the likeliest sequence of labels, summed over its alignments, optionally with a language model.

        y = argmax_y ln p(y|x) + λ ln p_LM(y)                 Graves et al. 2006, section 3.2; Hannun et al. 2014

    The search is flashlight's, through torchaudio. It runs on the CPU, tens of times slower than the greedy decoder.

    Args:
        beam_size: Number of sequences kept at each frame.
        lm: An n-gram model whose words are the phones' names, in KenLM's binary or ARPA's format; None: no model.
        lm_weight: λ.

    Raises:
        ValueError: If `beam_size` is not positive, or flashlight-text is not installed.
        FileNotFoundError: If the file `lm` does not exist.
    """

    def __init__(self, beam_size: int = 50, lm: str | None = None, lm_weight: float = 1.0) -> None:
        at_least(1, beam_size=beam_size)
        if find_spec("flashlight") is None:
            raise ValueError("BeamDecoder needs the package flashlight-text: pip install 'lit-effattn[beam]'")
        if lm is not None and not Path(lm).is_file():
            raise FileNotFoundError(f"lm={lm}: no such file; give an n-gram model in KenLM's or ARPA's format")
        self.beam_size, self.lm, self.lm_weight = beam_size, lm, lm_weight
        self._decoder: tuple[tuple[str, ...], Any] = (), None  # phones, and flashlight's decoder for them

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which makes flashlight's decoder again: it can't be copied."""
        return {**self.__dict__, "_decoder": ((), None)}

    def __call__(self, log_probs: Tensor, lengths: Tensor, phones: tuple[str, ...]) -> list[list[int]]:
        """See `Decoder.__call__`."""
        if self._decoder[0] != phones:
            self._decoder = phones, self._make(phones)
        rows = self._decoder[1](log_probs.float().cpu().contiguous(), lengths.cpu())
        return [hypotheses[0].tokens.tolist() for hypotheses in rows]

    def stream(self, phones: tuple[str, ...]) -> LabelStream:
        """Return a stream that gives each label as soon as all hypotheses of the search agree on it.

        Its labels are those of the whole. An exception limits its memory: when the hypotheses still disagree on a label
        of `UNDECIDED` frames before, the stream returns the likeliest hypothesis, and the search begins anew.
        """
        return _BeamStream(self._make(phones).decoder, len(phones) + 1)

    def _make(self, phones: tuple[str, ...]) -> Any:
        from torchaudio.models.decoder import ctc_decoder

        labels = ["<blank>", *phones]
        with tempfile.TemporaryDirectory() as folder:
            # The file fixes the words' numbers. Without it torchaudio numbers them in the order of a hash table, and
            # each phone would get another one's probability.
            words = Path(folder) / "words.txt"
            words.write_text("\n".join(labels) + "\n", encoding="utf-8")
            return ctc_decoder(
                lexicon=None,
                tokens=labels,
                lm=self.lm,
                lm_dict=None if self.lm is None else str(words),
                lm_weight=self.lm_weight * math.log(10),  # KenLM's logarithms are to base 10
                beam_size=self.beam_size,
                log_add=True,
                blank_token=labels[BLANK],
                sil_token=labels[BLANK],  # has no effect; another label could not begin a sequence
            )


class _BeamStream(LabelStream):
    """Runs flashlight's search on a stream.

    The search keeps the hypotheses of the frames since the last one on which all hypotheses agree: the same labels so
    far, and the same output at that frame.

    Args:
        search: flashlight's decoder.
        n_labels: V.
    """

    def __init__(self, search: Any, n_labels: int) -> None:
        self._search = search
        self._search.decode_begin()
        self._first = 0  # the first of the kept frames
        self._label = BLANK  # of the frame before it
        self._returned = 0  # labels of the kept frames
        self._log_probs = torch.zeros(0, n_labels)  # of the kept frames

    def __call__(self, log_probs: Tensor, *, last: bool = False) -> list[StreamedLabel]:
        pieces = log_probs.float().split(max(1, UNDECIDED // 10))
        return [
            label for i, piece in enumerate(pieces) for label in self._next(piece, last=last and i == len(pieces) - 1)
        ]

    def _next(self, log_probs: Tensor, *, last: bool) -> list[StreamedLabel]:
        log_probs = log_probs.contiguous()
        self._log_probs = torch.cat([self._log_probs, log_probs])
        if len(log_probs):
            self._search.decode_step(log_probs.data_ptr(), *log_probs.shape)
        ends = last or len(self._log_probs) > UNDECIDED
        if ends:
            self._search.decode_end()
        hypotheses = self._search.get_all_final_hypothesis()
        best = max(range(len(hypotheses)), key=lambda i: hypotheses[i].score)
        paths = np.array([h.tokens for h in ([hypotheses[best]] if ends else hypotheses)])  # (K, 1 + n), or one more
        paths, best = paths[:, : len(self._log_probs) + 1], 0 if ends else best
        paths[:, 0] = self._label
        begins = (paths[:, 1:] != paths[:, :-1]) & (paths[:, 1:] != BLANK)  # (K, n)
        labels = [path[1:][begin] for path, begin in zip(paths, begins, strict=True)]
        agreed = _common(labels)
        frames = np.flatnonzero(begins[best])[self._returned : agreed].tolist()
        result = [
            StreamedLabel(label, self._first + frame, float(self._log_probs[frame, label].exp()))
            for frame, label in zip(frames, labels[best][self._returned : agreed].tolist(), strict=True)
        ]
        self._returned = agreed
        self._forget(paths, begins)
        if ends:
            self._search.decode_begin()
        return result

    def _forget(self, paths: np.ndarray, begins: np.ndarray) -> None:
        """Drop the frames up to the last one on which all hypotheses agree."""
        counts = begins.cumsum(1)  # (K, n)
        same = (paths[:, 1:] == paths[0, 1:]).all(0) & (counts == counts[0]).all(0) & (counts[0] <= self._returned)
        if same.any():
            n = int(np.flatnonzero(same)[-1]) + 1
            self._search.prune(same.size - n)
            self._first, self._label, self._returned = self._first + n, paths[0, n], self._returned - counts[0, n - 1]
            self._log_probs = self._log_probs[n:].clone()


def _common(sequences: list[np.ndarray]) -> int:
    """Return the number of first elements that all sequences share."""
    n = min(map(len, sequences))
    rows = np.stack([sequence[:n] for sequence in sequences])
    differ = np.flatnonzero((rows != rows[0]).any(0))
    return int(differ[0]) if differ.size else n
