"""Heads map hidden states to a distribution over levels, for the loss and for sampling."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_effattn.checks import at_least, probabilities
from lit_effattn.hparams import HasInitArgs
from lit_effattn.ops.cross_entropy import linear_cross_entropy
from lit_effattn.sequence import accumulator

_TINY = 1e-20


class Head(HasInitArgs, nn.Module, ABC):
    """A distribution over `n_levels` ordered values, given a hidden state.

    The loss and the sampler use the same distribution. It is computed in float32 at least.

    Args:
        d_model: Width of the hidden state.
        n_levels: Number of values.

    Raises:
        ValueError: If `n_levels` is below 2.
    """

    def __init__(self, d_model: int, n_levels: int) -> None:
        super().__init__()
        at_least(2, n_levels=n_levels)
        self.n_levels = n_levels

    @abstractmethod
    def log_probs(self, h: Tensor) -> Tensor:
        """(…, d_model) -> (…, n_levels), log-probabilities in nats; their exponentials sum to 1."""

    def nll(self, h: Tensor, target: Tensor) -> Tensor:
        """Return −log p(target) in nats: (…, d_model), (…) -> (…)."""
        return -self.log_probs(h).gather(-1, target[..., None])[..., 0]

    def loss(self, h: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Return `nll` with label smoothing: (…, d_model), (…) -> (…).

            −(1 − ε) log p(target) − ε / n_levels Σ_level log p(level)          Szegedy et al. 2016, section 7

        Args:
            h: (…, d_model).
            target: (…), levels.
            label_smoothing: ε. If it is not 0, all log-probabilities are computed.

        Raises:
            ValueError: If `label_smoothing` is not in [0, 1).
        """
        probabilities(label_smoothing=label_smoothing)
        return self._smoothed(h, target, label_smoothing) if label_smoothing else self.nll(h, target)

    def _smoothed(self, h: Tensor, target: Tensor, epsilon: float) -> Tensor:
        log_probs = self.log_probs(h)
        of_target = log_probs.gather(-1, target[..., None])[..., 0]
        return -(1 - epsilon) * of_target - epsilon * log_probs.mean(-1)

    def tie(self, embedding: nn.Module) -> None:
        """Share the matrix of `embedding`, and its values (Press & Wolf 2017).

        Raises:
            ValueError: If the shapes differ, or the head has no matrix that an embedding could share.
        """
        raise ValueError(f"{type(self).__name__} can't be tied: it has no vector for each level; leave tie out")


class CategoricalHead(Head):
    """One logit per value: p = softmax(W h + b).

    Args:
        d_model: Width of the hidden state.
        n_levels: Number of values.
        zero_init: Initialise W = b = 0, so that the loss is exactly log2(n_levels) bits (Child et al. 2019, section
            5.2).
        bias: Whether to add b. GPT-2's head has none (Radford et al. 2019).
        init_std: Initialise W from N(0, init_std²) and b = 0: 0.02 in Dai et al. 2019 and GPT-2. Default: as a
            `torch.nn.Linear`. A tied W has the embedding's values.
        chunked: Whether the loss computes the logits of some positions at a time, and again in the backward pass, so
            that it never holds a position × level matrix: see `ops.cross_entropy`. It is equal up to rounding, and
            never compiled. Default: for batches with more than 2²⁷ logits, which take 512 MiB.
        transform: Replace h by LayerNorm(gelu(W' h + b')), as the head of BERT does (Devlin et al. 2018, the authors'
            code), with ε = 1e-12.

    Raises:
        ValueError: If `init_std` is negative, or given with `zero_init`.
    """

    MOST_LOGITS = 2**27

    def __init__(
        self,
        d_model: int,
        n_levels: int,
        zero_init: bool = False,
        bias: bool = True,
        init_std: float | None = None,
        chunked: bool | None = None,
        transform: bool = False,
    ) -> None:
        super().__init__(d_model, n_levels)
        self.chunked = chunked
        if init_std is not None and (zero_init or not 0 <= init_std < math.inf):
            raise ValueError(
                f"init_std={init_std} with zero_init={zero_init}: init_std must be at least 0 and finite, and needs "
                "zero_init=False"
            )
        self.transform: nn.Module = nn.Identity()
        if transform:
            self.transform = nn.Sequential(nn.Linear(d_model, d_model), nn.GELU(), nn.LayerNorm(d_model, eps=1e-12))
        self.proj = nn.Linear(d_model, n_levels, bias=bias)
        std = 0.0 if zero_init else init_std
        if std is not None:
            nn.init.normal_(self.proj.weight, std=std)
            if bias:
                nn.init.zeros_(self.proj.bias)

    def _logits(self, h: Tensor) -> Tensor:
        logits = self.proj(self.transform(h))
        return logits.to(accumulator(logits.dtype))

    def log_probs(self, h: Tensor) -> Tensor:
        """See `Head.log_probs`: (…, d_model) -> (…, n_levels)."""
        return self._logits(h).log_softmax(-1)

    def nll(self, h: Tensor, target: Tensor) -> Tensor:
        """See `Head.nll`. The log-probabilities are not kept for the backward pass."""
        return self._smoothed(h, target, 0.0)

    def _smoothed(self, h: Tensor, target: Tensor, epsilon: float) -> Tensor:
        chunked = target.numel() * self.n_levels > self.MOST_LOGITS if self.chunked is None else self.chunked
        if chunked:
            rows = self.transform(h).flatten(0, -2), self.proj.weight, self.proj.bias, target.flatten()
            return linear_cross_entropy(*rows, epsilon).view(target.shape)
        logits = self._logits(h).flatten(0, -2)
        loss = F.cross_entropy(logits, target.flatten(), reduction="none", label_smoothing=epsilon)
        return loss.view(target.shape)

    def tie(self, embedding: nn.Module) -> None:
        """Share the matrix of a `torch.nn.Embedding`: see `Head.tie`."""
        if not isinstance(embedding, nn.Embedding):
            raise ValueError(
                f"CategoricalHead can be tied only to a torch.nn.Embedding, not to {type(embedding).__name__}"
            )
        of_head, of_embedding = tuple(self.proj.weight.shape), tuple(embedding.weight.shape)
        if of_head != of_embedding:
            raise ValueError(
                f"the head's matrix is {of_head} (n_levels, d_model) and the embedding's {of_embedding}: to tie them, "
                "use a backbone whose d_input equals its d_model, and the same number of levels for both"
            )
        self.proj.weight = embedding.weight


