"""Sampling from any causal `SequenceModule` with its state: the prompt in one call, then one position per step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import torch
from torch import Tensor

from lit_effattn.attention.base import Attention
from lit_effattn.nn.heads import Head
from lit_effattn.ops.runtime.check_inductor import check_inductor
from lit_effattn.sequence import SequenceModule, State, donated, reorder, tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Check that the settings define a distribution.

    Raises:
        ValueError: A setting is out of range. The message names it and its value.
    """
    if not temperature >= 0:
        raise ValueError(
            f"temperature={temperature} must be at least 0; 0 takes the likeliest level, 1 samples as trained"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} leaves no level to draw; give at least 1, or leave it out")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} is not a probability above 0 and up to 1")


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling` as keyword arguments."""

    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    compile: bool


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: one value, checked when it is made, from the command's flags to `generate`.

    Args:
        temperature: Divides the log-probabilities; 0 takes the likeliest token.
        top_k: Draw among the k likeliest only.
        top_p: Draw among the likeliest whose probabilities add up to p; at least one.
        seed: Seed of the random streams; equal seeds draw equal samples.
        compile: Use `torch.compile`: see `generate`. Worth it for many samples, not for one.

    Raises:
        ValueError: A setting is out of range. The message names it and its value.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    compile: bool = False

    def __post_init__(self) -> None:
        """Check the settings."""
        check_sampling(self.temperature, self.top_k, self.top_p)


AS_TRAINED = Sampling()
"""Draw from the model's distribution, with seed 0."""


def draw(
    log_probs: Tensor,
    uniform: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Draw one level per row, by inverting the cumulative distribution at `uniform`.

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
    sampling: Sampling = AS_TRAINED,
    state: State | None = None,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    on_tokens: Callable[[Tensor], None] | None = None,
    **options: Unpack[SamplingOptions],
) -> Tensor:
    """Continue `prompt` by `n_tokens` tokens.

        generate(backbone, embed, head, prompt, 100, temperature=0.8, top_p=0.95, seed=1)

    Row i has its own random stream, seeded by `seed` and i, so a sample depends neither on the number of rows nor on
    the device.

    With `compile` a step is one program, on CUDA one graph of kernels, without Python between the layers. The same
    tokens are drawn, except where rounding decides. Compiling takes seconds to a minute; later calls with the same
    number of rows reuse the program. A prompt of several tokens is read without compilation. A compiled step reads all
    slots of the state, filled or not. A state that holds all positions therefore starts with room for 256; when it is
    full, the room is doubled and the step compiled again.

    Args:
        backbone: Causal; see `SequenceModule`.
        embed: (B, N) tokens -> (B, N, backbone.d_input).
        head: Maps the backbone's output to a distribution.
        prompt: (B, P) tokens, P at least 1.
        n_tokens: Number of tokens to draw.
        sampling: How tokens are drawn.
        state: The state from which the prompt is read, such as a decoder's with a source; it is not changed. Best made
            with `max_len`; then it is grown if it has too little room. None: no earlier positions.
        progress: Wraps the iterable of steps (rich's or tqdm's `track`).
        on_tokens: Called with each step's tokens (B,) as they are drawn.
        options: Fields of `Sampling` (`temperature`, `top_k`, `top_p`, `seed`, `compile`) that replace those of
            `sampling`.

    Returns:
        (B, n_tokens), the tokens drawn.

    Raises:
        ValueError: The backbone is not causal, a setting is out of range, or the step can't be compiled with this
            state.
    """
    sampling = replace(sampling, **options)
    if not backbone.causal:
        raise ValueError(
            f"{type(backbone).__name__} has causal=False, so it sees the future and can't generate; use causal=True"
        )
    if sampling.compile and BACKEND == "inductor":
        check_inductor("compile=True", prompt.device)
    rows = len(prompt)
    uniform = torch.stack([_random_stream(sampling.seed, i, n_tokens) for i in range(rows)], 1).to(prompt.device)
    drawn = torch.empty(rows, n_tokens, dtype=torch.long, device=prompt.device)
    model = _Model(backbone, embed, head, sampling.temperature, sampling.top_k, sampling.top_p)
    steps = (_compiled_steps if sampling.compile else _steps)(model, prompt, uniform, state)
    for step, tokens in zip(progress(range(n_tokens)), steps, strict=False):
        drawn[:, step] = tokens
        if on_tokens is not None:
            on_tokens(drawn[:, step])
    return drawn


class _Model(NamedTuple):
    """What a step depends on. A compiled step is compiled again for other values, so the seed is not among them."""

    backbone: SequenceModule
    embed: Callable[[Tensor], Tensor]
    head: Head
    temperature: float
    top_k: int | None
    top_p: float | None


def _steps(model: _Model, prompt: Tensor, uniform: Tensor, state: State | None) -> Iterator[Tensor]:
    """Yield the tokens (B,) drawn at each of `uniform` (n_tokens, B)."""
    state = first_state(model.backbone, state, len(prompt), prompt.size(1) + len(uniform))
    tokens = prompt
    for u in uniform:
        with donated():
            drawn, state = _step(model, tokens, u, state)
        yield drawn
        tokens = drawn[:, None]


def first_state(backbone: SequenceModule, state: State | None, rows: int, more: int) -> State:
    """Return a copy of `state`, which can be donated, with room for `more` positions; None: an empty state.

    The state of a source is not copied, since it is never overwritten.
    """
    if state is None:
        return backbone.initial_state(rows, max_len=more)
    length = getattr(state, "length", None)
    if length is not None:
        state = backbone.grow(state, int(length.max()) + more)
    return reorder(state, torch.arange(next(tensors(state)).size(0)))


def _step(model: _Model, tokens: Tensor, uniform: Tensor, state: State) -> tuple[Tensor, State]:
    """Read `tokens` (B, N) and draw the next (B,)."""
    y, state = model.backbone(model.embed(tokens), state)
    log_probs = model.head.log_probs(y[:, -1])
    drawn = draw(log_probs, uniform, temperature=model.temperature, top_k=model.top_k, top_p=model.top_p)
    return drawn, state


# ----------------------------------------------------------------------------------------------------------- compiled

BACKEND = "inductor"
"""Backend of `torch.compile`."""

LEAST_ROOM = 256
"""Positions that the first state of compiled generation has room for."""

_MOST_PROGRAMS = 128
"""Most compiled programs, over all models, numbers of rows and sizes of state. Torch's default of 8 is too low here."""


def _compiled_steps(model: _Model, prompt: Tensor, uniform: Tensor, state: State | None) -> Iterator[Tensor]:
    """Yield the tokens of `_steps`. A step's inputs and outputs stay at the same address while the state has room."""
    rows, n = prompt.shape
    fed = 0 if state is None else int(state.length.max())
    total = fed + n + len(uniform)
    if n > 1 or state is not None:
        state = first_state(model.backbone, state, rows, room_for(fed + n, total) - fed)
        shapes = [t.shape for t in tensors(state)]
        with donated():
            drawn, state = _step(model, prompt, uniform[0], state)
        if [t.shape for t in tensors(state)] != shapes:
            raise ValueError(
                "compile=True: the given state was made without max_len, so each step has other shapes; make it with "
                "max_len, or leave compile out"
            )
        yield drawn
        fed, prompt, uniform = fed + n, drawn[:, None], uniform[1:]
    room, tokens, now = 0, prompt.clone(), torch.empty_like(uniform[:1]).view(-1)
    for u in uniform:
        if fed == room or not room:
            room = room_for(fed + 1, total)
            if state is None:
                state = model.backbone.initial_state(rows, max_len=room)
            else:
                state = model.backbone.grow(state, room)
            advance = _Advance(model, tokens, now, state)
        now.copy_(u)
        advance()
        yield tokens[:, 0]
        fed += 1


def room_for(positions: int, total: int) -> int:
    """Return how many positions to make a state for: one of few numbers, because each is compiled separately."""
    power: int = 2 ** (positions - 1).bit_length()
    return min(max(LEAST_ROOM, power), -(-total // 64) * 64)


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
                self._replay = _recorded(self._run, tokens.device) if _on_cuda(tokens.device) else self._run_once()
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            kinds = ", ".join(sorted({type(m).__name__ for m in model.backbone.modules() if isinstance(m, Attention)}))
            raise ValueError(
                f"compile=True: a step of {type(model.backbone).__name__} ({kinds}) can't be compiled; leave compile "
                f"out. {type(error).__name__}: {error}"
            ) from error

    def _run(self) -> None:
        with donated():
            _program(BACKEND)(*self._arguments)

    def _run_once(self) -> Callable[[], None]:
        self._run()
        return self._run


def _on_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


def _recorded(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Run once, and return a function that runs the same kernels again without Python."""
    with torch.cuda.device(device):
        # Both runs use one stream of this device: compiled code may be guarded by its stream, and torch's default
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
    # Mixed by multiplication with odd constants, so that neither (seed, row) pairs nor neighbouring rows collide.
    mixed = (seed * 0x9E3779B97F4A7C15 + row * 0xD1B54A32D192ED03) % 2**63
    return torch.rand(n, generator=torch.Generator().manual_seed(mixed), dtype=torch.float64)
