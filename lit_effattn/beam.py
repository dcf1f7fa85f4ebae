"""Beam search with any causal `SequenceModule`: the likeliest continuations of a prompt, found with its state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lit_effattn.generation import first_state
from lit_effattn.nn.heads import Head
from lit_effattn.sequence import SequenceModule, State, donated, reads_values, reorder, select

LENGTH_PENALTY = 0.6
"""The default α (Vaswani et al. 2017, section 6.1)."""

_STEPS_BETWEEN_READS = 8
"""How often a GPU is asked whether all searches are over. Each time, the CPU waits for it."""


class Hypotheses(NamedTuple):
    """The best continuations of each prompt, the best first.

    Where fewer than n_best continuations have a probability above 0, the rest have length 0 and score −∞.

    Attributes:
        tokens: (B, n_best, max_len), the end token included; after it, padding: the end token again, or 0 without one.
        lengths: (B, n_best), the number of tokens, the end token included.
        scores: (B, n_best) float64, log P(Y) / lp(Y).
        log_probs: (B, n_best) float64, log P(Y) in nats.
    """

    tokens: Tensor
    lengths: Tensor
    scores: Tensor
    log_probs: Tensor


def check_beam(beam: int, n_best: int, length_penalty: float) -> None:
    """Check that the settings define a search.

    Raises:
        ValueError: A setting is out of range. The message names it and its value.
    """
    if beam < 1:
        raise ValueError(f"beam={beam} holds no hypothesis; give at least 1, which is greedy search")
    if not 1 <= n_best <= beam:
        raise ValueError(f"n_best={n_best} must be from 1 to beam={beam}, the number of hypotheses")
    if not 0 <= length_penalty < math.inf:
        raise ValueError(f"length_penalty={length_penalty} must be finite and at least 0; 0 compares log-probabilities")


@torch.no_grad()
def beam_search(
    backbone: SequenceModule,
    embed: Callable[[Tensor], Tensor],
    head: Head,
    prompt: Tensor,
    max_len: int | Tensor,
    *,
    beam: int,
    end: int | None = None,
    length_penalty: float = LENGTH_PENALTY,
    n_best: int = 1,
    state: State | None = None,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Hypotheses:
    """Search for the continuations Y of `prompt` X with the highest score.

        s(Y) = log P(Y | X) / lp(Y),  lp(Y) = ((5 + |Y|) / 6)^α         Wu et al. 2016, equation 14, without coverage

    |Y| is the number of tokens of the continuation, its end token included. A continuation ends with its first end
    token, or without one after `max_len` tokens.

    Each prompt has `beam` slots. A hypothesis that ends keeps its slot; the other slots are filled at each step by the
    likeliest extensions of the hypotheses that go on. A beam of 1 is therefore greedy search. A beam of at least
    V^(max_len − 1), for V tokens, is exhaustive: it finds the (V − 1)^(max_len − 1) best continuations.

    As α ≥ 0, a hypothesis can at best reach log P / lp(max_len). The search for a prompt stops when its `n_best`-th
    best ended hypothesis has at least the score that the others can reach, so stopping changes no result. The result
    for a prompt does not depend on the other prompts.

    All kinds of state work. The rows of the state are reordered with `sequence.reorder`, which copies it at every step,
    except for the source of a decoder.

    Args:
        backbone: Causal; see `SequenceModule`.
        embed: (B, N) tokens -> (B, N, backbone.d_input).
        head: Maps the backbone's output to a distribution.
        prompt: (B, P) tokens, P at least 1.
        max_len: Most tokens of a continuation; or (B,) integers, that of each prompt.
        beam: Number of slots of each prompt, k.
        end: The token that ends a continuation; None: all have `max_len` tokens.
        length_penalty: α; 0: none. Higher values favour longer continuations.
        n_best: Number of continuations to return, at most `beam`.
        state: The state of B rows from which the prompt is read, such as a decoder's with a source; it is not changed.
            Best made with `max_len`; then it is grown if it has too little room. None: no earlier positions.
        progress: Wraps the iterable of steps (rich's or tqdm's `track`). The search may end before the last.

    Returns:
        The continuations, without the prompt.

    Raises:
        ValueError: The backbone is not causal, or an argument is out of range.
    """
    check_beam(beam, n_best, length_penalty)
    limits = torch.as_tensor(max_len, device=prompt.device).expand(len(prompt))  # (B,)
    _check(backbone, head, prompt, limits, end)
    longest = int(limits.max())
    state = first_state(backbone, state, len(prompt), prompt.size(1) + longest - 1)
    y, state = backbone(embed(prompt), state)
    first = torch.arange(len(prompt), device=prompt.device)
    rows = first.repeat_interleave(beam)
    state = select(state, rows)  # a copy, which can be donated
    log_probs = head.log_probs(y[:, -1])[rows]  # (B, V) -> (B·k, V)
    slots = _Slots.start(len(prompt), beam, longest, 0 if end is None else end, prompt.device)
    for step in progress(range(longest)):
        slots, source = _extend(slots, log_probs.view(len(prompt), beam, -1), step, end, limits)
        slots = _stop(slots, limits, length_penalty, n_best)
        if step + 1 == longest or _all_stopped(slots, step):
            break
        if beam > 1:
            state = reorder(state, (beam * first[:, None] + source).flatten())
        with donated():
            y, state = backbone(embed(slots.tokens[:, :, step].reshape(-1, 1)), state)
        log_probs = head.log_probs(y[:, -1])  # (B·k, V)
    return _ranked(slots, length_penalty, n_best)


def _check(backbone: SequenceModule, head: Head, prompt: Tensor, limits: Tensor, end: int | None) -> None:
    if not backbone.causal:
        raise ValueError(
            f"{type(backbone).__name__} has causal=False, so it sees the future and can't generate; use causal=True"
        )
    if prompt.dim() != 2 or prompt.size(1) == 0:
        raise ValueError(f"prompt has shape {tuple(prompt.shape)}; expected (batch, length) and at least one token")
    if limits.min() < 1:
        raise ValueError(f"max_len={int(limits.min())}; a continuation has at least one token")
    if end is not None and not 0 <= end < head.n_levels:
        raise ValueError(f"end={end} is not a token of the model: 0 … {head.n_levels - 1}")


class _Slots(NamedTuple):
    """The hypotheses of each prompt. A slot with log-probability −∞ has none."""

    tokens: Tensor  # (B, k, max_len), padded
    lengths: Tensor  # (B, k)
    log_probs: Tensor  # (B, k), float64
    ended: Tensor  # (B, k)
    padding: int

    @classmethod
    def start(cls, prompts: int, beam: int, max_len: int, padding: int, device: torch.device) -> _Slots:
        """Return one hypothesis without tokens for each prompt."""
        tokens = torch.full((prompts, beam, max_len), padding, device=device)
        log_probs = torch.full((prompts, beam), -math.inf, dtype=torch.float64, device=device)
        log_probs[:, 0] = 0
        lengths = torch.zeros_like(log_probs, dtype=torch.long)
        return cls(tokens, lengths, log_probs, torch.zeros_like(lengths, dtype=torch.bool), padding)

    def scores(self, length_penalty: float) -> Tensor:
        """Return the score of each hypothesis, (B, k)."""
        return self.log_probs / _lp(self.lengths, length_penalty)

    def of_live(self) -> Tensor:
        """Return the log-probabilities, −∞ for those that have ended: (B, k)."""
        return self.log_probs.masked_fill(self.ended, -math.inf)


def _lp(lengths: Tensor, length_penalty: float) -> Tensor:
    return ((5 + lengths.double()) / 6) ** length_penalty


def _extend(slots: _Slots, log_probs: Tensor, step: int, end: int | None, limits: Tensor) -> tuple[_Slots, Tensor]:
    """Extend the hypotheses by one token, given the log-probabilities of all tokens after each, (B, k, V).

    Those with as many tokens as `limits` (B,) says end.

    Returns:
        The new hypotheses, and (B, k), the slot that each one's state is in.
    """
    beam, ended = slots.ended.size(1), slots.ended
    most = min(beam, log_probs.size(-1))
    log_probs, tokens = log_probs.topk(most)  # (B, k, V) -> (B, k, m): of each hypothesis at most k extensions survive
    totals = (slots.of_live()[..., None] + log_probs.double()).flatten(1)  # (B, k·m)
    likeliest, index = totals.topk(beam)  # (B, k)
    rank = ((~ended).cumsum(1) - 1).clamp(min=0)  # the i-th open slot takes the i-th likeliest extension
    likeliest, index = likeliest.gather(1, rank), index.gather(1, rank)
    source = torch.where(ended, torch.arange(beam, device=ended.device), index // most)
    token = tokens.flatten(1).gather(1, index).masked_fill(ended, slots.padding)
    total = torch.where(ended, slots.log_probs, likeliest)
    after = slots.tokens.gather(1, source[..., None].expand_as(slots.tokens))
    after[:, :, step] = token
    lengths = torch.where(ended, slots.lengths, step + 1)
    ends = (limits == step + 1)[:, None] if end is None else (limits == step + 1)[:, None] | (token == end)
    ended = ended | ends & (total > -math.inf)
    return _Slots(after, lengths, total, ended, slots.padding), source


def _stop(slots: _Slots, limits: Tensor, length_penalty: float, n_best: int) -> _Slots:
    """Drop the live hypotheses of the prompts where none can surpass the n_best-th best that has ended."""
    attainable = slots.of_live().amax(1) / _lp(limits, length_penalty)  # (B,)
    ended = slots.scores(length_penalty).masked_fill(~slots.ended, -math.inf)
    stopped = ended.topk(n_best).values[:, -1] >= attainable
    return slots._replace(log_probs=slots.log_probs.masked_fill(stopped[:, None] & ~slots.ended, -math.inf))


def _all_stopped(slots: _Slots, step: int) -> bool:
    """Whether no hypothesis goes on. On a GPU, False at most steps: going on changes nothing, and asking is slow."""
    if not reads_values(slots.log_probs) and (step + 1) % _STEPS_BETWEEN_READS:
        return False
    return bool(slots.of_live().isneginf().all())


def _ranked(slots: _Slots, length_penalty: float, n_best: int) -> Hypotheses:
    scores, order = slots.scores(length_penalty).sort(dim=1, descending=True, stable=True)
    scores, order = scores[:, :n_best], order[:, :n_best]
    none = scores.isneginf()
    tokens = slots.tokens.gather(1, order[..., None].expand(-1, -1, slots.tokens.size(2)))
    return Hypotheses(
        tokens.masked_fill(none[..., None], slots.padding),
        slots.lengths.gather(1, order).masked_fill(none, 0),
        scores,
        slots.log_probs.gather(1, order),
    )
