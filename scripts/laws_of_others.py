"""Write docs/laws-of-others.md: which laws modules of other packages keep, and which tools find ten planted bugs.

    make laws-of-others

The packages are those of the extra `laws`. Models are tiny and random, and compute on one thread of the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lit_effattn.laws import LAWS, Adapter, FunctionAdapter, check
from lit_effattn.laws.comparison import percent
from lit_effattn.laws.law import attempt
from lit_effattn.laws.subject import Subject
from scripts.adapters_of_others import EmformerAdapter, TinyAdapter, XTransformersAdapter

PAGE = Path(__file__).parents[1] / "docs" / "laws-of-others.md"
ARCHITECTURES = (
    *("mamba", "falcon_mamba", "mamba2", "jamba", "zamba", "zamba2", "bamba", "minimax", "rwkv", "recurrent_gemma"),
    *("qwen3_next", "qwen3_5_text", "olmo_hybrid", "falcon_h1", "granitemoehybrid", "lfm2", "nemotron_h"),
    *("kimi_linear", "bailing_hybrid", "xlstm", "gpt2", "llama"),
)
COLUMNS = {
    "alive": ("alive", ""),
    "no future": ("no-future", ""),
    "steps": ("steps", "kept-none"),
    "segments": ("segments", "kept-none"),
    "alone": ("alone", "alone"),
    "selected": ("select", ""),
    "padded": ("padding", ""),
    "ragged": ("ragged", "kept-none"),
    "generate": ("generation", "equal"),
    "generate, padded": ("generation", "padded"),
}
"""The columns of the tables: a law and its variant; "": the first."""


def result(law: str, variant: str, subject: Subject) -> str:
    """Return the cell of a law: `ok`, the largest relative difference, `raises`, or – without the law."""
    chosen = LAWS[law]
    if chosen.missing(subject) or (variant and variant not in chosen.variants(subject)):
        return "–"
    worst, raised = None, False
    for trial in chosen.trials(subject, variant or chosen.variants(subject)[0]):
        failure = attempt(chosen, subject, trial)
        if failure is None:
            continue
        if failure.difference.error is not None:
            raised = True
        elif failure.difference.relative is None:
            return "other shape" if "of shape" in str(failure.difference) else "broken"
        else:
            relative = failure.difference.relative
            worst = math.inf if relative != relative else max(worst or 0.0, relative)
    if worst is None:
        return "raises" if raised else "ok"
    return f"{_percent(worst)}, raises" if raised else _percent(worst)


def _percent(share: float) -> str:
    return "NaN" if share == math.inf else percent(share, 2)


def row(make: Callable[[], Adapter]) -> list[str]:
    """Return the cells of a module."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            subject = Subject(make())
            return [result(law, variant, subject) for law, variant in COLUMNS.values()]
    except Exception as error:  # a package's own code may raise any exception
        return [f"not built: {type(error).__name__}", *[""] * (len(COLUMNS) - 1)]


