"""What is reported: sums over the whole data set, divided once."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class Float64Metric(Metric, ABC):
    """A metric whose states stay float64, in which counts are exact, when the model becomes half precision."""

    full_state_update = False
    is_differentiable = False

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Float64Metric:
        """Go where the model goes, but stay float64 where it becomes bfloat16 (`precision="bf16-true"`)."""
        return super()._apply(lambda t: t.to(fn(t).device), *args, **kwargs)  # type: ignore[return-value]

    @abstractmethod
    def compute(self) -> Tensor:
        """Return the figure."""


class _Sums(Float64Metric):
    """A function of two sums.

    They are added over batches and processes before the one division, so the figure does not depend on how the data
    was cut into batches or dealt to processes.
    """

    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")


class _Mean(_Sums):
    """A function of the mean of everything given. To leave values out, do not give them."""

    def update(self, values: Tensor) -> None:
        """Add values, of any shape."""
        self.total += values.detach().sum(dtype=torch.float64)
        self.count += values.numel()


class BitsPerDim(_Mean):
    """Mean negative log-likelihood in bits, Σ nats / (count · ln 2), over everything scored.

    `update` takes negative log-likelihoods in nats, one for each dimension scored.

    Example:
        >>> metric = BitsPerDim()
        >>> metric.update(torch.full((2, 8), math.log(17)))
        >>> round(float(metric.compute()), 4)
        4.0875
    """

    higher_is_better = False

    def compute(self) -> Tensor:
        """Return bits per value scored."""
        return self.total / self.count / math.log(2)


class BitsPerByte(BitsPerDim):
    """`BitsPerDim` of text whose tokens are bytes: one negative log-likelihood in nats for each byte scored."""


class BitsPerTextByte(_Sums):
    """Bits of a text for each of its bytes, Σ nats / (Σ bytes · ln 2), whatever the tokens: to compare tokenizers.

    `update` takes the negative log-likelihood in nats of each token scored, and the number of bytes it stands for.

    Example:
        >>> metric = BitsPerTextByte()
        >>> metric.update(torch.tensor([math.log(2), math.log(8)]), torch.tensor([3, 1]))
        >>> round(float(metric.compute()), 4)
        1.0
    """

    higher_is_better = False

    def update(self, nats: Tensor, n_bytes: Tensor) -> None:
        """Add tokens."""
        self.total += nats.detach().sum(dtype=torch.float64)
        self.count += n_bytes.sum()

    def compute(self) -> Tensor:
        """Return bits per byte."""
        return self.total / self.count / math.log(2)


class BitsPerCharacter(BitsPerDim):
    """`BitsPerDim` of text whose tokens are characters: one negative log-likelihood in nats for each scored."""


class Perplexity(_Mean):
    """exp(Σ nats / count), over everything scored: as unsure as a choice among that many equally likely tokens.

    `update` takes negative log-likelihoods in nats, one for each token scored.

    Example:
        >>> metric = Perplexity()
        >>> metric.update(torch.tensor([math.log(2), math.log(8)]))
        >>> round(float(metric.compute()), 4)
        4.0
    """

    higher_is_better = False

    def compute(self) -> Tensor:
        """Return the perplexity."""
        return (self.total / self.count).exp()


class Accuracy(_Mean):
    """The fraction that is right. `update` takes booleans, one for each decision.

    Example:
        >>> metric = Accuracy()
        >>> metric.update(torch.tensor([3, 1, 4, 1]) == torch.tensor([3, 1, 4, 2]))
        >>> float(metric.compute())
        0.75
    """

    higher_is_better = True

    def compute(self) -> Tensor:
        """Return the fraction."""
        return self.total / self.count


class Count(_Mean):
    """How many values there were.

    Example:
        >>> metric = Count()
        >>> metric.update(torch.zeros(2, 8))
        >>> int(metric.compute())
        16
    """

    def compute(self) -> Tensor:
        """Return it, an integer."""
        return self.count.long()


class ErrorRate(_Sums):
    """Σ edits to the nearest reference / Σ its tokens, over all sequences: a fraction, which may exceed 1.

    Edits are the fewest insertions, deletions and substitutions that make the one of the other. The nearest reference
    has the fewest; of several it is the shortest, so that the order of the references does not matter. Long sequences
    weigh more: it is no mean of the sequences' rates. Of sequences of words it is the word error rate, of phones the
    phone error rate.

    Example:
        >>> metric = ErrorRate()
        >>> metric.update([["T", "AH", "M"]], [[["T", "AH", "M", "EY"], ["T", "AA", "M", "AA", "T"]]])
        >>> float(metric.compute())
        0.25
    """

    higher_is_better = False

    def update(self, hypotheses: Sequence[Sequence[Any]], references: Sequence[Sequence[Sequence[Any]]]) -> None:
        """Add sequences.

        Args:
            hypotheses: The tokens of each.
            references: The references of each, at least one; their number may vary.

        Raises:
            ValueError: a sequence has no reference.
        """
        from torchaudio.functional import edit_distance  # here, since help need not wait for it

        _check_references(references)
        for hypothesis, of_it in zip(hypotheses, references, strict=True):
            edits, tokens = min((edit_distance(hypothesis, reference), len(reference)) for reference in of_it)
            self.total += edits
            self.count += tokens

    def compute(self) -> Tensor:
        """Return the fraction."""
        return self.total / self.count


class PhonemeErrorRate(ErrorRate):
    """The `ErrorRate` of utterances, each with one reference.

    Example:
        >>> metric = PhonemeErrorRate()
        >>> metric.update([["k", "ae", "t"], ["ah"]], [["k", "ah", "t", "s"], ["ah"]])
        >>> float(metric.compute())
        0.4
    """

    def update(self, hypotheses: Sequence[Sequence[Any]], references: Sequence[Sequence[Any]]) -> None:
        """Add utterances: what was recognised in each, and what was said."""
        super().update(hypotheses, [[reference] for reference in references])


class ExactMatch(_Sums):
    """The fraction of sequences that equal one of their references: exact-match accuracy.

    Example:
        >>> metric = ExactMatch()
        >>> metric.update([["AY"], ["R", "EH", "D"]], [[["IY"]], [["R", "IY", "D"], ["R", "EH", "D"]]])
        >>> float(metric.compute())
        0.5
    """

    higher_is_better = True

    def update(self, hypotheses: Sequence[Sequence[Any]], references: Sequence[Sequence[Sequence[Any]]]) -> None:
        """Add sequences: see `ErrorRate.update`."""
        _check_references(references)
        for hypothesis, of_it in zip(hypotheses, references, strict=True):
            self.total += any(list(hypothesis) == list(reference) for reference in of_it)
            self.count += 1

    def compute(self) -> Tensor:
        """Return the fraction."""
        return self.total / self.count


class SequenceErrorRate(ExactMatch):
    """The fraction of sequences that equal none of their references, 1 − `ExactMatch`.

    It is what grapheme-to-phoneme conversion calls the word error rate (WER): a sequence is one word's phones.
    """

    higher_is_better = False

    def compute(self) -> Tensor:
        """Return the fraction."""
        return 1 - super().compute()


def _check_references(references: Sequence[Sequence[Any]]) -> None:
    for i, of_it in enumerate(references):
        if not len(of_it):
            raise ValueError(f"references[{i}] is empty; give at least one reference for each hypothesis")


class NatsPerPhone(_Sums):
    """Σ −ln p(phones | sound) / Σ phones, over all utterances.

    Example:
        >>> metric = NatsPerPhone()
        >>> metric.update(torch.tensor([6.0, 1.0]), torch.tensor([4, 10]))
        >>> float(metric.compute())
        0.5
    """

    higher_is_better = False

    def update(self, nats: Tensor, phones: Tensor) -> None:
        """Add utterances: −ln p of each, and how many phones it has."""
        self.total += nats.detach().sum(dtype=torch.float64)
        self.count += phones.sum()

    def compute(self) -> Tensor:
        """Return nats per phone."""
        return self.total / self.count


class NatsPerSequence(_Mean):
    """Σ −ln p(label) / sequences: the cross-entropy of a classifier.

    `update` takes −ln p of the right class, one for each sequence.

    Example:
        >>> metric = NatsPerSequence()
        >>> metric.update(torch.tensor([0.5, 1.5]))
        >>> float(metric.compute())
        1.0
    """

    higher_is_better = False

    def compute(self) -> Tensor:
        """Return nats per sequence."""
        return self.total / self.count
