"""Sampling from any causal `SequenceModule`: the prompt in one call, then one position per step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lit_effattn.attention.positions import n_positions
from lit_effattn.checks import at_least
from lit_effattn.generation.compiled import Steps, refusal
from lit_effattn.nn.heads import Head
from lit_effattn.ops.runtime.check_inductor import check_inductor
from lit_effattn.sequence import SequenceModule, State, donated, reads_values, reorder, tensors


@dataclass(frozen=True)
class Sampling:
    """Options of sampling.

    Args:
        temperature: Divides the log-probabilities; 0 takes the likeliest token.
        top_k: Draw among the k likeliest tokens only.
        top_p: Draw among the likeliest tokens whose probabilities add up to p; at least one.
        seed: Seed of the random streams; equal seeds draw equal samples.
        compile: Whether the steps are compiled: see `generate`.

    Raises:
        ValueError: If an option is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    compile: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be at least 0 and finite")
        at_least(1, top_k=self.top_k)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")


@dataclass(frozen=True)
class Kept:
    """The end of a generated sequence, from which a later call goes on: see `generate`.

    Args:
        state: The state of B rows after all tokens but `tokens`.
        tokens: (B, P), the tokens that the state has not read: the last one drawn.
        drawn: Number of tokens drawn so far. The rows' random streams go on after them.
    """

    state: State
    tokens: Tensor
    drawn: int


AS_TRAINED = Sampling()
"""The defaults: draw from the model's distribution, with seed 0."""


