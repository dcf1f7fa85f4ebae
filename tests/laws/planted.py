"""A mixer of another package, as it might be, with one of ten bugs: none of its code comes from lit_effattn.

It has its own names, a dictionary as cache, learned positions, a short convolution, and a normalised sum over the past.
"""

import contextlib
from functools import partial

import torch
from torch import nn

from lit_effattn.laws import Adapter

MADE: list = []
"""The mixers that there are, for `giving`."""


@contextlib.contextmanager
def giving():
    """A context in which caches may be overwritten."""
    for mixer in MADE:
        mixer.generous = True
    try:
        yield
    finally:
        for mixer in MADE:
            mixer.generous = mixer.bug == "donated state reused"


class Mixer(nn.Module):
    """y_t = W (Σ_{j ≤ t} exp(k_j) v_j / Σ_{j ≤ t} exp(k_j)), with v and k from a convolution of three positions."""

    def __init__(self, width: int, bug: str = "") -> None:
        super().__init__()
        self.width, self.bug = width, bug
        self.place = nn.Parameter(torch.randn(512, width))
        self.taps = nn.Parameter(torch.randn(3, width))
        self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(3))
        MADE[:] = [*MADE[-20:], self]
        self.generous = False  # whether the caller gives its caches away

    def empty(self, rows: int, like: torch.Tensor) -> dict:
        new = partial(torch.zeros, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        return {
            "last": torch.zeros(rows, 2, self.width, dtype=like.dtype, device=like.device),
            "top": new(rows, self.width) - 1e4,
            "up": new(rows, self.width),
            "down": new(rows, self.width),
            "seen": torch.zeros(rows, dtype=torch.long, device=like.device),
        }

    def forward(self, x: torch.Tensor, cache: dict | None = None, valid: torch.Tensor | None = None) -> tuple:
        b, n, _ = x.shape
        cache = self.empty(b, x) if cache is None else cache
        valid = torch.full((b,), n, device=x.device) if valid is None else valid
        inside = (torch.arange(n, device=x.device) < valid[:, None])[..., None]
        x = torch.where(inside, x, 0)
        start = torch.zeros_like(cache["seen"]) if self.bug == "positions from 0" else cache["seen"]
        x = x + self.place[(start[:, None] + torch.arange(n, device=x.device)) % 512].to(x.dtype)
        before = cache["last"].to(x.dtype)
        if self.bug == "dropped convolution" and n > 1:
            before = torch.zeros_like(before)
        wide = torch.cat([before, x], 1)
        mixed = sum(tap * wide[:, i : i + n] for i, tap in enumerate(self.taps))
        if self.bug == "mask off by one":
            mixed = mixed + 0.01 * torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)
        if self.bug == "mixed rows":
            mixed = mixed - 0.1 * mixed.mean(0, keepdim=True)
        full = torch.float16 if self.bug == "float16 sum" and x.dtype == torch.float16 else cache["up"].dtype
        k, v = self.key(mixed).to(full), self.value(mixed).to(full)
        k = k.masked_fill(~inside, -torch.inf if self.bug != "padding in the denominator" else -2.0)
        top = torch.maximum(cache["top"].to(full), k.amax(1))
        scale = (cache["top"].to(full) - top).exp()
        weight = (k - top[:, None]).exp()
        if self.bug == "leak over a split":
            weight = weight * (1 + 0.1 * (torch.arange(n, device=x.device) == 0)[:, None])
        if full == torch.float16:  # one addition after the other
            up, down = (_sums(a.to(full) * scale, t) for a, t in ((cache["up"], weight * v), (cache["down"], weight)))
        else:
            parts = (("up", weight * torch.where(inside, v, 0)), ("down", weight))
            up, down = ((cache[name].to(full) * scale)[:, None] + t.cumsum(1) for name, t in parts)
        y = self.out((up / down.clamp(min=1e-30)).to(x.dtype))
        rows = torch.arange(b, device=x.device)
        after = {
            "last": wide[rows[:, None], valid[:, None] + torch.arange(2, device=x.device)],
            "top": top,
            "up": up[:, -1],
            "down": down[:, -1],
            "seen": cache["seen"] + valid,
        }
        if self.bug == "mutated cache" or (self.generous and not torch.is_grad_enabled()):
            for name, t in after.items():
                cache[name].data.copy_(t)
            after = cache if self.bug == "mutated cache" else {name: t.clone() for name, t in cache.items()}
        return y, after

    def clear(self, cache: dict, rows: torch.Tensor) -> dict:
        new = self.empty(len(rows), cache["last"])
        kept = {"top"} if self.bug == "reset keeps the maximum" else set()
        mask = {name: rows.view(-1, *[1] * (t.dim() - 1)) for name, t in cache.items()}
        return {name: t if name in kept else torch.where(mask[name], new[name], t) for name, t in cache.items()}


def _sums(total: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    return torch.stack([total := total + part for part in parts.unbind(1)], 1)


class MixerAdapter(Adapter):
    padding = "right"
    unit = 3

    def __init__(self, bug: str = "") -> None:
        super().__init__(partial(Mixer, 4, bug), name=f"Mixer with {bug or 'no bug'}")
        self.bug = bug

    def make(self, width: int | None = None) -> Mixer:
        torch.manual_seed(1)
        return Mixer(width or 4, self.bug)

    def input_width(self, module: Mixer) -> int:
        return module.width

    @staticmethod
    def call(module, x, state=None, lengths=None):
        return module(x, state, lengths)

    @staticmethod
    def initial_state(module, batch, max_len, x):
        return module.empty(batch, x)

    @staticmethod
    def reset(module, state, rows):
        return module.clear(state, rows)

    @staticmethod
    def bounded(module):
        return True

    @staticmethod
    def donated():
        from tests.laws.planted import giving

        return giving()
