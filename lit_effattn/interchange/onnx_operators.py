"""Our operators as ONNX's `LinearAttention` and `CausalConvWithState`, which opset 27 defines.

onnxruntime has the same two in its own domain, with kernels. Heads (B, H, N, D) are packed as (B, N, H D) there, and
channels precede positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lit_effattn.attention.base import Attention
from lit_effattn.attention.linear import LinearAttention
from lit_effattn.attention.recurrent import RecurrentAttention

OPERATORS = ("opset18", "opset27", "onnxruntime")
"""Those of opset 18, those of opset 27, and the two of onnxruntime's domain beside those of `REGISTERED`."""

DEFAULT = OPERATORS[0]
"""Every runtime has these. Files with them read one token in a call, the rest any number."""

REGISTERED = 23
"""The opset of PyTorch's translations, with operators for RMSNorm and GELU."""

_OPSET = 27
_RUNTIME = "com.microsoft"


def check_operators(operators: str, kinds: Sequence[Attention]) -> None:
    """Check that `kinds` can be written with `operators`.

    Raises:
        ValueError: If onnx is too old, or there is no attention, or one that the two operators do not express.
    """
    import onnx

    newest = onnx.defs.onnx_opset_version()
    if newest < _OPSET:
        raise ValueError(
            f"operators={operators} needs an onnx that has opset {_OPSET}, but onnx {onnx.__version__} ends with "
            f"{newest}: pip install -U onnx onnxruntime"
        )
    unsupported = dict.fromkeys(
        type(kind).__name__ for kind in kinds if not isinstance(kind, LinearAttention | RecurrentAttention)
    )
    if unsupported or not kinds:
        raise ValueError(
            f"operators={operators} is for LinearAttention and the kinds of RecurrentAttention, not for "
            f"{', '.join(unsupported) or 'a model without attention'}; leave it out"
        )


def translations() -> dict[Any, Any]:
    """Return the functions for `torch.onnx.export`, which write the two operators of onnxruntime's domain."""
    operators = torch.ops.lit_effattn
    return {
        operators.gated_linear.default: _gated_linear,
        operators.short_convolution.default: _short_convolution,
        torch.ops.aten.softplus.default: _softplus,
    }


def shorten(model: Any) -> None:
    """Merge successive transpositions and successive changes of shape, and name the number of tokens."""
    from onnx_ir.passes.common import IdentityEliminationPass
    from onnxscript import rewriter
    from onnxscript.rewriter.rules import common

    rules = (common.materialize_reshape_shape_rule, common.transpose_transpose_rule, common.reshape_reshape_rule)
    rewriter.rewrite(model, rules)
    IdentityEliminationPass()(model)
    n_tokens = model.graph.inputs[0].shape[1]
    for value in (*model.graph.inputs, *(output for node in model.graph for output in node.outputs)):
        for i, size in enumerate(value.shape or ()):
            if size == n_tokens:
                value.shape[i] = "n_tokens"


def use_opset(model: Any) -> None:
    """Replace onnxruntime's two operators by those of opset 27.

    The other operators are the same in opset 27 as in `REGISTERED`.
    """
    for node in model.graph:
        if node.domain == _RUNTIME:
            node.domain = ""
    del model.opset_imports[_RUNTIME]
    model.opset_imports[""] = _OPSET


def _operator(name: str) -> Any:
    """Return the operator of onnxruntime's domain, whose inputs, outputs and attributes are those of opset 27."""
    import onnx
    import onnxscript

    of_onnx = onnx.defs.get_schema(name, _OPSET)
    schema = onnx.defs.OpSchema(
        name,
        _RUNTIME,
        1,
        inputs=of_onnx.inputs,
        outputs=of_onnx.outputs,
        type_constraints=[(c.type_param_str, c.allowed_type_strs, c.description) for c in of_onnx.type_constraints],
        attributes=list(of_onnx.attributes.values()),
    )
    return onnxscript.values.Op(onnxscript.values.Opset(_RUNTIME, 1), name, schema)


def _gated_linear(
    q: Any, k: Any, v: Any, state: Any, log_decay: Any, beta: Any, lengths: Any, chunk_size: int, form: str
) -> tuple[Any, Any]:
    """Translate `gated_linear_attention`."""
    import onnxscript

    op: Any = onnxscript.opset18
    n_heads = state.shape[1]

    def of_type(t: Any) -> Any:
        return t if t.dtype == state.dtype else op.CastLike(t, state)

    def packed(t: Any) -> Any:
        """(B, H, N, D) -> (B, N, H D)."""
        return op.Reshape(op.Transpose(of_type(t), perm=[0, 2, 1, 3]), op.Constant(value_ints=[0, 0, -1]))

    rule = ("linear" if log_decay is None else "gated") if beta is None else "delta"
    if rule == "delta" and log_decay is not None:
        rule = "gated_delta"
    y, state = _operator("LinearAttention")(
        packed(q),
        packed(k),
        packed(v),
        state,
        None if log_decay is None else packed(log_decay),
        None if beta is None else op.Transpose(of_type(beta), perm=[0, 2, 1]),
        update_rule=rule,
        q_num_heads=n_heads,
        kv_num_heads=n_heads,
        scale=1.0,
    )
    y = op.Reshape(y, op.Constant(value_ints=[0, 0, n_heads, -1]))
    return op.Transpose(y, perm=[0, 2, 1, 3]), state


def _short_convolution(x: Any, recent: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
    """Translate `short_convolution`."""
    import onnxscript

    op: Any = onnxscript.opset18
    k, channels = weight.shape
    newest_last = op.Gather(weight, op.Constant(value_ints=[*reversed(range(k))]), axis=0)  # (K, C)
    y, recent = _operator("CausalConvWithState")(
        op.Transpose(x, perm=[0, 2, 1]),
        op.Reshape(op.Transpose(newest_last, perm=[1, 0]), op.Constant(value_ints=[channels, 1, k])),
        bias,
        op.Transpose(recent, perm=[0, 2, 1]),
    )
    return op.Transpose(y, perm=[0, 2, 1]), op.Transpose(recent, perm=[0, 2, 1])


def _softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """Translate torch.nn.functional.softplus as one operator. PyTorch's own translation also has the threshold."""
    import onnxscript

    if (beta, threshold) != (1, 20):
        raise NotImplementedError(
            f"softplus with beta={beta}, threshold={threshold} is supported with operators=opset18 only"
        )
    op: Any = onnxscript.opset18
    return op.Softplus(x)
