"""Drafts of speculative decoding, which propose tokens: a smaller model, or the n-grams of the text."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lit_effattn.checks import at_least
from lit_effattn.generation.sampling import Sampling, check_causal, inverted, reshaped
from lit_effattn.nn.heads import Head
from lit_effattn.sequence import SequenceModule, State, donated


class Proposal(NamedTuple):
    """Tokens that may follow the text of each row.

    Attributes:
        tokens: (B, K).
        counts: (B,), how many of them are proposed.
        probabilities: (B, K, L) float64, the distributions that they were drawn from; None: they were not drawn.
    """

    tokens: Tensor
    counts: Tensor
    probabilities: Tensor | None = None


Propose = Callable[[Tensor, Tensor, Tensor, Tensor], Proposal]
"""Proposes tokens from the texts (B, T), their lengths (B,), the largest counts (B,) and uniform numbers (B, K)."""


class Draft(Protocol):
    """Proposes tokens: `DraftModel`, or `NGrams`."""

    def begin(self, rows: int, room: int, sampling: Sampling) -> Propose:
        """Return what proposes tokens for new texts.

        Args:
            rows: Number of texts.
            room: Largest number of tokens of a text.
            sampling: Options of sampling.
        """


@dataclass(frozen=True)
class NGrams:
    """Proposes what followed the last tokens of a text at their latest earlier place in it (prompt lookup).

    Args:
        shortest: Least number of tokens that the two places have in common.
        longest: Number of tokens that are compared. The place with the most in common is taken.
    """

    shortest: int = 3
    longest: int = 16

    def __post_init__(self) -> None:
        """Check the options."""
        at_least(1, shortest=self.shortest)
        at_least(self.shortest, longest=self.longest)

    def begin(self, rows: int, room: int, sampling: Sampling) -> Propose:
        """See `Draft.begin`."""
        return self._propose

    def _propose(self, tokens: Tensor, length: Tensor, most: Tensor, uniform: Tensor) -> Proposal:
        proposed, counts = torch.zeros(len(tokens), int(most.max()), dtype=torch.long), torch.zeros_like(most)
        texts = tokens.cpu().numpy()  # faster than tensors of so few numbers
        for i, (n, k) in enumerate(zip(length.tolist(), most.tolist(), strict=True)):
            after = self._after(texts[i, :n], k)
            proposed[i, : len(after)], counts[i] = torch.from_numpy(after), len(after)
        return Proposal(proposed.to(tokens.device), counts)

    def _after(self, text: np.ndarray, k: int) -> np.ndarray:
        """Return the k tokens after the latest place, repeated if it overlaps the end; none if there is no place."""
        ends, common = np.flatnonzero(text[:-1] == text[-1:]) + 1, 1
        while common < self.longest:
            longer = ends[ends > common]
            longer = longer[text[longer - common - 1] == text[-common - 1]] if len(longer) else longer
            if not len(longer):
                break
            ends, common = longer, common + 1
        if common < self.shortest or not len(ends):
            return text[:0]
        return text[ends[-1] + np.arange(k) % (len(text) - ends[-1])]


class DraftModel(NamedTuple):
    """A smaller model of the same tokens; the arguments are those of `generate`. It draws with the same options."""

    backbone: SequenceModule
    embed: Callable[[Tensor], Tensor]
    head: Head

    def begin(self, rows: int, room: int, sampling: Sampling) -> Propose:
        """See `Draft.begin`."""
        check_causal(self.backbone)
        reader = Reader(self.backbone, self.embed, self.backbone.initial_state(rows, max_len=room), rows)

        def propose(tokens: Tensor, length: Tensor, most: Tensor, uniform: Tensor) -> Proposal:
            k, first = int(most.max()), length - reader.read - 1
            with donated():
                y, state = reader(tokens, torch.where(most > 0, length, reader.read))
            reader.state, reader.read = state, torch.where(most > 0, length, reader.read)
            h = taken(y, first[:, None])[:, 0]  # (B, d_model)
            drawn: list[Tensor] = []
            q: list[Tensor] = []
            for i in range(k):
                if i:
                    counts = None if (most > i).all() else (most > i).long()
                    with donated() if i > 1 else nullcontext():
                        y, state = self.backbone(self.embed(drawn[-1][:, None]), state, counts)
                    h = y[:, 0]
                q.append(distributions(self.head, h, sampling))
                drawn.append(inverted(q[-1], uniform[:, i]))
            return Proposal(torch.stack(drawn, 1), most, torch.stack(q, 1))

        return propose


class Reader:
    """A model, its state, and the number of tokens of each row that the state has read."""

    def __init__(self, backbone: SequenceModule, embed: Callable[[Tensor], Tensor], state: State, rows: int) -> None:
        self._backbone, self._embed, self.state, self.calls = backbone, embed, state, 0
        self.read = torch.zeros(rows, dtype=torch.long, device=next(backbone.parameters()).device)

    def __call__(self, tokens: Tensor, until: Tensor) -> tuple[Tensor, State]:
        """Read `tokens` (B, T) from the state on, as far as `until` (B,). The state is not replaced."""
        counts = until - self.read
        n = max(1, int(counts.max()))
        x = taken(tokens, self.read[:, None] + torch.arange(n, device=tokens.device))
        self.calls += 1
        y, state = self._backbone(self._embed(x), self.state, None if (counts == n).all() else counts)
        return y, state


def taken(t: Tensor, index: Tensor) -> Tensor:
    """Return the entries `index` (B, K) of `t` (B, M, …), the nearest where there is none: (B, K, …)."""
    index = index.clamp(0, t.size(1) - 1)
    return t.gather(1, index.view(*index.shape, *[1] * (t.dim() - 2)).expand(*index.shape, *t.shape[2:]))


def distributions(head: Head, h: Tensor, sampling: Sampling) -> Tensor:
    """Return the distributions (…, L), in float64, after temperature, top_k and top_p."""
    p = reshaped(head.log_probs(h), sampling.temperature, sampling.top_k, sampling.top_p)
    return p / p.sum(-1, keepdim=True)
