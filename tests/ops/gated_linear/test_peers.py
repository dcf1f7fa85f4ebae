"""Outputs, states and gradients of the definition and of other libraries' forms in PyTorch, on the same numbers.

transformers is in the development environment, the others in benchmarks/requirements-peers.txt. fla-core does not
import without a GPU; its naive forms are loaded by their paths. Of the other libraries' forms only attn-gym's gated
delta rule computes in float64. `pytest -rP` prints the differences, which docs/kinds.md has.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lit_effattn.ops.gated_linear.pytorch import gated_linear_attention
from tests.support.gated_linear import by_position, definition, inputs
from tests.support.kernels import gradients
from tests.support.rounding import rounding

N, D, DV = 128, 16, 8


def imported(module: str) -> Any:
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module} is not installed: pip install -r benchmarks/requirements-peers.txt")
    return importlib.import_module(module)


def fla(operation: str) -> Any:
    """Load fla-core's ops/`operation`/naive.py, which needs einops."""
    spec = importlib.util.find_spec("fla")
    if spec is None or importlib.util.find_spec("einops") is None:
        pytest.skip("fla-core and einops are not installed: pip install -r benchmarks/requirements-peers.txt")
    path = Path(spec.submodule_search_locations[0]) / "ops" / operation / "naive.py"
    spec = importlib.util.spec_from_file_location(f"fla_{operation}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Kind(NamedTuple):
    """The decays of a kind (see `tests.support.gated_linear.DECAYS`), and whether it has the delta rule."""

    decay: str
    delta: bool


RETENTION, GLA, MAMBA2 = Kind("fixed", False), Kind("channel", False), Kind("head", False)
DELTANET, GATED_DELTANET, KDA = Kind("none", True), Kind("head", True), Kind("channel", True)


class Peer(NamedTuple):
    """A function of q, k, v, S, logarithms of decays and β with heads after positions, and the kind it computes."""

    call: Callable[..., Any]
    kind: Kind
    exact: bool = False  # computes in float64
    transposed: bool = False  # its state is (B, H, D', D)


OPTIONS = {"scale": 1.0, "output_final_state": True}


def by_head(*tensors):
    return [t.transpose(1, 2) for t in tensors]


def defined(*arguments):
    q, k, v, s, g, beta = (t if t is None else t.double() for t in arguments)
    g, beta = (t if t is None or t.dim() == 1 else t.transpose(1, 2) for t in (g, beta))
    y, s = definition(*by_head(q, k, v), s, log_decay=g, beta=beta)
    return y.transpose(1, 2), s


def fla_gla(q, k, v, s, g, beta):
    return fla("gla").naive_recurrent_gla(q * D**0.5, k, v, g, initial_state=s, output_final_state=True)


def fla_delta(q, k, v, s, g, beta):
    y, s = fla("delta_rule").delta_rule_recurrence(*by_head(q * D**0.5, k, v, beta), initial_state=s)
    return y.transpose(1, 2), s


def fla_of(operation: str, name: str, *order: str):
    def call(q, k, v, s, g, beta):
        given = {"g": g, "beta": beta}
        function = getattr(fla(operation), name)
        return function(q, k, v, **{x: given[x] for x in order}, initial_state=s, **OPTIONS)

    return call


def fla_retention(q, k, v, s, g, beta):
    g = g.expand(*q.shape[:3])
    return fla("simple_gla").naive_recurrent_simple_gla(q, k, v, g=g, initial_state=s, **OPTIONS)


def attn_gym(name: str):
    def call(q, k, v, s, g, beta):
        return getattr(imported("attn_gym.linear"), name)(q, k, v, g, beta, s, impl="reference", **OPTIONS)

    return call


def transformers(name: str):
    def call(q, k, v, s, g, beta):
        function = getattr(imported("transformers.models.qwen3_next.modeling_qwen3_next"), name)
        function = inspect.unwrap(function)  # else fla's where that is installed, which needs a GPU
        return function(q * D**0.5, k, v, g=g, beta=beta, initial_state=s, output_final_state=True)

    return call


PEERS = {
    "retention, definition": Peer(defined, RETENTION, exact=True),
    "retention, fla": Peer(fla_retention, RETENTION),
    "GLA, definition": Peer(defined, GLA, exact=True),
    "GLA, fla": Peer(fla_gla, GLA),
    "Mamba-2, definition": Peer(defined, MAMBA2, exact=True),
    "Mamba-2, fla": Peer(fla_of("simple_gla", "naive_recurrent_simple_gla", "g"), MAMBA2),
    "Mamba-2, fla in chunks": Peer(fla_of("simple_gla", "naive_chunk_simple_gla", "g"), MAMBA2),
    "DeltaNet, definition": Peer(defined, DELTANET, exact=True),
    "DeltaNet, fla": Peer(fla_delta, DELTANET),
    "Gated DeltaNet, definition": Peer(defined, GATED_DELTANET, exact=True),
    "Gated DeltaNet, fla": Peer(
        fla_of("gated_delta_rule", "naive_recurrent_gated_delta_rule", "g", "beta"), GATED_DELTANET
    ),
    "Gated DeltaNet, fla in chunks": Peer(
        fla_of("gated_delta_rule", "naive_chunk_gated_delta_rule", "g", "beta"), GATED_DELTANET
    ),
    "Gated DeltaNet, attn-gym": Peer(attn_gym("recurrent_gdn"), GATED_DELTANET, exact=True, transposed=True),
    "Gated DeltaNet, attn-gym in chunks": Peer(attn_gym("chunk_gdn"), GATED_DELTANET, exact=True, transposed=True),
    "Gated DeltaNet, transformers": Peer(transformers("torch_recurrent_gated_delta_rule"), GATED_DELTANET),
    "Gated DeltaNet, transformers in chunks": Peer(transformers("torch_chunk_gated_delta_rule"), GATED_DELTANET),
    "KDA, definition": Peer(defined, KDA, exact=True),
    "KDA, fla": Peer(fla_of("kda", "naive_recurrent_kda", "g", "beta"), KDA),
    "KDA, fla in chunks": Peer(fla_of("kda", "naive_chunk_kda", "g", "beta"), KDA),
    "KDA, attn-gym": Peer(attn_gym("recurrent_kda"), KDA, transposed=True),
    "KDA, attn-gym in chunks": Peer(attn_gym("chunk_kda"), KDA, transposed=True),
}


def differences(peer: Peer, dtype: torch.dtype) -> dict[str, float]:
    """Return the largest difference of outputs, states and gradients, each relative to its norm.

    A peer that is not exact computes in float32, from our inputs in `dtype`.
    """
    tensors, options = inputs(N, D, DV, *peer.kind, b=1, dtype=dtype, strongest=0.2)
    names = [name for name, t in options.items() if t is not None]
    arguments = [t.requires_grad_() for t in (*tensors, *(options[name] for name in names))]

    def call(*arguments):
        q, k, v, state, *rest = arguments if peer.exact else [t.float() for t in arguments]
        rest = [t if t.dim() == 1 else t.transpose(1, 2) for t in rest]
        given = dict(zip(names, rest, strict=True))
        state = state.mT if peer.transposed else state
        y, state = peer.call(*by_head(q, k, v), state, given.get("log_decay"), given.get("beta"))
        return y.transpose(1, 2), state.mT if peer.transposed else state

    ours, theirs = by_position(gated_linear_attention, names)(*arguments), call(*arguments)
    results = {name: [r[i] for r in (ours, theirs)] for i, name in enumerate(("output", "state"))}
    pairs = zip(gradients(ours, arguments), gradients(theirs, arguments), strict=True)
    of = {name: ((a - b).norm() / b.norm()).item() for name, (a, b) in results.items()}
    return of | {"gradients": max(((a - b).norm() / b.norm()).item() for a, b in pairs)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PEERS)
def test_peers_compute_the_same(name: str):
    peer = PEERS[name]
    for dtype in (torch.float32, torch.float64):
        most = rounding(dtype if peer.exact else torch.float32, N + D + DV, 4)
        found = differences(peer, dtype)
        print(f"| {name} | {dtype} | " + " | ".join(f"{difference:.1e}" for difference in found.values()) + " |")
        assert all(difference < most for difference in found.values()), (dtype, found)
