"""Our operators as ONNX's own `LinearAttention` and `CausalConvWithState`, which opset 27 defines.

Heads (B, H, N, D) are packed as (B, N, H D) there, and channels precede positions.
"""

from collections.abc import Sequence
from typing import Any

import torch

from lit_effattn.attention.base import Attention
from lit_effattn.attention.linear import LinearAttention
from lit_effattn.attention.recurrent import RecurrentAttention

REGISTERED = 23  # the opset of PyTorch's translations, with operators for RMSNorm and GELU
OPSET = 27  # the first opset with the two operators

_RUNTIME = (1, 32)
"""The onnxruntime with which opset 27 was tested. 1.23, the last for Python 3.10, lacks it."""

_DOMAIN = "lit_effattn"
"""The two operators are of this domain until `use_opset`, since the exporter knows no opset above `REGISTERED`."""


def available(kinds: Sequence[Attention]) -> bool:
    """Return whether the installed packages have opset 27, and its operators express all of `kinds`."""
    import onnx
    import onnxruntime

    runtime = tuple(map(int, onnxruntime.__version__.split(".")[:2]))
    expressed = bool(kinds) and all(isinstance(kind, LinearAttention | RecurrentAttention) for kind in kinds)
    return expressed and onnx.defs.onnx_opset_version() >= OPSET and runtime >= _RUNTIME


def translations() -> dict[Any, Any]:
    """Return the functions for `torch.onnx.export`, which write the two operators."""
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
    """Let the model import opset 27 alone. Its other operators are the same as those of `REGISTERED`."""
    for node in model.graph:
        if node.domain == _DOMAIN:
            node.domain = ""
    del model.opset_imports[_DOMAIN]
    model.opset_imports[""] = OPSET


def _operator(name: str) -> Any:
    """Return the operator of opset 27, of `_DOMAIN`."""
    import onnx
    import onnxscript

    of_onnx = onnx.defs.get_schema(name, OPSET)
    schema = onnx.defs.OpSchema(
        name,
        _DOMAIN,
        1,
        inputs=of_onnx.inputs,
        outputs=of_onnx.outputs,
        type_constraints=[(c.type_param_str, c.allowed_type_strs, c.description) for c in of_onnx.type_constraints],
        attributes=list(of_onnx.attributes.values()),
    )
    return onnxscript.values.Op(onnxscript.values.Opset(_DOMAIN, 1), name, schema)


def _gated_linear(
    q: Any, k: Any, v: Any, state: Any, log_decay: Any, beta: Any, lengths: Any, chunk_size: int, form: str
) -> tuple[Any, Any]:
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
    """Translate torch.nn.functional.softplus. PyTorch's own translation also has the threshold, above which it is x."""
    import onnxscript

    op: Any = onnxscript.opset18
    if beta == 1:
        return op.Softplus(x)
    scale = op.CastLike(op.Constant(value_float=beta), x)
    return op.Div(op.Softplus(op.Mul(x, scale)), scale)
