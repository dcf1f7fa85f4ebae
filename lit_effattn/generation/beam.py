"""Beam search with any causal `SequenceModule`: the likeliest continuations of a prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lit_effattn.checks import at_least, one_of
from lit_effattn.generation.compiled import Steps
from lit_effattn.generation.sampling import check_causal, check_log_probs, check_prompt, first_state
from lit_effattn.nn.heads import Head
from lit_effattn.sequence import SequenceModule, State, reads_values, reorder, select

LENGTH_PENALTY = 0.6
"""The default α (Vaswani et al. 2017, section 6.1)."""

LengthNorm = Literal["gnmt", "average"]
"""Normalisation of log P by the length: see `beam_search`."""

_STEPS_BETWEEN_READS = 8
"""Number of steps on a GPU between checks whether all searches are over. At each check the CPU waits for the GPU."""


class Hypotheses(NamedTuple):
    """The best continuations of each prompt, in order of decreasing score.

    If fewer than n_best continuations have a probability above 0, the rest have length 0 and score −∞.

    Attributes:
        tokens: (B, n_best, max_len), the end token included, padded with the end token, or with 0 if there is none.
        lengths: (B, n_best), number of tokens, the end token included.
        scores: (B, n_best) float64, log P(Y) / lp(|Y|).
        log_probs: (B, n_best) float64, log P(Y) in nats.
    """

    tokens: Tensor
    lengths: Tensor
    scores: Tensor
    log_probs: Tensor


def check_beam(beam: int, n_best: int, length_penalty: float, length_norm: str = "gnmt") -> None:
    """Check the options of a search: see `beam_search`.

    Args:
        beam: At least 1.
        n_best: From 1 to `beam`.
        length_penalty: Finite and at least 0.
        length_norm: gnmt or average.

    Raises:
        ValueError: If an option is out of range.
    """
    at_least(1, beam=beam)
    if not 1 <= n_best <= beam:
        raise ValueError(f"n_best={n_best} must be from 1 to beam={beam}, the number of hypotheses")
    if not 0 <= length_penalty < math.inf:
        raise ValueError(f"length_penalty={length_penalty} must be finite and at least 0; 0 compares log-probabilities")
    one_of(LengthNorm, length_norm=length_norm)


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
    length_norm: LengthNorm = "gnmt",
    n_best: int = 1,
    state: State | None = None,
    compile: bool = False,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Hypotheses:
    """Search for the continuations Y of `prompt` X with the highest score.

        s(Y) = log P(Y | X) / lp(|Y|)

        gnmt:     lp(n) = ((5 + n) / 6)^α               Wu et al. 2016, equation 14, without coverage; OpenNMT's "wu"
        average:  lp(n) = n^α                           fairseq's `lenpen`, transformers' `length_penalty`

    |Y| is the number of tokens of the continuation, its end token included. A continuation ends with its first end
    token, or without one after `max_len` tokens.

    Each prompt has k = `beam` live hypotheses, and a heap of the k best finished ones. A step considers the 2 k
    likeliest extensions of the live hypotheses. Those that end among the first k go to the heap. The k likeliest that
    do not end are the next live hypotheses. This is the search of fairseq and transformers. With k = 1 a step considers
    only the likeliest extension: greedy search. With V tokens, a beam of at least V (V − 1)^(max_len − 1) is
    exhaustive.

    As α ≥ 0, a hypothesis can at best reach log P / lp(max_len). The search for a prompt stops when its `n_best`-th
    best finished hypothesis has at least the score that the live ones can reach, so stopping does not change results.
    The result for a prompt does not depend on the other prompts.

    All kinds of state are supported. Every step reorders the rows with `sequence.reorder`, which copies the state,
    except for a decoder's source.

    Args:
        backbone: Causal; see `SequenceModule`.
        embed: (B, N) tokens -> (B, N, backbone.d_input).
        head: Maps the backbone's output to a distribution.
        prompt: (B, P) tokens, P at least 1.
        max_len: Maximum number of tokens of a continuation, or (B,) integers, one for each prompt.
        beam: Number of live hypotheses of each prompt, k.
        end: The token that ends a continuation; None: all have `max_len` tokens.
        length_penalty: α; 0: none. Higher values favour longer continuations.
        length_norm: gnmt or average: see above. With α = 1, average is the mean log-probability of a token.
        n_best: Number of continuations to return, at most `beam`.
        state: The state of B rows before the prompt, such as a decoder's with a source; it is not changed. A state made
            with `max_len` is grown if it has too little room. None: no earlier positions.
        compile: Whether the steps are compiled: see `generate`.
        progress: Wraps the iterable of steps (rich's or tqdm's `track`). The search may end before the last step.

    Returns:
        The continuations, without the prompt.

    Raises:
        ValueError: If the backbone is not causal, an argument is out of range, or the step can't be compiled with this
            state.
    """
    check_beam(beam, n_best, length_penalty, length_norm)
    check_prompt(prompt)
    limits = torch.as_tensor(max_len, device=prompt.device).expand(len(prompt))  # (B,)
    _check(backbone, head, limits, end)
    penalty = _LengthPenalty(length_penalty, length_norm)
    longest = int(limits.max())
    state = first_state(backbone, state, len(prompt), prompt.size(1) + longest - 1)
    y, state = backbone(embed(prompt), state)
    first = torch.arange(len(prompt), device=prompt.device)
    rows = first.repeat_interleave(beam)
    state = select(state, rows)  # a copy, which can be donated
    log_probs = head.log_probs(y[:, -1])[rows]  # (B, V) -> (B·k, V)
    padding = 0 if end is None else end
    steps = Steps(backbone, embed, head, device=prompt.device, compile=compile)
    live, finished = _begin(len(prompt), beam, longest, padding, prompt.device)
    for step in progress(range(longest)):
        check_log_probs(log_probs)
        candidates = log_probs.view(len(prompt), beam, -1)
        live, source, finished = _extend(live, finished, candidates, step, end, limits, penalty)
        live = _stop(live, finished, limits, penalty, n_best)
        if step + 1 == longest or _all_stopped(live, step):
            break
        if beam > 1:
            state = reorder(state, (beam * first[:, None] + source).flatten())
        log_probs, state = steps(live.tokens[:, :, step].reshape(-1, 1), state)  # (B·k, V)
    tokens, lengths, scores, log_probs = (t[:, :n_best] for t in finished)
    return Hypotheses(tokens.masked_fill((lengths == 0)[..., None], padding), lengths, scores, log_probs)


def _check(backbone: SequenceModule, head: Head, limits: Tensor, end: int | None) -> None:
    check_causal(backbone)
    at_least(1, max_len=int(limits.min()))
    if end is not None and not 0 <= end < head.n_levels:
        raise ValueError(f"end={end} is not a token of the model: 0 … {head.n_levels - 1}")


class _LengthPenalty(NamedTuple):
    """lp, by which log P is divided."""

    alpha: float
    norm: LengthNorm

    def __call__(self, lengths: Tensor) -> Tensor:
        """Return lp of numbers of tokens, in float64."""
        n = lengths.double()
        return ((5 + n) / 6 if self.norm == "gnmt" else n) ** self.alpha


class _Live(NamedTuple):
    """The live hypotheses of each prompt. A log-probability of −∞ marks an absent one."""

    tokens: Tensor  # (B, k, max_len), padded
    log_probs: Tensor  # (B, k), float64


def _begin(prompts: int, beam: int, max_len: int, padding: int, device: torch.device) -> tuple[_Live, Hypotheses]:
    """Return one live hypothesis without tokens for each prompt, and no finished one."""
    tokens = torch.full((prompts, beam, max_len), padding, device=device)
    absent = torch.full((prompts, beam), -math.inf, dtype=torch.float64, device=device)
    log_probs = absent.clone()
    log_probs[:, 0] = 0
    return _Live(tokens, log_probs), Hypotheses(tokens, torch.zeros_like(absent, dtype=torch.long), absent, absent)


def _extend(
    live: _Live,
    finished: Hypotheses,
    log_probs: Tensor,
    step: int,
    end: int | None,
    limits: Tensor,
    penalty: _LengthPenalty,
) -> tuple[_Live, Tensor, Hypotheses]:
    """Extend the hypotheses by one token.

    Args:
        live: The live hypotheses.
        finished: The finished hypotheses.
        log_probs: (B, k, V), of all tokens after each live hypothesis.
        step: Number of tokens of the live hypotheses.
        end: The end token.
        limits: (B,), number of tokens at which a hypothesis ends.
        penalty: The length penalty.

    Returns:
        The live hypotheses, the index (B, k) of the former one that each extends, and the finished ones, best first.
    """
    beam = live.log_probs.size(1)
    n_candidates = beam if beam == 1 or end is None else 2 * beam
    m = min(n_candidates, log_probs.size(-1))
    log_probs, tokens = log_probs.topk(m)  # (B, k, V) -> (B, k, m): the candidates are among these
    totals = (live.log_probs[..., None] + log_probs.double()).flatten(1)  # (B, k·m)
    totals, index = totals.topk(min(n_candidates, totals.size(1)))  # (B, c)
    source, token = index // m, tokens.flatten(1).gather(1, index)
    ends = (limits == step + 1)[:, None].expand_as(token)
    if end is not None:
        ends = ends | (token == end)
    new = totals[:, :beam].masked_fill(~ends[:, :beam], -math.inf)
    if not reads_values(new) or not new.isneginf().all():  # on a GPU the check is slower than adding absent ones
        finished = _added(finished, _tokens(live, source[:, :beam], token[:, :beam], step), new, step + 1, penalty)
    totals, order = totals.masked_fill(ends, -math.inf).topk(beam)  # (B, c) -> (B, k)
    source = source.gather(1, order)
    return _Live(_tokens(live, source, token.gather(1, order), step), totals), source, finished


def _tokens(live: _Live, source: Tensor, token: Tensor, step: int) -> Tensor:
    """Return the tokens (B, k, max_len) of the hypotheses `source` (B, k), extended by `token` (B, k)."""
    tokens = live.tokens.gather(1, source[..., None].expand_as(live.tokens))
    tokens[:, :, step] = token
    return tokens


def _added(finished: Hypotheses, tokens: Tensor, log_probs: Tensor, length: int, penalty: _LengthPenalty) -> Hypotheses:
    """Return the k best of the finished hypotheses and k new ones of one length, absent if log_probs (B, k) is −∞."""
    lengths = torch.full_like(finished.lengths, length).masked_fill(log_probs.isneginf(), 0)
    new = Hypotheses(tokens, lengths, log_probs / penalty(torch.full_like(lengths, length)), log_probs)
    tokens, lengths, scores, log_probs = (torch.cat(pair, 1) for pair in zip(finished, new, strict=True))
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    order = order[:, : log_probs.size(1) // 2]
    return Hypotheses(
        tokens.gather(1, order[..., None].expand(-1, -1, tokens.size(2))),
        lengths.gather(1, order),
        scores[:, : order.size(1)],
        log_probs.gather(1, order),
    )


def _stop(live: _Live, finished: Hypotheses, limits: Tensor, penalty: _LengthPenalty, n_best: int) -> _Live:
    """Drop the live hypotheses of prompts where none can surpass the n_best-th best finished one."""
    attainable = live.log_probs[:, 0] / penalty(limits)  # (B,); the likeliest is the first
    stopped = finished.scores[:, n_best - 1] >= attainable
    return live._replace(log_probs=live.log_probs.masked_fill(stopped[:, None], -math.inf))


def _all_stopped(live: _Live, step: int) -> bool:
    """Whether no hypothesis is live. On a GPU, False at most steps, because the check is slow and not needed."""
    if not reads_values(live.log_probs) and (step + 1) % _STEPS_BETWEEN_READS:
        return False
    return bool(live.log_probs.isneginf().all())