def table(first: str, rows: Iterator[tuple[str, list[str]]]) -> list[str]:
    """Return a table of Markdown."""
    lines = [f"| {first} | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, cells in rows:
        print(name, *cells, sep=" | ", flush=True)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


# --------------------------------------------------------------------------------------------------- x-transformers

DECODERS: dict[str, dict[str, Any]] = {
    "default": {},
    "rotary": {"rotary_pos_emb": True},
    "rotary_xpos": {"rotary_pos_emb": True, "rotary_xpos": True},
    "polar_pos_emb": {"polar_pos_emb": True},
    "alibi_pos_bias": {"alibi_pos_bias": True},
    "rel_pos_bias": {"rel_pos_bias": True},
    "attn_kv_heads": {"attn_kv_heads": 1},
    "attn_qk_norm": {"attn_qk_norm": True},
    "attn_talking_heads": {"attn_pre_talking_heads": True},
    "attn_num_mem_kv": {"attn_num_mem_kv": 2},
    "shift_tokens": {"shift_tokens": 1},
    "residual_attn": {"residual_attn": True},
    "gate_residual": {"gate_residual": True},
    "add_value_residual": {"add_value_residual": True},
    "num_residual_streams": {"num_residual_streams": 2},
    "macaron": {"macaron": True},
    "sandwich_norm": {"sandwich_norm": True},
    "attn_use_latent_kv": {"attn_use_latent_kv": True, "attn_dim_latent_kv": 16},
}


def decoder(options: dict[str, Any]) -> Any:
    """Build a decoder of x-transformers."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, verbose=False, **options)
    return TransformerWrapper(num_tokens=64, max_seq_len=1024, attn_layers=layers)


# --------------------------------------------------------------------------- functions of flash-linear-attention


class NaiveAdapter(FunctionAdapter):
    """A plain form of flash-linear-attention with a gate or β, (B, N, H, D): the laws' q, k, v give it too."""

    dtype = torch.float32  # they compute in float32

    @staticmethod
    def call(module: Any, x: torch.Tensor, state: Any = None, lengths: Any = None) -> Any:
        """Return the outputs of the heads side by side, and the state."""
        q, k, v = x.unflatten(-1, (3, 2, -1)).unbind(2)
        y, state = module(q, torch.nn.functional.normalize(k, dim=-1), v, state)
        return y.flatten(2), state


def naive_forms() -> dict[str, Callable[..., Any]]:
    """Return the plain forms that take and return a state, with their gates made from v and k."""
    from torch.nn.functional import logsigmoid

    forms: dict[str, Callable[..., Any]] = {}
    options = {"output_final_state": True}

    def add(name: str, build: Callable[[], Callable[..., Any]]) -> None:
        try:
            forms[name] = build()
        except ImportError:
            return

    def gla() -> Callable[..., Any]:
        from fla.ops.gla.naive import naive_recurrent_gla as f

        return lambda q, k, v, s: f(q, k, v, logsigmoid(v), initial_state=s, **options)

    def simple(name: str) -> Callable[..., Any]:
        import fla.ops.simple_gla.naive as naive

        f = getattr(naive, name)
        return lambda q, k, v, s: f(q, k, v, logsigmoid(v[..., 0]), initial_state=s, **options)

    def gated_delta(name: str) -> Callable[..., Any]:
        import fla.ops.gated_delta_rule.naive as naive

        f = getattr(naive, name)
        return lambda q, k, v, s: f(q, k, v, v[..., 1].sigmoid(), logsigmoid(v[..., 0]), initial_state=s, **options)

    def kda(name: str) -> Callable[..., Any]:
        import fla.ops.kda.naive as naive

        f = getattr(naive, name)
        return lambda q, k, v, s: f(q, k, v, logsigmoid(v), v[..., 1].sigmoid(), initial_state=s, **options)

    def delta() -> Callable[..., Any]:
        from fla.ops.delta_rule.naive import delta_rule_recurrence as f

        def heads_first(q: Any, k: Any, v: Any, s: Any) -> Any:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            y, s = f(q, k, v, v[..., 1].sigmoid(), initial_state=s)
            return y.transpose(1, 2), s

        return heads_first

    add("gla.naive_recurrent_gla", gla)
    for name in ("naive_recurrent_simple_gla", "naive_chunk_simple_gla"):
        add(f"simple_gla.{name}", partial(simple, name))
    for name in ("naive_recurrent_gated_delta_rule", "naive_chunk_gated_delta_rule"):
        add(f"gated_delta_rule.{name}", partial(gated_delta, name))
    for name in ("naive_recurrent_kda", "naive_chunk_kda"):
        add(f"kda.{name}", partial(kda, name))
    add("delta_rule.delta_rule_recurrence", delta)
    return forms


# ------------------------------------------------------------------------------------------------- other tools


def compared() -> list[str]:
    """Return the table of the planted bugs, and of the tools that find them."""
    from tests.laws.planted import Mixer, MixerAdapter
    from tests.laws.test_planted import BUGS

    tools = {
        "lit_effattn.laws": _with_laws,
        "pytest-torch": _with_pytest_torch,
        "causal-certificate": _with_certificate,
    }
    lines = [f"| bug | {' | '.join(tools)} |", "|---" * (len(tools) + 1) + "|"]
    seconds = dict.fromkeys(tools, 0.0)
    for bug in ["", *BUGS]:
        cells = []
        for name, tool in tools.items():
            start = time.monotonic()
            torch.manual_seed(1)
            cells.append(", ".join(tool(Mixer(4, bug), MixerAdapter(bug))) or "–")
            seconds[name] += time.monotonic() - start
        lines.append(f"| {bug or 'none'} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    lines.append(f"| seconds, all | {' | '.join(f'{s:.0f}' for s in seconds.values())} |")
    return lines


def _with_laws(mixer: Any, adapter: Adapter) -> list[str]:
    laws = [name for name in LAWS if not name.startswith("compiled")]
    return [f"`{r.law}`" for r in check(adapter, laws=laws, shrink_seconds=0).broken]


def _with_pytest_torch(mixer: Any, adapter: Adapter) -> list[str]:
    """Return the checks of pytest-torch that fail: all that apply to a causal module with a state."""
    import pytest_torch as tool

    mixer.eval()
    x = 2 * torch.randn(3, 35, 4, generator=torch.Generator().manual_seed(0))

    class Whole(torch.nn.Module):
        def __init__(self, mixer: torch.nn.Module) -> None:
            super().__init__()
            self.mixer = mixer

        def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
            valid = None if attention_mask is None else attention_mask.sum(1)
            return self.mixer(x, None, valid)[0]

    whole = Whole(mixer).eval()
    full = {"x": x, "attention_mask": torch.ones(3, 35, dtype=torch.long)}

    def new_whole() -> torch.nn.Module:
        return Whole(type(mixer)(4, mixer.bug)).eval()

    checks: dict[str, Callable[[], Any]] = {
        "streaming": lambda: tool.assert_streaming_equivalent(
            whole, mixer, x, init_state=lambda: mixer.empty(3, x), chunk_sizes=(1, 7, 32)
        ),
        "contract": lambda: _ok(tool.check_inference_contract(whole, x)),
        "padding": lambda: tool.assert_padding_invariant(whole, full, ids_key="x"),
        "autocast": lambda: tool.assert_autocast_parity(whole, x),
        "gradients": lambda: tool.assert_gradients_finite(whole, x, lambda y: y.square().mean()),
        "checkpoint": lambda: tool.assert_checkpoint_roundtrip(new_whole, x),
    }
    return _failing(checks)


def _ok(report: Any) -> None:
    assert report.ok, report


def _failing(checks: dict[str, Callable[[], Any]]) -> list[str]:
    failed = []
    for name, run in checks.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run()
        except AssertionError:
            failed.append(name)
        except Exception as error:  # shown, so that a wrong call is not counted as a bug that was found
            failed.append(f"({name}: {type(error).__name__})")
    return failed


def _with_certificate(mixer: Any, adapter: Adapter) -> list[str]:
    from causal_certificate import certify

    x = 2 * torch.randn(2, 19, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    report = certify(lambda x: mixer(x)[0], x) if mixer.double() else None
    leaks = {"temporal": report.temporal_leak, "cross-batch": report.crossbatch_leak}
    return [name for name, leak in leaks.items() if leak > report.threshold]


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="One architecture of transformers, or `tools`; nothing is written.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.only == "tools":
        print(*compared(), sep="\n")
        return
    if given.only:
        print(*table("", iter([(given.only, row(partial(TinyAdapter, given.only)))])), sep="\n")
        return
    PAGE.write_text("\n".join(page()) + "\n")


def page() -> list[str]:
    """Return the lines of the page."""
    packages = (
        "torch",
        "transformers",
        "x-transformers",
        "torchaudio",
        "fla-core",
        "pytest-torch",
        "causal-certificate",
    )
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    with PAGE.open() as file:
        head, _, rest = file.read().partition("<!-- figures -->")
    notes = rest.partition("<!-- notes -->")[2]
    from torchaudio.models import Emformer

    sys.modules["fla"] = None  # type: ignore[assignment]  # transformers would call its kernels, which need a GPU
    architectures = table("`model_type`", ((f"`{name}`", row(partial(TinyAdapter, name))) for name in ARCHITECTURES))
    del sys.modules["fla"]

    def emformer(memory: int) -> Adapter:
        build = partial(Emformer, 8, 2, 16, 2, 4, left_context_length=8, max_memory_size=memory)
        return EmformerAdapter(build, frames=4, d_input=8, dtype=torch.float32)

    return [
        head + "<!-- figures -->",
        "",
        f"Measured with {versions}, on one thread of a CPU, in float32.",
        "",
        "## transformers",
        "",
        "Each model has two layers of width 32, one of each kind in a hybrid.",
        "",
        *architectures,
        "",
        "## x-transformers",
        "",
        "`TransformerWrapper(attn_layers=Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, …))`, with the option "
        "of the row, and `input_not_include_cache=True`.",
        "",
        *table(
            "option",
            (
                (f"`{name}`", row(partial(XTransformersAdapter, partial(decoder, options))))
                for name, options in DECODERS.items()
            ),
        ),
        "",
        "## torchaudio's Emformer",
        "",
        "`forward` on the whole against `infer` on segments of 4 frames; a position is a segment.",
        "",
        *table("`max_memory_size`", ((str(n), row(partial(emformer, n))) for n in (0, 2))),
        "",
        "## flash-linear-attention",
        "",
        "The plain PyTorch forms of `fla.ops` that take and return a state; its Triton kernels are not measured.",
        "",
        *table(
            "function",
            ((f"`{name}`", row(partial(NaiveAdapter, f, name="f"))) for name, f in naive_forms().items()),
        ),
        "",
        "## Ten planted bugs, three tools",
        "",
        "`tests/laws/planted.py` is a module with one of ten bugs. A cell names the checks that fail. pytest-torch: "
        "`assert_streaming_equivalent` (chunks of 1, 7 and 32), `check_inference_contract`, "
        "`assert_padding_invariant`, `assert_autocast_parity`, `assert_gradients_finite`, "
        "`assert_checkpoint_roundtrip`. causal-certificate: `certify`, with all "
        "cuts. What is not on either list has no counterpart there: unequal splits, gradients through a state, "
        "selected rows, an input state that is changed, ragged prompts, combined states.",
        "",
        *compared(),
        "",
        "<!-- notes -->" + notes.rstrip(),
    ]


if __name__ == "__main__":
    main()
