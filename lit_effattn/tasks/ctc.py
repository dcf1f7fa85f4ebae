"""Connectionist temporal classification: sequences of labels without their times (Graves et al. 2006)."""

from __future__ import annotations

import math
import tempfile
from abc import ABC, abstractmethod
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_effattn.datamodules.speech.utterances import BLANK
from lit_effattn.hparams import HasInitArgs
from lit_effattn.sequence import valid_positions

if TYPE_CHECKING:
    from torchaudio.functional import TokenSpan


@torch.compiler.disable(reason="torch.compile can't infer the shape of the result of ctc_loss")
def ctc_nll(log_probs: Tensor, lengths: Tensor, labels: Tensor, label_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return −ln p(y|x) in nats, and where there is one.

        p(y|x) = Σ_{π ∈ B⁻¹(y)} Π_t p_t(π_t),  B merges repeats, then drops blanks       Graves et al. 2006, equation 3

    A label needs a frame, and one more for the blank between it and an equal one before it. Where there are too few
    frames no alignment exists and p(y|x) = 0: such a row's loss and gradient are 0, and it is told by the second value.

    Args:
        log_probs: (B, T, V), log-probabilities, float32 at least; label 0 is the blank.
        lengths: (B,), frames of each row.
        labels: (B, U), 1 … V − 1; anything in the padding.
        label_lengths: (B,), labels of each row.

    Returns:
        (B,) nats and (B,) booleans, whether the row has an alignment.
    """
    possible = lengths >= frames_needed(labels, label_lengths)
    # Without labels a row is always possible, so that no infinity comes up, not even in the gradient.
    nats = F.ctc_loss(
        log_probs.transpose(0, 1),  # (T, B, V)
        F.pad(labels, (0, 1)).long(),  # it wants at least one column
        lengths.long(),
        label_lengths.masked_fill(~possible, 0).long(),
        blank=BLANK,
        reduction="none",
    )
    return nats.masked_fill(~possible, 0), possible


def frames_needed(labels: Tensor, label_lengths: Tensor) -> Tensor:
    """Return the fewest frames that (B, U) labels fit into, U + adjacent repeats of each row: (B,)."""
    repeated = (labels[:, 1:] == labels[:, :-1]) & valid_positions(label_lengths, labels.size(1))[:, 1:]
    return label_lengths + repeated.sum(1)


def align(log_probs: Tensor, labels: list[int]) -> list[TokenSpan]:
    """Return when each label is said, in the likeliest alignment of all to the frames.

        π* = argmax_{π ∈ B⁻¹(y)} Σ_t ln p_t(π_t)

    For the labels that `GreedyDecoder` returns, π* is the path that it took.

    Args:
        log_probs: (T, V), on the CPU.
        labels: Of which an alignment exists.

    Returns:
        For each label its run of frames in π*, `start` to before `end`, and the mean p_t(label) over the run, `score`.
        Blanks belong to no label, and a trained model gives one a frame or two: a run is within its phone, not all.
    """
    if not labels:
        return []  # which `forced_align` refuses
    from torchaudio.functional import forced_align, merge_tokens  # here, since help need not wait for it

    path, scores = forced_align(log_probs[None].contiguous(), torch.tensor([labels]), blank=BLANK)
    return merge_tokens(path[0], scores[0].exp(), blank=BLANK)


class Decoder(HasInitArgs, ABC):
    """Chooses labels, given each frame's probabilities."""

    @abstractmethod
    def __call__(self, log_probs: Tensor, lengths: Tensor, phones: tuple[str, ...]) -> list[list[int]]:
        """Return each row's labels.

        Args:
            log_probs: (B, T, V), log-probabilities, float32 at least.
            lengths: (B,), frames of each row.
            phones: What labels 1 … V − 1 are called.
        """


class GreedyDecoder(Decoder):
    """Takes each frame's likeliest label: best path decoding (Graves et al. 2006, section 3.2).

    y = B(argmax p_1, …, argmax p_T),  B merges repeats, then drops blanks
    """

    def __call__(self, log_probs: Tensor, lengths: Tensor, phones: tuple[str, ...]) -> list[list[int]]:
        """See `Decoder.__call__`."""
        paths = log_probs.argmax(-1).tolist()  # (B, T)
        return [_collapsed(path[:n]) for path, n in zip(paths, lengths.tolist(), strict=True)]


class BeamDecoder(Decoder):
    """Searches for the likeliest sequence of labels, all its alignments together, with a language model if given.

        y = argmax_y ln p(y|x) + λ ln p_LM(y)                 Graves et al. 2006, section 3.2; Hannun et al. 2014

    It is flashlight's search, through torchaudio; on the CPU, and tens of times slower than the greedy one.

    Args:
        beam_size: Sequences kept at every frame.
        lm: An n-gram model of phones, with their names as words, in KenLM's binary form or ARPA's; None: no model.
        lm_weight: λ.

    Raises:
        ValueError: `beam_size` is not positive, or flashlight-text is not installed.
        FileNotFoundError: `lm` is no file.
    """

    def __init__(self, beam_size: int = 50, lm: str | None = None, lm_weight: float = 1.0) -> None:
        if beam_size < 1:
            raise ValueError(f"beam_size={beam_size} is not positive; 20 to 100 are usual")
        if find_spec("flashlight") is None:
            raise ValueError("BeamDecoder needs the package flashlight-text: pip install 'lit-effattn[beam]'")
        if lm is not None and not Path(lm).is_file():
            raise FileNotFoundError(f"lm={lm}: no such file; give an n-gram model in KenLM's or ARPA's format")
        self.beam_size, self.lm, self.lm_weight = beam_size, lm, lm_weight
        self._made: tuple[tuple[str, ...], Any] = (), None  # for which phones, and what decodes them

    def __call__(self, log_probs: Tensor, lengths: Tensor, phones: tuple[str, ...]) -> list[list[int]]:
        """See `Decoder.__call__`."""
        if self._made[0] != phones:
            self._made = phones, self._make(phones)
        found = self._made[1](log_probs.float().cpu().contiguous(), lengths.cpu())
        return [hypotheses[0].tokens.tolist() for hypotheses in found]

    def _make(self, phones: tuple[str, ...]) -> Any:
        from torchaudio.models.decoder import ctc_decoder

        labels = ["<blank>", *phones]
        with tempfile.TemporaryDirectory() as folder:
            # Told in a file, since torchaudio else numbers the words in the order of a hash table, not in the labels',
            # so that each phone would have another's probability.
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
                sil_token=labels[BLANK],  # of no weight; any other label could not come first
            )


def _collapsed(path: list[int]) -> list[int]:
    return [label for label, _ in groupby(path) if label != BLANK]
