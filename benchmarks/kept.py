"""Kept states and many prompts, for `benchmarks.generation`."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import Spread, interleaved, mean_of, resident, seconds_of
from benchmarks.models import SMALL
from benchmarks.report import Report, Row
from lit_effattn import LSTM, LanguageModel, Transformer
from lit_effattn import attention as attentions
from lit_effattn.generation import Kept, PrefixCache
from lit_effattn.generation.sampling import first_state
from lit_effattn.sequence import SequenceModule, nbytes
from lit_effattn.tasks.kept_states import load_state, save_state

MEMORY = 128
"""Positions in the memory of Transformer-XL and of the ∞-former."""

N_TOKENS = 256
"""Size of the vocabulary."""

DRAWN, OWN = 32, 64
"""Tokens drawn for a prompt, and the most tokens of a prompt after the shared prefix."""

STATES_ALONE = ("∞-former",)
"""Kinds whose prompts are not measured."""

GPT2 = "GPT-2 of transformers, DynamicCache"


def _transformer(kind: Any, **options: Any) -> SequenceModule:
    return Transformer(SMALL.d_model, SMALL.n_heads, SMALL.n_layers, attention=partial(kind, **options))


KINDS: dict[str, Callable[[], SequenceModule]] = {
    "linear": partial(_transformer, attentions.LinearAttention),
    "DeltaNet": partial(_transformer, attentions.DeltaNetAttention),
    "Transformer-XL": partial(_transformer, attentions.TransformerXLAttention, mem_len=MEMORY, same_length=True),
    "∞-former": partial(_transformer, attentions.InfiniteAttention, mem_len=MEMORY, segment_len=MEMORY),
    "softmax": partial(_transformer, attentions.SoftmaxAttention),
    "LSTM": partial(LSTM, SMALL.d_model, SMALL.n_layers),
}

STATE_NOTES = [
    f"Models of {SMALL} (the LSTM: as wide and deep), {N_TOKENS} tokens, random weights, one row.",
    "state: bytes of the state after so many positions, with room for no more. file: bytes of the saved state.",
    "save, load: a file, with the checksum of the state and the fingerprint of the weights.",
    "fork: the copy that a continuation makes of a state in memory before its first step. Keeping a state and going "
    "back to it are assignments. transformers: copy.deepcopy of the cache, which a continuation changes in place.",
]
PROMPT_NOTES = [
    f"tokens/s: tokens drawn for all prompts in a second, {DRAWN} for each, the reading of the prompts included. Each "
    f"has a shared prefix and 1 to {OWN} tokens of its own. Models of {SMALL} (the LSTM: as wide and deep).",
    "one after another: `sample` for each. batch: `sample_each`, 32 rows.",
    "Transformer-XL has same_length=True.",
]
FORK_NOTES = [
    "In memory: a step forks a random one of 100 kept states, draws one token, and keeps the new state in its place. "
    "In files: a step saves one of the states, and replaces it by the loaded one. resident: bytes of this process "
    "after a tenth of the steps, and after all. The model has one layer, E 16.",
]


def model(kind: str, device: torch.device) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(KINDS[kind](), N_TOKENS).to(device).eval()


def states(args: argparse.Namespace) -> Report:
    """Time saving, loading and forking after each of `args.states` positions."""
    rows: list[Row] = []
    for length in args.states:
        tokens = torch.randint(N_TOKENS, (1, length + 1), generator=torch.Generator().manual_seed(0)).to(args.device)
        with TemporaryDirectory() as folder:
            measures: dict[str, Callable[[], tuple[float, ...]]] = {}
            sizes: dict[str, tuple[int, int | None]] = {}
            for kind in KINDS:
                file = Path(folder, f"{kind}.state")
                made = model(kind, args.device)
                kept = state_after(made, tokens)
                save_state(kept, file, made, made.backbone)
                sizes[kind] = nbytes(kept.state), file.stat().st_size
                measures[kind] = partial(_times, made, kept, file, args.device)
            measures[GPT2], size = _transformers(tokens[:, :-1], args.device)
            sizes[GPT2] = size, None
            rounds = interleaved(f"generation, states of {length}", measures, args.repeats)
        for kind, samples in rounds.items():
            save, load, fork = (Spread(s) for s in zip(*samples, strict=True))
            rows.append(
                {
                    **{
                        "positions": length,
                        "model": kind,
                        "state, bytes": sizes[kind][0],
                        "file, bytes": sizes[kind][1],
                    },
                    "save, ms": None if kind == GPT2 else save.map(lambda s: 1000 * s),
                    "load, ms": None if kind == GPT2 else load.map(lambda s: 1000 * s),
                    "fork, ms": fork.map(lambda s: 1000 * s),
                }
            )
    return Report("generation", rows, STATE_NOTES)


@torch.no_grad()
def state_after(made: LanguageModel, tokens: Tensor) -> Kept:
    """Return the state after all of `tokens` (1, N + 1) but the last, read in parts, with room for no more."""
    state = made.backbone.initial_state(1, max_len=tokens.size(1) - 1)
    for part in tokens[:, :-1].split(512, 1):
        _, state = made.backbone(made._embed(part), state)
    return Kept(state, tokens[:, -1:], 0)


@torch.no_grad()
def _times(made: LanguageModel, kept: Kept, file: Path, device: torch.device) -> tuple[float, ...]:
    """Return the seconds of saving, loading and forking."""
    clock = partial(seconds_of, device=device)
    calls = (
        partial(save_state, kept, file, made, made.backbone),
        partial(load_state, file, made, made.backbone),
        partial(first_state, made.backbone, kept.state, 1, 0),
    )
    return tuple(mean_of(clock, call) for call in calls)


@torch.no_grad()
def _transformers(tokens: Tensor, device: torch.device) -> tuple[Callable[[], tuple[float, ...]], int]:
    """Return a function that times copying a GPT-2's cache after `tokens`, and the bytes of the cache."""
    from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

    size = {"n_layer": SMALL.n_layers, "n_head": SMALL.n_heads, "n_embd": SMALL.d_model}
    config = GPT2Config(vocab_size=N_TOKENS, n_positions=tokens.size(1), **size)
    cache = DynamicCache()
    GPT2LMHeadModel(config).to(device).eval()(tokens, past_key_values=cache, logits_to_keep=1)
    clock = partial(seconds_of, device=device)
    n = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return lambda: (0.0, 0.0, mean_of(clock, lambda: copy.deepcopy(cache))), n


