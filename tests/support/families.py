"""The three operations with kernels, with one interface: inputs, the function, and its definition."""

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_effattn.attention import (
    EluFeatureMap,
    GatedDeltaNetAttention,
    LinearAttention,
    PerformerAttention,
    RetentionAttention,
)
from lit_effattn.ops.favor import pytorch as favor
from lit_effattn.ops.gated_linear import pytorch as gated
from lit_effattn.ops.linear import pytorch as linear
from tests.support import gated_linear
from tests.support.kernels import elu_definition, elu_features, log_positive, positive_definition, summed_keys


class Family(NamedTuple):
    """An operation with kernels. Arguments are q, k, v (B, H, N, ·), others, and perhaps lengths (B,)."""

    name: str
    inputs: Callable[..., list[Tensor]]
    """Makes the arguments from N, widths, and b, h, dtype, device."""
    function: Callable[..., Any]
    definition: Callable[..., Any]
    module: ModuleType
    attentions: Sequence[Callable[..., Any]]
    """Modules that use it, from width and heads."""
    operator: Callable[..., tuple]
    """Its operator's name, further arguments, and the arguments of the operator's backward pass."""


def heads(n: int, widths: Sequence[int], b: int, h: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Queries, keys and values, with the strides that `Attention` gives them."""
    return [torch.randn(b, n, h, width).to(device, dtype).transpose(1, 2).requires_grad_() for width in widths]


def linear_inputs(n: int, f: int = 8, d: int = 8, *, b=2, h=2, dtype=torch.float32, device="cpu") -> list[Tensor]:
    """And sums of some keys before."""
    before = elu_features(torch.randn(b, h, 3, f))
    sums = [before.mT @ torch.randn(b, h, 3, d), before.sum(2)]
    return [*heads(n, (f, f, d), b, h, dtype, device), *(t.to(device).requires_grad_() for t in sums)]


def favor_inputs(
    n: int, e: int = 12, f: int = 20, d: int = 9, *, b=2, h=2, dtype=torch.float32, device="cpu", louder=None, seen=True
) -> list[Tensor]:
    """And directions, and sums of keys before if any were `seen`.

    `louder`: by how much queries and keys are multiplied, (N, 1). Keys of large norms have small features: those that
    come after them rise far.
    """
    q, k, v = heads(n, (e, e, d), b, h, torch.float32, "cpu")
    omega = torch.randn(h, f, e)
    s, z, m = torch.zeros(b, h, f, d), torch.zeros(b, h, f), torch.full((b, h, f), -torch.inf)
    if seen:
        s, z, m = summed_keys(log_positive(torch.randn(b, h, 3, e), omega), torch.randn(b, h, 3, d))
    if louder is not None:
        q, k = q * louder, k * louder
    given = [t.detach().to(device, dtype).requires_grad_() for t in (q, k, v)]
    sums = [t.to(device).requires_grad_() for t in (s, z)]
    return [*given, omega.to(device), *sums, m.to(device)]


def gated_inputs(
    n: int, d: int = 8, dv: int = 8, *, b=2, h=2, dtype=torch.float32, device="cpu", decay="channel", delta=True
) -> list[Tensor]:
    """And the state before, decays, and β."""
    tensors, options = gated_linear.inputs(n, d, dv, decay, delta, b=b, h=h, dtype=torch.float32)
    tensors = [*(t.to(dtype) for t in tensors[:3]), tensors[3], *(t for t in options.values() if t is not None)]
    return [t.to(device).requires_grad_() for t in tensors]


def performer(q: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    return favor.positive_favor(q, *others, scale=q.size(-1) ** -0.25)


GATES = ("log_decay", "beta")
LINEAR = Family(
    "linear",
    linear_inputs,
    partial(linear.causal_linear_attention, elu=True),
    elu_definition,
    linear,
    [partial(LinearAttention, feature_map=EluFeatureMap)],
    lambda lengths, form: ("linear", (lengths, True, 1e-6, form), lambda given, out: (*out, *given)),
)
FAVOR = Family(
    "favor",
    favor_inputs,
    performer,
    positive_definition,
    favor,
    [partial(PerformerAttention, features=features, n_features=6) for features in ("positive", "hyperbolic")],
    lambda lengths, form: (
        "positive_favor",
        (lengths, 0.5, form),
        lambda given, out: (*out[:3], *given[:-2], out[0], *out[4:], *given[-2:]),
    ),
)
GATED = Family(
    "gated_linear",
    gated_inputs,
    gated_linear.by_position(gated.gated_linear_attention, GATES),
    gated_linear.by_position(gated_linear.definition, GATES),
    gated,
    [RetentionAttention, GatedDeltaNetAttention],
    lambda lengths, form: ("gated_linear", (lengths, 4, form), lambda given, out: (*out, *given)),
)
FAMILIES = {family.name: family for family in (LINEAR, FAVOR, GATED)}
