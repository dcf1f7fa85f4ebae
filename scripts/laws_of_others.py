"""Write the figures of docs/laws-of-others.md: which laws modules of other packages keep.

    make laws-of-others

The packages are those of the extra `laws`. Models are tiny and random, and compute on one thread of the CPU.
"""

import argparse
import contextlib
import io
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from lit_effattn.laws import LAWS, Adapter, FunctionAdapter
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


GATES: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "gla": lambda v: (logsigmoid(v),),
    "simple_gla": lambda v: (logsigmoid(v[..., 0]),),
    "gated_delta_rule": lambda v: (v[..., 1].sigmoid(), logsigmoid(v[..., 0])),
    "kda": lambda v: (logsigmoid(v), v[..., 1].sigmoid()),
    "delta_rule": lambda v: (v[..., 1].sigmoid(),),
}
"""The arguments after q, k and v of each operation, made from v."""

NAIVE = (
    *("gla.naive_recurrent_gla", "simple_gla.naive_recurrent_simple_gla", "simple_gla.naive_chunk_simple_gla"),
    *("gated_delta_rule.naive_recurrent_gated_delta_rule", "gated_delta_rule.naive_chunk_gated_delta_rule"),
    *("kda.naive_recurrent_kda", "kda.naive_chunk_kda", "delta_rule.delta_rule_recurrence"),
)
"""The plain forms that take and return a state."""


def naive(name: str) -> Callable[..., Any]:
    """Return a plain form as a function of q, k, v and the state."""
    operation, _, function = name.partition(".")
    form = getattr(import_module(f"fla.ops.{operation}.naive"), function)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: Any) -> Any:
        if operation == "delta_rule":  # heads come first
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            y, state = form(q, k, v, *GATES[operation](v), initial_state=state)
            return y.transpose(1, 2), state
        return form(q, k, v, *GATES[operation](v), initial_state=state, output_final_state=True)

    return call


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="One architecture of transformers; nothing is written.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.only:
        print(*table("", iter([(given.only, row(partial(TinyAdapter, given.only)))])), sep="\n")
        return
    PAGE.write_text("\n".join(page()) + "\n")


def page() -> list[str]:
    """Return the lines of the page."""
    packages = ("torch", "transformers", "x-transformers", "torchaudio", "fla-core")
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
            ((f"`{name}`", row(lambda name=name: NaiveAdapter(naive(name), name="f"))) for name in NAIVE),
        ),
        "",
        "<!-- notes -->" + notes.rstrip(),
    ]


if __name__ == "__main__":
    main()