def prompts(args: argparse.Namespace) -> Report:
    """Time `args.prompts` prompts that share a prefix of `args.prefix` tokens: one after another, and in a batch."""
    draw = torch.Generator().manual_seed(0)
    common = torch.randint(N_TOKENS, (args.prefix,), generator=draw)
    own = [int(n) for n in torch.randint(1, OWN + 1, (args.prompts,), generator=draw)]
    given = [torch.cat([common, torch.randint(N_TOKENS, (n,), generator=draw)]).to(args.device) for n in own]
    rows: list[Row] = []
    for kind in (kind for kind in KINDS if kind not in STATES_ALONE):
        made = model(kind, args.device)

        def alone(made: LanguageModel = made) -> None:
            for prompt in given:
                made.sample(prompt[None], DRAWN)

        def together(max_bytes: int, made: LanguageModel = made) -> None:
            made.sample_each(given, DRAWN, cache=PrefixCache(max_bytes))

        calls = {
            "one after another": alone,
            "batch, no prefix cache": partial(together, 0),
            "batch, prefix cache": partial(together, 2**28),
        }
        made.sample(given[0][None], 2)  # the first call is slow
        measures = {name: partial(seconds_of, call, args.device) for name, call in calls.items()}
        seconds = {n: Spread(tuple(s)) for n, s in interleaved(f"{kind}, prompts", measures, args.repeats).items()}
        rows += [
            {
                **{"prompts": args.prompts, "shared prefix": args.prefix, "model": kind, "method": method},
                "tokens/s": own_seconds.map(lambda s: DRAWN * args.prompts / s),
                "÷ one after another": seconds["one after another"] / own_seconds,
            }
            for method, own_seconds in seconds.items()
        ]
    return Report("generation", rows, PROMPT_NOTES)


def forks(args: argparse.Namespace) -> Report:
    """Fork and keep states `args.forks` times in memory, then in files, and return the bytes of this process."""
    rows: list[Row] = []
    for kind in (attentions.LinearAttention, attentions.SoftmaxAttention):
        torch.manual_seed(0)
        made = LanguageModel(Transformer(16, 2, 1, attention=kind), 8).to(args.device).eval()
        with TemporaryDirectory() as folder:
            ring = _Ring(made, Path(folder), args.forks)
            for name, act in {"in memory": ring.fork, "in files": ring.file}.items():
                early, after = _bytes_after(act, args.forks)
                names = {"attention": kind.__name__, "forks": f"{args.forks:,} {name}"}
                rows.append({**names, "resident before, bytes": early, "after": after, "growth": after - early})
    return Report("generation", rows, FORK_NOTES)


class _Ring:
    """100 kept states, one of which each call replaces."""

    def __init__(self, made: LanguageModel, folder: Path, n: int) -> None:
        self._made, self._folder = made, folder
        self._states: list[Kept] = []
        for _ in range(100):
            made.sample(torch.zeros(1, 8, dtype=torch.long, device=made.device), 1, keep=self._states.append)
        self._begin = self._states[0]
        self._places = torch.randint(100, (n, 2), generator=torch.Generator().manual_seed(0)).tolist()

    def fork(self, step: int) -> None:
        source, place = self._places[step]
        # Every hundredth step goes back to the beginning, so that softmax attention's states stay short.
        kept = self._begin if step % 100 < 50 else self._states[source]
        keep = partial(self._states.__setitem__, place)
        self._made.sample(self._begin.tokens[:, :0], 1, kept=kept, keep=keep, seed=step)

    def file(self, step: int) -> None:
        place = step % 100
        path = self._folder / f"{place}.state"
        save_state(self._states[place], path, self._made, self._made.backbone)
        self._states[place] = load_state(path, self._made, self._made.backbone)


def _bytes_after(act: Callable[[int], None], n: int) -> tuple[int, int]:
    """Return the bytes of this process after a tenth of the calls act(0) … act(n − 1), and after all."""
    for step in range(n // 10):
        act(step)
    early = resident()
    for step in range(n // 10, n):
        act(step)
    return early, resident()
