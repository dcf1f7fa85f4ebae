"""Generation for many prompts, in a batch whose rows begin and end at different times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lit_effattn.checks import at_least
from lit_effattn.generation.compiled import Steps
from lit_effattn.generation.prefixes import PrefixCache, Tokens, stops
from lit_effattn.generation.sampling import AS_TRAINED, Sampling, SamplingOptions, _random_stream, check_causal, draw
from lit_effattn.nn.heads import Head
from lit_effattn.sequence import SequenceModule, State, alike, donated, join, select, tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack


@torch.no_grad()
def generate_each(
    backbone: SequenceModule,
    embed: Callable[[Tensor], Tensor],
    head: Head,
    prompts: Sequence[Tensor],
    n_tokens: int | Sequence[int],
    *,
    n: int = 1,
    batch_size: int = 32,
    cache: PrefixCache | None = None,
    sampling: Sampling = AS_TRAINED,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    **options: Unpack[SamplingOptions],
) -> list[Tensor]:
    """Continue each prompt by `n_tokens` tokens, at most `batch_size` samples at a time.

    When a sample has all its tokens, the next one takes its row. A prefix that prompts share is read once if that
    saves more positions than a call costs (`sequence.CALL_COST`). A position of Transformer-XL's attention without
    `same_length` sees all of a call, so prompts are then read as wholes.

    Sample j of prompt i is drawn from the random stream of row i n + j. It is that row of `generate` for rows of that
    prompt (up to rounding), and does not depend on the other prompts or on `batch_size`.

    Args:
        backbone: As in `generate`.
        embed: As in `generate`.
        head: As in `generate`.
        prompts: (P,) tokens each, P at least 1.
        n_tokens: Number of tokens to draw, or one for each prompt.
        n: Number of samples of each prompt.
        batch_size: Largest number of rows.
        cache: Holds the states after shared prefixes, also for later calls. Default: a new one.
        sampling: Options of sampling. With `compile`, steps of the first number of rows are compiled; those of the
            fewer rows at the end only if that saves time.
        progress: Wraps the iterable of samples.
        options: Fields of `Sampling` that replace those of `sampling`.

    Returns:
        For each prompt (n, n_tokens), the tokens drawn.

    Raises:
        ValueError: If the backbone is not causal, or an argument is out of range.
    """
    sampling = replace(sampling, **options)
    limits = [n_tokens] * len(prompts) if isinstance(n_tokens, int) else [*n_tokens]
    _check(backbone, prompts, limits)
    at_least(1, n=n, batch_size=batch_size)
    if not prompts:
        return []
    device, longest = prompts[0].device, max(limits)
    reader = _Reader(backbone, embed, prompts, longest, PrefixCache() if cache is None else cache)
    streams = [_random_stream(sampling.seed, row, longest) for row in range(len(prompts) * n)]
    uniform = torch.stack(streams).view(-1, n, longest).to(device)  # (prompts, n, T)
    drawn = torch.empty(len(prompts), n, longest, dtype=torch.long, device=device)
    how: dict[str, Any] = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}

    def next_tokens(log_probs: Tensor, rows: list[list[int]]) -> Tensor:
        """Draw the next token of each row, (B,), from log_probs (B, L)."""
        prompt, j, t = torch.tensor(rows, device=device).T
        result = draw(log_probs, uniform[prompt, j, t], **how)
        drawn[prompt, j, t] = result
        for row in rows:
            row[2] += 1
        return result

    waiting = deque((i, j) for i in reader.order for j in range(n))
    count = iter(progress(range(len(waiting))))
    rows: list[list[int]] = []  # prompt, number of the sample, tokens drawn so far
    state: State = None
    tokens = drawn.new_empty(0)  # (B,), the last ones
    compiles, steps = sampling.compile, None  # of this number of rows
    while waiting or rows:
        ended = [i for i, (prompt, _, t) in enumerate(rows) if t == limits[prompt]]
        if waiting and (ended or not rows):
            new = [waiting.popleft() for _ in range(min(len(waiting), len(ended) if rows else batch_size))]
            y, entering, order = reader.read([prompt for prompt, _ in new])
            entered = [[*new[i], 0] for i in order]
            first = next_tokens(head.log_probs(y), entered)
            if rows:
                places = torch.tensor(ended[: len(new)], device=device)
                for old, t in zip(tensors((state, tokens)), tensors((entering, first)), strict=True):
                    old.index_copy_(0, places, t)
                for i, row in zip(ended, entered, strict=False):
                    rows[i] = row
            else:
                rows, state, tokens = entered, entering, first
            for _ in new:
                next(count, None)
        elif ended:
            rows = [row for i, row in enumerate(rows) if i not in ended]
            places = torch.tensor([i for i in range(len(tokens)) if i not in ended], dtype=torch.long, device=device)
            state, tokens = select((state, tokens), places)
            compiles, steps = False, None
        else:
            if steps is None:
                left = sum(limits[prompt] for prompt, _ in waiting) // len(rows)
                left += min(limits[prompt] - t for prompt, _, t in rows)
                steps = Steps(backbone, embed, head, device=device, compile=compiles)
            log_probs, state = steps(tokens[:, None], state)
            tokens = next_tokens(log_probs, rows)
    next(count, None)
    return [of_prompt[:, :limit] for of_prompt, limit in zip(drawn, limits, strict=True)]


def _check(backbone: SequenceModule, prompts: Sequence[Tensor], limits: Sequence[int]) -> None:
    check_causal(backbone)
    if len(limits) != len(prompts):
        raise ValueError(f"n_tokens has {len(limits)} numbers for {len(prompts)} prompts; give one, or one for each")
    for prompt, limit in zip(prompts, limits, strict=True):
        at_least(1, n_tokens=limit)
        if prompt.dim() != 1 or len(prompt) == 0:
            raise ValueError(f"a prompt has shape {tuple(prompt.shape)}; expected (length,) and at least one token")


class _Reader:
    """Reads prompts.

    Attributes:
        order: The prompts in the order in which they share most with the one before.
    """

    def __init__(
        self,
        backbone: SequenceModule,
        embed: Callable[[Tensor], Tensor],
        prompts: Sequence[Tensor],
        n_tokens: int,
        cache: PrefixCache,
    ) -> None:
        self._backbone, self._embed, self._prompts, self._cache = backbone, embed, prompts, cache
        cache.max_len = max(cache.max_len, *(len(prompt) + n_tokens for prompt in prompts))
        self._tokens: list[Tokens] = [tuple(prompt.tolist()) for prompt in prompts]
        self.order = sorted(range(len(prompts)), key=self._tokens.__getitem__)
        self._stops: dict[int, list[int]] = {}
        if cache.max_bytes and not any(getattr(module, "depends_on_split", False) for module in backbone.modules()):
            ordered = [self._tokens[i] for i in self.order]
            self._stops = dict(zip(self.order, stops(ordered), strict=True))

    def read(self, prompts: list[int]) -> tuple[Tensor, State, list[int]]:
        """Read prompts as a batch, in another order.

        Returns:
            (B, d_model), the outputs at the last tokens, the state after them, and the place of each row in `prompts`.
        """
        begins = [self._begin(i) for i in prompts]
        sizes = torch.tensor([len(self._tokens[i]) - n for i, (n, _) in zip(prompts, begins, strict=True)])
        outputs, states, order = [], [], list[int]()
        for group in alike(sizes, torch.arange(len(prompts))):
            places = group.tolist()
            rest = [self._prompts[prompts[i]][begins[i][0] :] for i in places]
            state, lengths = join([begins[i][1] for i in places]), sizes[group].to(rest[0].device)
            with donated():
                y, state = self._backbone(self._embed(pad_sequence(rest, batch_first=True)), state, lengths)
            outputs.append(y[torch.arange(len(group), device=y.device), lengths - 1])
            states.append(state)
            order += places
        return torch.cat(outputs), join(states), order

    def _begin(self, i: int) -> tuple[int, State]:
        """Return how much of prompt i is read already, at most all but its last token, and the state after it."""
        tokens, cache = self._tokens[i], self._cache
        n, state = cache.longest(tokens[:-1]) if i in self._stops else (0, None)
        if state is None:
            state = self._backbone.initial_state(1, max_len=cache.max_len)
        state = self._backbone.grow(state, cache.max_len)  # the cache may be of shorter prompts
        for stop in self._stops.get(i, []):
            if stop > n:
                _, state = self._backbone(self._embed(self._prompts[i][None, n:stop]), state)
                n = stop
                cache.add(tokens[:n], state)
        return n, state
