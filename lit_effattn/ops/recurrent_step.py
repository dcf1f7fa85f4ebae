"""One position of a recurrence over matrices, as in generation: in PyTorch, and as one pass in compiled steps."""

from __future__ import annotations

import torch
from torch import Tensor


def recurrent_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    *,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Update sums of keys and values, and read them.

        S' = diag(a) S,  S_t = S' + k uᵀ,  y = S_tᵀ q,  u = v, or with the delta rule u = β (v − S'ᵀ k)

    Args:
        q: (B, H, 1, F), queries; all arguments are in one type.
        k: (B, H, 1, F), keys.
        v: (B, H, 1, D), values.
        s: (B, H, F, D), the sums before the position.
        decay: a, (B, H, 1, F or 1). None: 1.
        beta: β, (B, H, 1, 1). None: no delta rule.
        in_place: Whether to update `s` in place. Then nothing of its size is allocated.

    Returns:
        y (B, H, 1, D), and the sums after the position.
    """
    if in_place and len(s) > 1 and _in_machine_code(s):  # the sums of one row stay in the processor's caches
        return torch.ops.lit_effattn.recurrent_step(q, k, v, s, decay, beta), s
    if decay is not None:
        a = decay.mT
        s = s.mul_(a) if in_place else s * a
    u = v if beta is None else beta * (v - k @ s)
    s = s.addcmul_(k.mT, u) if in_place else torch.addcmul(s, k.mT, u)
    return q @ s, s


def _in_machine_code(s: Tensor) -> bool:
    """Return whether a compiled step is traced: only these are exported with a state that may be overwritten."""
    return torch.compiler.is_exporting() and s.device.type == "cpu" and s.dtype == torch.float32


def _in_pytorch(q: Tensor, k: Tensor, v: Tensor, s: Tensor, decay: Tensor | None, beta: Tensor | None) -> Tensor:
    return recurrent_step(q, k, v, s, decay=decay, beta=beta, in_place=True)[0]


torch.library.define(
    "lit_effattn::recurrent_step",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) s, Tensor? decay, Tensor? beta) -> Tensor",
)
torch.library.impl("lit_effattn::recurrent_step", "cpu", _in_pytorch)
torch.library.register_fake("lit_effattn::recurrent_step", lambda q, k, v, *_: v.new_empty(v.shape))


OPERATOR = torch.ops.lit_effattn.recurrent_step.default

FUNCTION = """
__attribute__((optimize("O3", "fp-contract=fast")))
AOTITorchError aoti_torch_cpu_recurrent_step(
    AtenTensorHandle q_tensor, AtenTensorHandle k_tensor, AtenTensorHandle v_tensor, AtenTensorHandle s_tensor,
    AtenTensorHandle* decay_tensor, AtenTensorHandle* beta_tensor, AtenTensorHandle* y_tensor) {
  struct Heads {  // (B, H, 1, N) of any strides; N may be 1 for any number
    const float* p = nullptr;
    int64_t b, h, n;

    bool read(AtenTensorHandle tensor) {
      void* data;
      int64_t *sizes, *strides;
      if (aoti_torch_get_data_ptr(tensor, &data) || aoti_torch_get_sizes(tensor, &sizes) ||
          aoti_torch_get_strides(tensor, &strides))
        return false;
      p = (const float*)data, b = strides[0], h = strides[1], n = sizes[3] == 1 ? 0 : strides[3];
      return true;
    }

    void copy(int64_t row, int64_t head, int64_t count, float* to) const {
      const float* from = p + row * b + head * h;
      for (int64_t i = 0; i < count; ++i) to[i] = from[i * n];
    }
  } q, k, v, decay, beta;
  typedef float V __attribute__((vector_size(32), aligned(4)));
  enum { lanes = 8 };

  void *s_data, *y_data;
  int64_t* sizes;
  if (!q.read(q_tensor) || !k.read(k_tensor) || !v.read(v_tensor) || (decay_tensor && !decay.read(*decay_tensor)) ||
      (beta_tensor && !beta.read(*beta_tensor)) || aoti_torch_get_sizes(s_tensor, &sizes) ||
      aoti_torch_get_data_ptr(s_tensor, &s_data))
    return AOTI_TORCH_FAILURE;
  const int64_t batch = sizes[0], heads = sizes[1], F = sizes[2], D = sizes[3];
  const int64_t shape[] = {batch, heads, 1, D}, strides[] = {heads * D, D, D, 1};
  if (aoti_torch_empty_strided(4, shape, strides, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0,
                               y_tensor) ||
      aoti_torch_get_data_ptr(*y_tensor, &y_data))
    return AOTI_TORCH_FAILURE;

#pragma omp parallel if (batch * heads * F * D > 65536)
  {
    float* const room = new float[3 * F + D];
    float *const Q = room, *const K = Q + F, *const a = K + F, *const u = a + F;
    for (int64_t i = 0; i < F; ++i) a[i] = 1;
#pragma omp for
    for (int64_t row = 0; row < batch * heads; ++row) {
      const int64_t b = row / heads, h = row % heads;
      float *const S = (float*)s_data + row * F * D, *const y = (float*)y_data + row * D;
      q.copy(b, h, F, Q);
      k.copy(b, h, F, K);
      v.copy(b, h, D, u);
      if (decay.p) decay.copy(b, h, F, a);
      if (beta.p) {
        const float strength = beta.p[b * beta.b + h * beta.h];
        for (int64_t i = 0; i < F; ++i) {
          const float weight = K[i] * a[i], *const s = S + i * D;
          int64_t j = 0;
          for (; j + lanes <= D; j += lanes) *(V*)(u + j) -= weight * *(const V*)(s + j);
          for (; j < D; ++j) u[j] -= weight * s[j];
        }
        for (int64_t j = 0; j < D; ++j) u[j] *= strength;
      }
      for (int64_t j = 0; j < D; ++j) y[j] = 0;
      for (int64_t i = 0; i < F; ++i) {
        float* const s = S + i * D;
        int64_t j = 0;
        for (; j + lanes <= D; j += lanes) {
          const V next = *(V*)(s + j) * a[i] + K[i] * *(V*)(u + j);
          *(V*)(s + j) = next;
          *(V*)(y + j) += next * Q[i];
        }
        for (; j < D; ++j) y[j] += (s[j] = s[j] * a[i] + K[i] * u[j]) * Q[i];
      }
    }
    delete[] room;
  }
  return AOTI_TORCH_SUCCESS;
}
"""
"""C++ of the operator for AOTInductor, which reads and writes each number of S once."""
