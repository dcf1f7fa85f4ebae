"""Speculative decoding: a draft proposes tokens, which the model verifies in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_effattn.checks import at_least
from lit_effattn.generation.drafts import Draft, Proposal, Reader, distributions, taken
from lit_effattn.generation.sampling import (
    AS_TRAINED,
    Sampling,
    SamplingOptions,
    _random_stream,
    check_causal,
    check_prompt,
    first_state,
    inverted,
)
from lit_effattn.nn.heads import Head
from lit_effattn.sequence import SequenceModule, State, donated

if TYPE_CHECKING:
    from typing_extensions import Unpack

N_DRAFT = 4
"""The default number of tokens that a draft proposes."""

_MOST_AGAIN = 8
"""Verified tokens that a call reads again, at most. Above, one more call makes the state after them."""


class Speculated(NamedTuple):
    """The result of `speculate`.

    Attributes:
        tokens: (B, n_tokens), the tokens drawn.
        calls: Number of calls of the model, that of the prompt included.
        proposed: (B,), number of tokens that the draft proposed.
        accepted: (B,), number of these that were accepted.
    """

    tokens: Tensor
    calls: int
    proposed: Tensor
    accepted: Tensor


@torch.no_grad()
def speculate(
    backbone: SequenceModule,
    embed: Callable[[Tensor], Tensor],
    head: Head,
    prompt: Tensor,
    n_tokens: int,
    draft: Draft,
    *,
    n_draft: int = N_DRAFT,
    sampling: Sampling = AS_TRAINED,
    state: State | None = None,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    on_tokens: Callable[[Tensor], None] | None = None,
    **options: Unpack[SamplingOptions],
) -> Speculated:
    """Continue `prompt` by `n_tokens` tokens, with fewer calls of the model than tokens.

        accept d_i with probability min(1, p_i(d_i) / q_i(d_i)),  at the first rejection draw from max(0, p_i − q_i)

    Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2. The draft draws d_1 … d_k from q_1 … q_k. The
    model computes its distributions p_1 … p_{k+1} in one call. If it accepts all, it draws one more from p_{k+1}. All
    distributions are those after temperature, top_k and top_p. The tokens therefore have the distribution of `generate`
    for any draft, and with temperature 0 they are the same (up to rounding, where two tokens are equally likely). The
    draws of a seed are others than `generate`'s. They do not depend on the other rows.

    A call leaves the state before the draft as it is. If all rows accept all tokens, the state after the call is the
    next one. Otherwise the next call reads the accepted tokens again from the kept state, together with the next draft.
    Thus every kind of state is supported.

    Args:
        backbone: As in `generate`.
        embed: As in `generate`.
        head: As in `generate`.
        prompt: (B, P) tokens, P at least 1.
        n_tokens: Number of tokens to draw.
        draft: Proposes tokens.
        n_draft: Number of tokens to propose for a call, k.
        sampling: Options of sampling. `compile` is not supported.
        state: As in `generate`. The draft does not see it.
        progress: As in `generate`.
        on_tokens: As in `generate`. Tokens are passed on once all rows have them.
        options: As in `generate`.

    Raises:
        ValueError: If the backbone is not causal, or an option is out of range.
    """
    sampling = replace(sampling, **options)
    check_causal(backbone)
    check_prompt(prompt)
    at_least(0, n_tokens=n_tokens)
    at_least(1, n_draft=n_draft)
    n_draft = min(n_draft, max(n_tokens, 1))
    if sampling.compile:
        raise ValueError("compile=True does not support a draft, whose calls have other lengths; leave out one of them")
    rows, begin = prompt.shape
    total, device = begin + n_tokens, prompt.device
    uniform = torch.stack([_random_stream(sampling.seed, i, 3 * n_tokens) for i in range(rows)])
    uniform = uniform.view(rows, n_tokens, 3).to(device)
    tokens = F.pad(prompt, (0, n_tokens + n_draft + 1))
    length = torch.full((rows,), begin, device=device)
    proposed, accepted, columns = torch.zeros_like(length), torch.zeros_like(length), torch.arange(n_draft + 1)
    columns = columns.to(device)
    model = Reader(backbone, embed, first_state(backbone, state, rows, total), rows)
    propose, most = draft.begin(rows, total, sampling), torch.zeros_like(length)
    with ExitStack() as after_prompt:
        for step in progress(range(n_tokens)):
            while int(length.min()) <= begin + step:
                # (B, k + 1, 3), for the draft, for accepting and for drawing. No token depends on those of another.
                u = taken(uniform, length[:, None] - begin + columns)
                if int(most.max()) > 0:
                    proposal = propose(tokens, length, most, u[..., 0])
                else:
                    proposal = Proposal(tokens[:, :0], most)
                k = proposal.tokens.size(1)
                place = length[:, None] + columns[: k + 1]
                tokens.scatter_(1, place[:, :k], proposal.tokens)
                going = length < total
                until = torch.where(going, length + proposal.counts, model.read)
                commits = not proposal.counts.any()
                with donated() if commits else nullcontext():
                    y, after = model(tokens, until)
                if model.calls == 1:
                    after_prompt.enter_context(_stepwise(backbone))
                h = taken(y, length[:, None] - model.read[:, None] - 1 + columns[: k + 1])
                count, token = verified(distributions(head, h, sampling), proposal, u[:, : k + 1])
                tokens.scatter_(1, length[:, None] + count[:, None], token[:, None])
                proposed += proposal.counts
                accepted += count
                if torch.equal(count, proposal.counts):
                    model.state, model.read = after, until
                length = torch.where(going, length + count + 1, length)
                until = torch.where(length < total, length - 1, model.read)
                if int((until - model.read).max()) > _MOST_AGAIN:
                    with donated():
                        _, model.state = model(tokens, until)
                    model.read = until
                most = (total - length - 1).clamp(0, n_draft)
            if on_tokens is not None:
                on_tokens(tokens[:, begin + step])
    return Speculated(tokens[:, begin:total].clone(), model.calls, proposed, accepted)


def verified(p: Tensor, proposal: Proposal, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the first tokens of a proposal, and draw the one after them.

    Args:
        p: (B, K + 1, L), the model's distributions at the proposed tokens and after the last.
        proposal: The proposal.
        uniform: (B, K + 1, 3) numbers in [0, 1). The second of each place accepts, the third draws.

    Returns:
        Numbers of accepted tokens (B,), and the tokens after them (B,).
    """
    d, counts, q = proposal
    k = d.size(1)
    q = F.one_hot(d, p.size(-1)).double() if q is None else q  # (B, K, L)
    is_proposed = torch.arange(k, device=d.device) < counts[:, None]
    of_p, of_q = (t[:, :k].gather(-1, d[..., None])[..., 0] for t in (p, q))
    accepts = (uniform[:, :k, 1] * of_q < of_p) & is_proposed
    count = accepts.long().cumprod(1).sum(1)
    q = F.pad(q * is_proposed[..., None], (0, 0, 0, 1))  # 0 after the last: the rest is then p itself
    of_p, of_q, u = (taken(t, count[:, None])[:, 0] for t in (p, q, uniform))
    rest = (of_p - of_q).clamp(min=0)  # (B, L)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, of_p)  # p and q are equal up to rounding
    return count, inverted(rest, u[:, 2])


@contextmanager
def _stepwise(backbone: SequenceModule) -> Iterator[None]:
    """Let a position see what it sees when positions are read one by one: see `TransformerXLAttention.stepwise`."""
    modules: list[Any] = [m for m in backbone.modules() if getattr(m, "depends_on_split", False)]
    for module in modules:
        module.stepwise = True
    try:
        yield
    finally:
        for module in modules:
            module.stepwise = False
