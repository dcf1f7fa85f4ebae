"""Sampling from any causal `SequenceModule` through its state: the prompt once, then one position a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lit_effattn.heads import Head
from lit_effattn.sequence import SequenceModule, donated


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Refuse settings that make no distribution.

    Raises:
        ValueError: names the setting and its value.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature}; 0 takes the likeliest level, 1 samples as trained")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} leaves no level to draw; give at least 1, or leave it out")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} is not a probability above 0 and up to 1")


def draw(
    log_probs: Tensor,
    uniform: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Draw one level a row, by inverting the cumulative distribution at `uniform`.

    Args:
        log_probs: (B, L).
        uniform: (B,) numbers in [0, 1).
        temperature: Divides the log-probabilities; 0 takes the likeliest.
        top_k: Draw among the k likeliest only.
        top_p: Draw among the likeliest whose probabilities add up to p; at least one.

    Returns:
        (B,) integers below L.
    """
    if temperature == 0:
        return log_probs.argmax(-1)
    p = (log_probs.double() / temperature).softmax(-1)
    if top_k is not None or top_p is not None:
        ordered, index = p.sort(dim=-1, descending=True, stable=True)
        if top_k is not None:
            ordered[:, top_k:] = 0
        if top_p is not None:
            likelier = ordered.cumsum(-1) - ordered
            ordered = ordered.masked_fill(likelier >= top_p * ordered.sum(-1, keepdim=True), 0)
        p = torch.zeros_like(p).scatter(-1, index, ordered)
    cumulative = p.cumsum(-1)
    return (cumulative <= uniform[:, None] * cumulative[:, -1:]).sum(-1).clamp(max=p.size(-1) - 1)


@torch.no_grad()
def generate(
    backbone: SequenceModule,
    embed: Callable[[Tensor], Tensor],
    head: Head,
    prompt: Tensor,
    n_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    on_tokens: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Continue `prompt` by `n_tokens` tokens.

    Row i draws from a random stream of its own, made from `seed` and i, so a sample does not depend on how many
    others are drawn beside it, nor on the device.

    Args:
        backbone: Causal; see `SequenceModule`.
        embed: (B, N) tokens -> (B, N, backbone.d_input).
        head: What turns the backbone's output into a distribution.
        prompt: (B, P) tokens, P at least 1.
        n_tokens: How many to draw.
        temperature: See `draw`.
        top_k: See `draw`.
        top_p: See `draw`.
        seed: Of the random streams.
        progress: Wraps the iterable of steps (rich's or tqdm's `track`).
        on_tokens: Is shown each step's tokens (B,) as they are drawn.

    Returns:
        (B, n_tokens), the tokens drawn.

    Raises:
        ValueError: The backbone is not causal, or a setting makes no distribution.
    """
    check_sampling(temperature, top_k, top_p)
    if not backbone.causal:
        raise ValueError(f"{type(backbone).__name__} has causal=False: it sees the future, and can't generate")
    rows, n_prompt = prompt.shape
    uniform = torch.stack([_random_stream(seed, i, n_tokens) for i in range(rows)], 1).to(prompt.device)
    state = backbone.initial_state(rows, max_len=n_prompt + n_tokens)
    drawn = torch.empty(rows, n_tokens, dtype=torch.long, device=prompt.device)
    tokens = prompt
    with donated():
        for step in progress(range(n_tokens)):
            y, state = backbone(embed(tokens), state)
            tokens = draw(head.log_probs(y[:, -1]), uniform[step], temperature=temperature, top_k=top_k, top_p=top_p)[
                :, None
            ]
            drawn[:, step] = tokens[:, 0]
            if on_tokens is not None:
                on_tokens(tokens[:, 0])
    return drawn


def _random_stream(seed: int, row: int, n: int) -> Tensor:
    # Mixed by multiplication with odd constants, so that neither (seed, row) pairs nor neighbouring rows collide.
    mixed = (seed * 0x9E3779B97F4A7C15 + row * 0xD1B54A32D192ED03) % 2**63
    return torch.rand(n, generator=torch.Generator().manual_seed(mixed), dtype=torch.float64)
