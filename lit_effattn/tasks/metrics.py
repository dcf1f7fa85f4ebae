"""Metrics of tasks: sums over the whole data set, divided once."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric


class Float64Metric(Metric, ABC):
    """A metric whose states stay float64, in which counts are exact, when the model becomes half precision."""

    full_state_update = False
    is_differentiable = False

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Float64Metric:
        """Move the states to the model's device, but keep them float64, also with `precision="bf16-true"`."""
        return super()._apply(lambda t: t.to(fn(t).device), *args, **kwargs)  # type: ignore[return-value]

    @abstractmethod
    def compute(self) -> Tensor:
        """Return the figure."""


class _Sums(Float64Metric):
    """A function of two sums, by default their quotient.

    The sums are added over batches and processes before the division, so the figure does not depend on how the data is
    divided into batches or among processes.
    """

    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def compute(self) -> Tensor:
        """Return total / count."""
        return self.total / self.count


class Mean(_Sums):
    """Σ values / count, over everything scored: of −ln p it is the cross-entropy, in nats.

    Examples:
        >>> metric = Mean()
        >>> metric.update(torch.tensor([0.5, 1.5]))
        >>> float(metric.compute())
        1.0
    """

    higher_is_better: bool | None = False

    def update(self, values: Tensor) -> None:
        """Add values, of any shape. Leave out those that are not scored."""
        self.total += values.detach().sum(dtype=torch.float64)
        self.count += values.numel()


class NatsPerUnit(_Sums):
    """Σ nats / Σ units, where a value in nats belongs to several units, such as −ln p of an utterance to its phones.

    Examples:
        >>> metric = NatsPerUnit()
        >>> metric.update(torch.tensor([6.0, 1.0]), torch.tensor([4, 10]))
        >>> float(metric.compute())
        0.5
    """

    higher_is_better = False

    def update(self, nats: Tensor, units: Tensor) -> None:
        """Add values in nats, and the number of units of each, of one shape."""
        self.total += nats.detach().sum(dtype=torch.float64)
        self.count += units.sum()


class BitsPerDim(Mean):
    """Mean negative log-likelihood in bits, Σ nats / (count · ln 2), over everything scored.

    `update` takes negative log-likelihoods in nats, one for each dimension, byte or character scored.

    Examples:
        >>> metric = BitsPerDim()
        >>> metric.update(torch.full((2, 8), math.log(17)))
        >>> round(float(metric.compute()), 4)
        4.0875
    """

    def compute(self) -> Tensor:
        """Return bits per value scored."""
        return self.total / self.count / math.log(2)


class BitsPerTextByte(NatsPerUnit):
    """Bits of a text for each of its bytes, Σ nats / (Σ bytes · ln 2), with any tokenizer.

    `update` takes the negative log-likelihood in nats of each token scored, and the token's number of bytes.

    Examples:
        >>> metric = BitsPerTextByte()
        >>> metric.update(torch.tensor([math.log(2), math.log(8)]), torch.tensor([3, 1]))
        >>> round(float(metric.compute()), 4)
        1.0
    """

    def compute(self) -> Tensor:
        """Return bits per byte."""
        return self.total / self.count / math.log(2)


class Perplexity(Mean):
    """exp(Σ nats / count), over everything scored: the number of equally likely tokens with the same entropy.

    `update` takes negative log-likelihoods in nats, one for each token scored.

    Examples:
        >>> metric = Perplexity()
        >>> metric.update(torch.tensor([math.log(2), math.log(8)]))
        >>> round(float(metric.compute()), 4)
        4.0
    """

    def compute(self) -> Tensor:
        """Return the perplexity."""
        return (self.total / self.count).exp()


class Accuracy(Mean):
    """The fraction of correct decisions. `update` takes booleans, one for each decision.

    Examples:
        >>> metric = Accuracy()
        >>> metric.update(torch.tensor([3, 1, 4, 1]) == torch.tensor([3, 1, 4, 2]))
        >>> float(metric.compute())
        0.75
    """

    higher_is_better = True


class Count(Mean):
    """The number of values.

    Examples:
        >>> metric = Count()
        >>> metric.update(torch.zeros(2, 8))
        >>> int(metric.compute())
        16
    """

    def compute(self) -> Tensor:
        """Return the number, an integer."""
        return self.count.long()


class ErrorRate(_Sums):
    """Σ edits to the nearest reference / Σ its tokens, over all sequences: a fraction, which may exceed 1.

    Edits are the fewest insertions, deletions and substitutions that turn one sequence into the other. The nearest
    reference needs the fewest edits. If several do, the shortest counts, so the order of the references does not
    matter. Long sequences weigh more than in a mean of the sequences' rates. For words this is the word error rate, for
    phones the phone error rate.

    Examples:
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
            ValueError: If a sequence has no reference.
        """
        from torchaudio.functional import edit_distance  # imports slowly

        _check_references(references)
        for hypothesis, of_one in zip(hypotheses, references, strict=True):
            edits, tokens = min((edit_distance(hypothesis, reference), len(reference)) for reference in of_one)
            self.total += edits
            self.count += tokens


class ExactMatch(_Sums):
    """The fraction of sequences that equal one of their references: exact-match accuracy.

    Examples:
        >>> metric = ExactMatch()
        >>> metric.update([["AY"], ["R", "EH", "D"]], [[["IY"]], [["R", "IY", "D"], ["R", "EH", "D"]]])
        >>> float(metric.compute())
        0.5
    """

    higher_is_better = True

    def update(self, hypotheses: Sequence[Sequence[Any]], references: Sequence[Sequence[Sequence[Any]]]) -> None:
        """Add sequences: see `ErrorRate.update`."""
        _check_references(references)
        for hypothesis, of_one in zip(hypotheses, references, strict=True):
            self.total += any(list(hypothesis) == list(reference) for reference in of_one)
            self.count += 1


def _check_references(references: Sequence[Sequence[Any]]) -> None:
    for i, of_one in enumerate(references):
        if not len(of_one):
            raise ValueError(f"references[{i}] is empty; give at least one reference for each hypothesis")


def for_stages(kinds: Mapping[str, Callable[[], Metric]]) -> nn.ModuleDict:
    """Return new metrics by stage, "val" and "test", and name."""
    return nn.ModuleDict({s: nn.ModuleDict({name: kind() for name, kind in kinds.items()}) for s in ("val", "test")})
