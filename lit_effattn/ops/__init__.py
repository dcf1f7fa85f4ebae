"""Pure functions on queries, keys and values: the mathematics, without parameters, projections or states."""

from lit_effattn.ops.linear import causal_linear_attention, linear_attention, linear_attention_step
from lit_effattn.ops.window import windowed_attention

__all__ = ["causal_linear_attention", "linear_attention", "linear_attention_step", "windowed_attention"]