def draw(
    log_probs: Tensor,
    uniform: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Draw one token per row, by inverting the cumulative distribution at `uniform`.

    Args:
        log_probs: (B, L).
        uniform: (B,) numbers in [0, 1).
        temperature: See `Sampling`.
        top_k: See `Sampling`.
        top_p: See `Sampling`.

    Returns:
        (B,) integers below L.

    Raises:
        ValueError: If a log-probability is NaN. On a GPU this is not checked.
    """
    check_log_probs(log_probs)
    if temperature == 0:
        return log_probs.argmax(-1)
    log_probs = log_probs.double()
    p = ((log_probs - log_probs.amax(-1, keepdim=True)) / temperature).softmax(-1)  # no overflow of any quotient
    if top_k is not None or top_p is not None:
        ordered, index = p.sort(dim=-1, descending=True, stable=True)
        if top_k is not None:
            ordered[..., top_k:] = 0
        if top_p is not None:
            likelier = ordered.cumsum(-1) - ordered
            ordered = ordered.masked_fill(likelier >= top_p * ordered.sum(-1, keepdim=True), 0)
        p = torch.zeros_like(p).scatter(-1, index, ordered)
    cumulative = p.cumsum(-1)
    level = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    return level.squeeze(-1).clamp(max=p.size(-1) - 1)


def check_log_probs(log_probs: Tensor) -> None:
    """Raise ValueError if a log-probability is NaN, where reading it is free."""
    if reads_values(log_probs) and bool(log_probs.isnan().any()):
        raise ValueError("the model's log-probabilities are NaN: its weights or its inputs are not finite")


def check_prompt(prompt: Tensor) -> None:
    """Raise ValueError unless `prompt` is (B, P) with at least one row and one token."""
    if prompt.dim() != 2 or 0 in prompt.shape:
        raise ValueError(
            f"prompt has shape {tuple(prompt.shape)}; expected (batch, length) with at least one row and one token"
        )


@torch.no_grad()
def generate(
    backbone: SequenceModule,
    embed: Callable[[Tensor], Tensor],
    head: Head,
    prompt: Tensor,
    n_tokens: int,
    *,
    lengths: Tensor | None = None,
    streams: Sequence[int] | None = None,
    sampling: Sampling = AS_TRAINED,
    state: State | None = None,
    kept: Kept | None = None,
    keep: Callable[[Kept], None] | None = None,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    on_tokens: Callable[[Tensor], None] | None = None,
    **options: Any,
) -> Tensor:
    """Continue `prompt` by `n_tokens` tokens.

        generate(backbone, embed, head, prompt, 100, temperature=0.8, top_p=0.95, seed=1)

    Row i has its own random stream, seeded by `seed` and i, so a sample depends neither on the number of rows nor on
    the device.

    With `compile` a step is one program without Python between the layers, on CUDA a graph of kernels. The drawn tokens
    are the same up to rounding. A prompt of several tokens is read without it. A compiled step reads all slots of the
    state, also empty ones, so a state that holds all positions starts with little room and grows.

    On the CPU the program is a library of machine code, which is kept: see `generation.compiled`. On CUDA, compiling
    takes up to a minute in each process.

    Args:
        backbone: Causal; see `SequenceModule`.
        embed: (B, N) tokens -> (B, N, backbone.d_input).
        head: Maps the backbone's output to a distribution.
        prompt: (B, P) tokens, P at least 1.
        n_tokens: Number of tokens to draw.
        lengths: (B,), the number of tokens of each row of `prompt`, at least 1; padding follows. None: all.
        streams: The numbers of the rows' random streams. None: 0 … B − 1.
        sampling: Options of sampling.
        state: The state before the prompt, such as a decoder's with a source; it is not changed. A state made with
            `max_len` is grown if it has too little room. None: no earlier positions.
        kept: Go on from here, in place of `state`. `prompt` follows what was drawn, and may have no tokens. Without
            one, and with the same options, two calls draw what a single one draws.
        keep: Called at the end with what a later call takes as `kept`. It is not changed there, so that several
            continuations can begin at it.
        progress: Wraps the iterable of steps (rich's or tqdm's `track`).
        on_tokens: Called with each step's tokens (B,) as they are drawn.
        options: Fields of `Sampling` (`temperature`, `top_k`, `top_p`, `seed`, `compile`) that replace those of
            `sampling`.

    Returns:
        (B, n_tokens), the tokens drawn.

    Raises:
        ValueError: If the backbone is not causal, an argument is out of range, the step can't be compiled with this
            state, or a log-probability is NaN.
    """
    sampling = replace(sampling, **options)
    check_causal(backbone)
    earlier = 0
    if kept is not None:
        if state is not None or len(kept.tokens) != len(prompt):
            given = "state was given too" if state is not None else f"prompt has {len(prompt)} rows"
            raise ValueError(f"kept has {len(kept.tokens)} rows, and {given}; give kept alone, with a prompt for each")
        prompt, state, earlier = torch.cat([kept.tokens, prompt], 1), kept.state, kept.drawn
        lengths = None if lengths is None else lengths + kept.tokens.size(1)
    check_prompt(prompt)
    if lengths is not None and reads_values(lengths) and bool((lengths < 1).any()):
        raise ValueError(f"lengths is {lengths.tolist()}; each row of prompt has at least one token")
    at_least(0 if keep is None else 1, n_tokens=n_tokens)
    on_cpu = _on_cpu(prompt.device)
    if sampling.compile and not on_cpu and BACKEND == "inductor":
        check_inductor("compile=True", prompt.device)
    rows = len(prompt)
    numbers = range(rows) if streams is None else streams
    if len(numbers) != rows:
        raise ValueError(f"streams has {len(numbers)} numbers for {rows} rows of prompt; give one for each")
    uniform = torch.stack([_random_stream(sampling.seed, i, earlier + n_tokens)[earlier:] for i in numbers], 1)
    uniform = uniform.to(prompt.device)
    drawn = torch.empty(rows, n_tokens, dtype=torch.long, device=prompt.device)
    model = _Model(backbone, embed, head, sampling.temperature, sampling.top_k, sampling.top_p)
    steps = (_compiled_steps if sampling.compile else _steps)(model, prompt, lengths, uniform, state)
    for step, (tokens, after) in zip(progress(range(n_tokens)), steps, strict=False):
        drawn[:, step] = tokens
        if on_tokens is not None:
            on_tokens(drawn[:, step])
        if keep is not None and step == n_tokens - 1:
            keep(Kept(after, tokens[:, None].clone(), earlier + n_tokens))
    return drawn


def generate_each(
    backbone: SequenceModule,
    embed: Callable[[Tensor], Tensor],
    head: Head,
    prompts: Sequence[Tensor],
    n_tokens: int | Sequence[int],
    *,
    n: int = 1,
    batch_size: int = 32,
    sampling: Sampling = AS_TRAINED,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    **options: Any,
) -> list[Tensor]:
    """Continue each prompt by `n_tokens` tokens, in padded batches of at most `batch_size` samples.

    Sample j of prompt i is drawn from the random stream of row i n + j. It is that row of `generate` for rows of that
    prompt (up to rounding), and does not depend on the other prompts or on `batch_size`. A batch has samples of similar
    numbers of tokens, none of which would need more positions than the backbone has.

    Args:
        backbone: As in `generate`.
        embed: As in `generate`.
        head: As in `generate`.
        prompts: (P,) tokens each, P at least 1.
        n_tokens: Number of tokens to draw, or one for each prompt.
        n: Number of samples of each prompt.
        batch_size: Largest number of rows.
        sampling: Options of sampling. With `compile`, the steps of the largest batches are compiled.
        progress: Wraps the iterable of batches.
        options: Fields of `Sampling` that replace those of `sampling`.

    Returns:
        For each prompt (n, n_tokens), the tokens drawn.

    Raises:
        ValueError: If the backbone is not causal, or an argument is out of range.
    """
    sampling = replace(sampling, **options)
    limits = [n_tokens] * len(prompts) if isinstance(n_tokens, int) else [*n_tokens]
    if len(limits) != len(prompts):
        raise ValueError(f"n_tokens has {len(limits)} numbers for {len(prompts)} prompts; give one, or one for each")
    at_least(1, n=n, batch_size=batch_size)
    for prompt, limit in zip(prompts, limits, strict=True):
        at_least(1, n_tokens=limit)
        if prompt.dim() != 1 or len(prompt) == 0:
            raise ValueError(f"a prompt has shape {tuple(prompt.shape)}; expected (length,) and at least one token")
    samples = sorted(range(len(prompts) * n), key=lambda i: (limits[i // n], len(prompts[i // n])), reverse=True)
    positions = n_positions(backbone) or math.inf
    batches: list[list[int]] = []
    for i in samples:
        first = batches[-1][0] if batches else i
        # All rows of a batch draw as many tokens as its first. The last token is not read.
        fits = len(prompts[i // n]) + limits[first // n] - 1 <= positions
        if batches and len(batches[-1]) < batch_size and fits:
            batches[-1].append(i)
        else:
            batches.append([i])
    largest = max(map(len, batches), default=0)
    drawn: dict[int, Tensor] = {}
    for number in progress(range(len(batches))):
        batch = batches[number]
        of_batch = [prompts[i // n] for i in batch]
        rows = generate(
            backbone,
            embed,
            head,
            pad_sequence(of_batch, batch_first=True),
            limits[batch[0] // n],
            lengths=torch.tensor([len(prompt) for prompt in of_batch], device=of_batch[0].device),
            streams=batch,
            sampling=replace(sampling, compile=sampling.compile and len(batch) == largest),
        )
        drawn |= {i: row[: limits[i // n]] for i, row in zip(batch, rows, strict=True)}
    return [torch.stack([drawn[i * n + j] for j in range(n)]) for i in range(len(prompts))]


def check_causal(backbone: SequenceModule) -> None:
    """Raise ValueError unless `backbone` is causal."""
    if not backbone.causal:
        raise ValueError(
            f"{type(backbone).__name__} has causal=False, so it sees the future and can't generate; use causal=True"
        )


class _Model(NamedTuple):
    """Arguments of a step other than tensors, without the seed: a step is compiled again for other values."""

    backbone: SequenceModule
    embed: Callable[[Tensor], Tensor]
    head: Head
    temperature: float
    top_k: int | None
    top_p: float | None


def _steps(
    model: _Model, prompt: Tensor, lengths: Tensor | None, uniform: Tensor, state: State | None
) -> Iterator[tuple[Tensor, State]]:
    """Yield the tokens (B,) drawn at each of `uniform` (n_tokens, B), and the state after all before them."""
    state = first_state(model.backbone, state, len(prompt), prompt.size(1) + len(uniform))
    for u in uniform:
        with donated():
            drawn, state = _step(model, prompt, u, state, lengths)
        yield drawn, state
        prompt, lengths = drawn[:, None], None


def first_state(backbone: SequenceModule, state: State | None, rows: int, more: int) -> State:
    """Return a copy of `state`, which can be donated, with room for `more` positions; None: an empty state.

    The state of a source is not copied, since it is never overwritten.

    Args:
        backbone: The module whose state it is.
        state: The given state.
        rows: Number of rows of an empty state.
        more: Number of positions to follow.
    """
    if state is None:
        return backbone.initial_state(rows, max_len=more)
    length = getattr(state, "length", None)
    if length is not None:
        state = backbone.grow(state, int(length.max()) + more)
    return reorder(state, torch.arange(next(tensors(state)).size(0)))


def _step(
    model: _Model, tokens: Tensor, uniform: Tensor, state: State, lengths: Tensor | None = None
) -> tuple[Tensor, State]:
    """Read `tokens` (B, N), the first `lengths` of each row, and draw the next (B,)."""
    y, state = model.backbone(model.embed(tokens), state, lengths)
    last = y[:, -1] if lengths is None else y[torch.arange(len(y), device=y.device), lengths - 1]
    return _drawn(model, model.head.log_probs(last), uniform), state


def _drawn(model: _Model, log_probs: Tensor, uniform: Tensor) -> Tensor:
    return draw(log_probs, uniform, temperature=model.temperature, top_k=model.top_k, top_p=model.top_p)


# ----------------------------------------------------------------------------------------------------------- compiled

BACKEND = "inductor"
"""Backend of `torch.compile`, on other devices than the CPU."""

LEAST_ROOM = 256
"""Number of positions that the first state of compiled generation has room for."""

_MOST_PROGRAMS = 128
"""Limit of compiled programs, over all models, numbers of rows and sizes of state. Torch's default of 8 is too low."""


def _compiled_steps(
    model: _Model, prompt: Tensor, lengths: Tensor | None, uniform: Tensor, state: State | None
) -> Iterator[tuple[Tensor, State]]:
    """Yield what `_steps` does. A step's inputs and outputs stay at the same address while the state has room."""
    rows, n = prompt.shape
    on_cpu = _on_cpu(prompt.device)
    length = getattr(state, "length", None)
    position = 0 if length is None else int(length.max())
    total = position + n + len(uniform)
    if on_cpu:
        steps = Steps(*model[:3], device=prompt.device, compile=True)

    def room_of(positions: int) -> int:
        is_final = on_cpu and model.backbone.bounded_by is None
        return total if is_final else room_for(positions, total, few=not on_cpu)

    if n > 1 or state is not None:
        state = first_state(model.backbone, state, rows, room_of(position + n) - position)
        shapes = [t.shape for t in tensors(state)]
        with donated():
            drawn, state = _step(model, prompt, uniform[0], state, lengths)
        yield drawn, state
        position, prompt, uniform = position + n, drawn[:, None], uniform[1:]
        if [t.shape for t in tensors(state)] != shapes:
            raise ValueError(
                "compile=True: the given state was made without max_len, so each step has other shapes; make it "
                "with max_len, or leave compile out"
            )
    room, tokens, current = 0, prompt.clone(), torch.empty_like(uniform[:1]).view(-1)
    for u in uniform:
        if position == room or not room:
            room = room_of(position + 1)
            if state is None:
                state = model.backbone.initial_state(rows, max_len=room)
            else:
                state = model.backbone.grow(state, room)
            if not on_cpu:
                advance = _Advance(model, tokens, current, state)
        if on_cpu:
            log_probs, state = steps(tokens, state)
            tokens = _drawn(model, log_probs, u)[:, None]
        else:
            current.copy_(u)
            advance()
        yield tokens[:, 0], state
        position += 1


def room_for(positions: int, total: int, *, few: bool) -> int:
    """Return the `max_len` of a state for `positions` of `total`.

    Args:
        positions: The number of positions that it must have room for.
        total: The number of positions at the end.
        few: Whether there should be few sizes, because each is compiled separately.
    """
    size: int = 2 ** (positions - 1).bit_length() if few else -(-positions * 5 // 256) * 64  # a quarter more
    return min(max(LEAST_ROOM, size), -(-total // 64) * 64)


class _Advance:
    """Reads `tokens` (B, 1), and overwrites them with the next tokens and `state` with the next state.

    On CUDA, the first call is recorded as a graph that later calls replay. The graph is not kept for another
    `generate`, because the parameters may then be at other addresses.
    """

    def __init__(self, model: _Model, tokens: Tensor, uniform: Tensor, state: State) -> None:
        self._arguments = model, tokens, uniform, state
        self._replay: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self._replay is not None:
            self._replay()
            return
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # loads slowly

        model, tokens, _, _ = self._arguments
        try:
            # A context, because not every supported torch has a limit as an option of `torch.compile`.
            with torch._dynamo.config.patch(recompile_limit=_MOST_PROGRAMS):
                if _on_cuda(tokens.device):
                    self._replay = _recorded(self._run, tokens.device)
                else:
                    self._run()
                    self._replay = self._run
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            raise refusal(model.backbone, error) from error

    def _run(self) -> None:
        with donated():
            _program(BACKEND)(*self._arguments)


def _on_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def _on_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


def _recorded(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Run once, and return a function that runs the same kernels again without Python."""
    with torch.cuda.device(device):
        # Both runs use one stream of this device: compiled code may have a guard on its stream, and torch's default
        # stream for recording belongs to the device that recorded first in this process.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # compiles, and makes the allocations that happen once
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):  # data loaders keep running
            run()  # recorded, not run
    return graph.replay


@cache
def _program(backend: str) -> Callable[[_Model, Tensor, Tensor, State], None]:
    return torch.compile(_advance, backend=backend, fullgraph=True, dynamic=False)


def _advance(model: _Model, tokens: Tensor, uniform: Tensor, state: State) -> None:
    drawn, after = _step(model, tokens, uniform, state)
    tokens.copy_(drawn[:, None])
    for old, new in zip(tensors(state), tensors(after), strict=True):
        if new is not old:
            old.copy_(new)


def _random_stream(seed: int, row: int, n: int) -> Tensor:
    # Multiplication with odd constants keeps (seed, row) pairs and neighbouring rows from colliding.
    mixed = (seed * 0x9E3779B97F4A7C15 + row * 0xD1B54A32D192ED03) % 2**63
    return torch.rand(n, generator=torch.Generator().manual_seed(mixed), dtype=torch.float64)
