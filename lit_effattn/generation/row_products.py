"""Products of one row with a matrix, in compiled steps.

    y = W x + b,  W (N, K) row-major float32

MKL multiplies a vector on one thread, and on AMD's processors with code for old ones, in twice the time in which the
weights can be read. `options` are those of AOTInductor that put a function for such products into the library.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

SHIMS = "aot_inductor.custom_ops_to_c_shims"
"""AOTInductor's option of operators' C++ functions, which it calls C shims."""

_NAME = "lit_effattn::row_product"
_ATEN = torch.ops.aten

torch.library.define(_NAME, "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
torch.library.impl(_NAME, "CPU", lambda x, weight, bias: F.linear(x, weight, bias))
torch.library.register_fake(_NAME, lambda x, weight, bias: x.new_empty(1, weight.size(0)))

FUNCTION = """
__attribute__((target("avx2,fma"), optimize("O3")))
AOTITorchError aoti_torch_cpu_row_product(
    AtenTensorHandle x_tensor, AtenTensorHandle weight, AtenTensorHandle* bias, AtenTensorHandle* y_tensor) {
  typedef float V __attribute__((vector_size(32), aligned(4)));
  enum { lanes = 8, sums = 4, step = lanes * sums, ahead = 1024 };  // in numbers; W is fetched `ahead` before its use

  void *x_data, *w_data, *b_data = nullptr, *y_data;
  int64_t* sizes;
  if (aoti_torch_get_sizes(weight, &sizes) || aoti_torch_get_data_ptr(x_tensor, &x_data) ||
      aoti_torch_get_data_ptr(weight, &w_data) || (bias && aoti_torch_get_data_ptr(*bias, &b_data)))
    return AOTI_TORCH_FAILURE;
  const int64_t n = sizes[0], k = sizes[1], shape[] = {1, n}, strides[] = {n, 1};
  if (aoti_torch_empty_strided(2, shape, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0,
                               y_tensor) ||
      aoti_torch_get_data_ptr(*y_tensor, &y_data))
    return AOTI_TORCH_FAILURE;
  const float *x = (const float*)x_data, *w = (const float*)w_data, *b = (const float*)b_data;
  float* y = (float*)y_data;

  // W is read once, in the order of memory: the processor then fetches it fastest.
  for (int64_t i = 0; i < n; ++i, w += k) {
    V parts[sums] = {};
    int64_t j = 0;
    for (; j + step <= k; j += step) {
      for (int p = 0; p < sums; ++p) parts[p] += *(const V*)(x + j + p * lanes) * *(const V*)(w + j + p * lanes);
      for (int p = 0; p < step; p += 16) __builtin_prefetch(w + j + ahead + p);  // 16 numbers are a cache line
    }
    for (; j + lanes <= k; j += lanes) parts[0] += *(const V*)(x + j) * *(const V*)(w + j);
    const V total = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    float sum = b ? b[i] : 0.f;
    for (int l = 0; l < lanes; ++l) sum += total[l];
    for (; j < k; ++j) sum += x[j] * w[j];
    y[i] = sum;
  }
  return AOTI_TORCH_SUCCESS;
}
"""
"""C++, for x86 with AVX2 and a compiler that has GCC's vectors."""


def options() -> dict[str, Any]:
    """Return options of AOTInductor: nothing, where `FUNCTION` can't be compiled."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return {}
    operator = torch.ops.lit_effattn.row_product.default
    return {
        "post_grad_custom_post_pass": replace_products,
        SHIMS: {operator: [FUNCTION]},
    }


def replace_products(graph: Graph) -> None:
    """Replace the products of one row with a transposed matrix in a graph of inductor by `lit_effattn::row_product`."""
    for node in list(graph.nodes):
        if (arguments := _row_product(node)) is not None:
            with graph.inserting_before(node):
                product = graph.call_function(torch.ops.lit_effattn.row_product.default, arguments)
            product.meta = dict(node.meta)
            node.replace_all_uses_with(product)
            graph.erase_node(node)


def _row_product(node: Node) -> tuple[Any, ...] | None:
    """Return x (1, K), W (N, K) and b of N numbers or None, if `node` is x Wᵀ + b; else None."""
    if node.kwargs or node.target not in (_ATEN.mm.default, _ATEN.addmm.default):
        return None
    arguments: Any = node.args
    *bias, x, transposed = arguments
    if transposed.target is not _ATEN.permute.default or list(transposed.args[1]) != [1, 0]:
        return None
    weight, bias = transposed.args[0], bias[0] if bias else None
    row, matrix = x.meta["val"], weight.meta["val"]
    is_row = row.size(0) == 1 and row.stride(1) == 1 and matrix.is_contiguous()
    fits = bias is None or (bias.meta["val"].numel() == matrix.size(0) and bias.meta["val"].stride(-1) == 1)
    is_float = all(t is None or t.meta["val"].dtype == torch.float32 for t in (x, weight, bias))
    return (x, weight, bias) if is_row and fits and is_float else None
