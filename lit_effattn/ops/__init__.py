"""Pure functions of queries, keys and values, without parameters, projections or module states."""

from lit_effattn.ops.continuous import evaluate_signal, expected_basis, fit_matrix, normal_masses, quantiles
from lit_effattn.ops.favor.pytorch import causal_favor, favor, favor_step
from lit_effattn.ops.linear.pytorch import causal_linear_attention, linear_attention, linear_attention_step
from lit_effattn.ops.relative import attention_by_distance, relative_attention, relative_shift, sinusoids
from lit_effattn.ops.sparse import fixed_attention, strided_attention, summary_positions
from lit_effattn.ops.window import windowed_attention

__all__ = [
    "attention_by_distance",
    "causal_favor",
    "causal_linear_attention",
    "evaluate_signal",
    "expected_basis",
    "favor",
    "favor_step",
    "fit_matrix",
    "fixed_attention",
    "linear_attention",
    "linear_attention_step",
    "normal_masses",
    "quantiles",
    "relative_attention",
    "relative_shift",
    "sinusoids",
    "strided_attention",
    "summary_positions",
    "windowed_attention",
]
