"""Pure functions on queries, keys and values: the mathematics, without parameters, projections or states."""

from lit_effattn.ops.favor import causal_favor, favor, favor_step
from lit_effattn.ops.linear import causal_linear_attention, linear_attention, linear_attention_step
from lit_effattn.ops.relative import attention_by_distance, relative_attention, relative_shift, sinusoids
from lit_effattn.ops.sparse import fixed_attention, strided_attention, summary_positions
from lit_effattn.ops.window import windowed_attention

__all__ = [
    "attention_by_distance",
    "causal_favor",
    "causal_linear_attention",
    "favor",
    "favor_step",
    "fixed_attention",
    "linear_attention",
    "linear_attention_step",
    "relative_attention",
    "relative_shift",
    "sinusoids",
    "strided_attention",
    "summary_positions",
    "windowed_attention",
]