class MixtureOfLogisticsHead(Head):
    """K logistics over the levels, placed evenly on [−1, 1] (Salimans et al. 2017, equation 2).

        p(level) = Σ_k π_k [σ((x + ½w − μ_k) / s_k) − σ((x − ½w − μ_k) / s_k)],  x = 2 level / (n_levels − 1) − 1

    with bins of width w = 2 / (n_levels − 1), of which the outermost reach to ±∞, so the probabilities sum to 1. Each
    dimension has its own mixture, and colours are not coupled, as in Katharopoulos et al. 2020. Neighbouring levels
    have similar probabilities by construction; a categorical head has to learn this.

    Args:
        d_model: Width of the hidden state.
        n_levels: Number of values.
        n_mixtures: K.
    """

    MIN_LOG_SCALE = -7.0

    def __init__(self, d_model: int, n_levels: int, n_mixtures: int = 10) -> None:
        super().__init__(d_model, n_levels)
        at_least(1, n_mixtures=n_mixtures)
        self.proj = nn.Linear(d_model, 3 * n_mixtures)

    def log_probs(self, h: Tensor) -> Tensor:
        """See `Head.log_probs`: (…, d_model) -> (…, n_levels)."""
        return self._log_prob(h[..., None, :], torch.arange(self.n_levels, device=h.device))

    def nll(self, h: Tensor, target: Tensor) -> Tensor:
        """See `Head.nll`. Only the target's bin is computed."""
        return -self._log_prob(h, target)

    def _log_prob(self, h: Tensor, level: Tensor) -> Tensor:
        """Return log p(level): (…, d_model) and (…) integers that broadcast -> (…)."""
        out = self.proj(h)
        out = out.to(accumulator(out.dtype))
        logit, mean, log_scale = out.chunk(3, dim=-1)  # (…, K)
        with torch.autocast(h.device.type, enabled=False):
            log_scale = log_scale.clamp(min=self.MIN_LOG_SCALE)
            inverse = torch.exp(-log_scale)
            half = 1 / (self.n_levels - 1)
            width = 2 * half * inverse  # of a bin, in scales; log(1 − e^{−width}) is log(width) where it is tiny
            x = level[..., None].to(out.dtype) * (2 * half) - 1
            upper = (x + half - mean) * inverse
            lower = (x - half - mean) * inverse
            # σ(u) − σ(l) = σ(u) σ(−l) (1 − e^{l−u}) avoids a difference of nearly equal numbers. In the outermost bins
            # one border is infinite, so its factor and the last one are 1.
            first, last = level[..., None] == 0, level[..., None] == self.n_levels - 1
            bins = (
                F.logsigmoid(upper).masked_fill(last, 0)
                + F.logsigmoid(-lower).masked_fill(first, 0)
                + torch.where(
                    width > _TINY,
                    torch.log(-torch.expm1(-width.clamp(min=_TINY))),
                    math.log(2 * half) - log_scale,
                ).masked_fill(first | last, 0)
            )
            return torch.logsumexp(logit.log_softmax(-1) + bins, -1)


HeadFactory = Callable[[int, int], Head]
"""Makes a head from the width of the hidden state and the number of levels."""
