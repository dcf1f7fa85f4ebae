// Causal linear attention on the CPU, forward and backward (Katharopoulos et al. 2020, equations 7 and 16 to 20).
//
// Letters are those of `causal_linear_attention` in pytorch.py. A thread computes a head of a
// row.

#include "../runtime/gemm_tiles.hpp"

namespace {

Index forward_room(Index F, Index D) { return F * D + F + 2 * C * F + C * (F + D) + C * D + C * C + C + 16; }

template <Map map>
void forward_row(const Sizes& sizes, Head q, Head k, Head v, float* s, float* z, Head out, float eps, Room& room) {
  const auto [n, f, d, F, D] = sizes;
  float *S = room.take(F * D), *Z = room.take(F), *above = room.take(C), *A = room.take(C * C);
  float *q_room = room.take(C * F), *k_room = room.take(C * F), *v_room = room.take(C * D);
  float *const Qt = room.take(C * (F + D)), *const Y = Qt;  // Y after the last use of Qt
  read_matrix(f, d, s, F, D, S);
  read_matrix(1, f, z, 1, F, Z);
  Ahead ahead;
  for (Index i0 = 0; i0 < n; i0 += C) {
    const Index rows = at_most(C, n - i0), next = at_most(C, n - i0 - rows);
    ahead.restart();
    ahead.add(out.part(i0, rows, WRITE));
    for (const Head* t : {&q, &k, &v}) ahead.add(t->part(i0 + rows, next));
    const Rows Q = view<map>(q, i0, rows, F, q_room), V = view(v, i0, rows, D, v_room);
    const Rows K = view<map>(k, i0, rows, F, k_room);

    transpose(C, F, Q, Qt, C);  // (F, C)
    for (Index j = 0; j < C; j += W) {  // A[j, i] = k_j . q_i where j <= i
      multiply(ahead, W, C - j, F, {K.p + j * K.row, K.row, 1}, Qt + j, C, A + j * C + j, C, SET);
      for (int r = 0; r < W; ++r) {
        float* a = A + (j + r) * C + j;
        store(a, only(places() >= (Bits{} + r), load(a)));
      }
    }
    for (Index i = 0; i < C; i += W) {
      Vector parts[4] = {all(eps)};  // several, so that no addition waits for another
      for (Index c = 0; c < F; c += 4)
        for (int p = 0; p < 4; ++p) parts[p] += Z[c + p] * load(Qt + (c + p) * C + i);
      for (Index j = 0; j < i + W; j += 4)
        for (int p = 0; p < 4; ++p) parts[p] += load(A + (j + p) * C + i);
      store(above + i, 1.f / ((parts[0] + parts[1]) + (parts[2] + parts[3])));
    }
    multiply(ahead, C, D, F, {Q.p, Q.row, 1}, S, D, Y, D, SET);
    multiply_lower(D, {A, 1, C}, V, Y, D);
    write(out, i0, rows, D, Y, above);

    multiply(ahead, F, D, C, {K.p, 1, K.row}, V.p, V.row, S, D, ADD);
    add_rows(F, K, nullptr, Z);
  }
  copy_matrix(f, d, S, D, s, d);
  std::memcpy(z, Z, sizeof(float) * f);
}

Index backward_room(Index n, Index F, Index D) {
  return F * D + F + 3 * C * F + 2 * C * D + 2 * C * (F + D) + 2 * C * C + 2 * (n + C + 16) + 16;
}

// From g_s and g_z after the last position to those before the first. With x_i = g_i / denominator_i:
//   dq_i = S_i x_i + y_i z_i,  y_i = -q_i . S_i x_i / denominator_i,  dk_j = R_j v_j + r_j,  dv_j = R_j^T k_j
template <Map map>
void backward_row(const Sizes& sizes, Head g, Head q, Head k, Head v, const float* s, const float* z, Head g_q,
                  Head g_k, Head g_v, float* g_s, float* g_z, float eps, Room& room) {
  const auto [n, f, d, F, D] = sizes;
  float *S = room.take(F * D), *Z = room.take(F), *A = room.take(C * C), *G = room.take(C * C);
  float *q_room = room.take(C * F), *k_room = room.take(C * F), *v_room = room.take(C * D), *x_room = room.take(C * D);
  // Few buffers, so that the sums stay in the first-level cache: each is used for several things in turn.
  float *one = room.take(C * (F + D)), *two = room.take(C * (F + D)), *three = room.take(C * F);
  float *above = room.take(n + C), *y = room.take(n + C);  // last: n differs by row, and the others keep their zeros
  Ahead ahead;

  // Forward, for dq: S is stored as (D, F).
  float *const sums = three, *const T = one;
  read_transposed(f, d, s, F, D, S);
  read_matrix(1, f, z, 1, F, Z);
  float* Vt = two;
  for (Index i0 = 0; i0 < n; i0 += C) {
    const Index rows = at_most(C, n - i0), next = at_most(C, n - i0 - rows);
    ahead.restart();
    ahead.add(g_q.part(i0, rows, WRITE));
    for (const Head* t : {&q, &k, &v, &g}) ahead.add(t->part(i0 + rows, next));
    const Rows Q = view<map>(q, i0, rows, F, q_room), V = view(v, i0, rows, D, v_room);
    const Rows G_ = view(g, i0, rows, D, x_room);  // not divided yet: the products are divided
    const Rows K = view<map>(k, i0, rows, F, k_room);

    for (Index j = 0; j < F; j += W) {  // z_i
      Vector x = load(Z + j);
      for (Index i = 0; i < C; ++i) store(sums + i * F + j, x += load(K.p + i * K.row + j));
      store(Z + j, x);
    }
    dot_rows(F, Q, {sums, F}, above + i0);
    for (Index i = i0; i < i0 + C; ++i) above[i] = i < n ? 1 / (above[i] + eps) : 0;

    transpose(C, D, V, Vt, C);  // (D, C)
    for (Index i = 0; i < C; i += W) {  // G[i, j] = g_i . v_j where j <= i
      multiply(ahead, W, i + W, D, {G_.p + i * G_.row, G_.row, 1}, Vt, C, G + i * C, C, SET);
      for (int r = 0; r < W; ++r) {
        float* to = G + (i + r) * C + i;
        store(to, only(places() <= (Bits{} + r), load(to)));
      }
    }
    multiply(ahead, C, F, D, {G_.p, G_.row, 1}, S, F, T, F, SET);
    multiply_lower(F, {G, C, 1}, K, T, F);  // S_i g_i
    dot_rows(F, Q, {T, F}, y + i0);
    for (Index i = 0; i < rows; ++i) {
      const float scale = above[i0 + i];  // x_i = scale g_i; two factors, since scale^2 may be infinite
      y[i0 + i] = y[i0 + i] * scale * -scale;
      const Vector weight = all(scale), of_sum = all(y[i0 + i]);
      for (Index j = 0; j < f; j += W) {
        Vector x = load(T + i * F + j) * weight + load(sums + i * F + j) * of_sum;
        if (map == ELU) x *= less(load(Q.p + i * Q.row + j), all(1.f));
        put(g_q, i0 + i, j, x);
      }
    }
    multiply(ahead, D, F, C, {Vt, C, 1}, K.p, K.row, S, F, ADD);
  }

  // Backward, for dk and dv: R is stored as (F, D) in place of S, r in place of z.
  float *const R_ = S, *const r_ = Z, *const Kt = one, *const U = one, *const dK = three, *const O = two;
  read_matrix(f, d, g_s, F, D, R_);
  std::memcpy(r_, g_z, sizeof(float) * f);
  for (Index i0 = (n + C - 1) / C * C - C; i0 >= 0; i0 -= C) {
    const Index rows = at_most(C, n - i0);
    ahead.restart();
    for (const Head* t : {&g_k, &g_v}) ahead.add(t->part(i0, rows, WRITE));
    if (i0 > 0)
      for (const Head* t : {&q, &k, &v, &g}) ahead.add(t->part(i0 - C, C));
    const Rows Q = view<map>(q, i0, rows, F, q_room), V = view(v, i0, rows, D, v_room);
    const Rows K = view<map>(k, i0, rows, F, k_room);
    read(g, i0, rows, D, x_room, above + i0);
    const Rows X = {x_room, D};

    transpose(C, F, K, Kt, C);  // (F, C)
    transpose(C, D, V, Vt, C);  // (D, C)
    for (Index i = 0; i < C; i += W) {  // A[i, j] = q_i . k_j and G[i, j] = x_i . v_j + y_i where j <= i
      multiply(ahead, W, i + W, F, {Q.p + i * Q.row, Q.row, 1}, Kt, C, A + i * C, C, SET);
      multiply(ahead, W, i + W, D, {X.p + i * D, D, 1}, Vt, C, G + i * C, C, SET);
      for (int r = 0; r < W; ++r) {
        float *a = A + (i + r) * C, *b = G + (i + r) * C;
        const Bits mask = places() <= (Bits{} + r);
        store(a + i, only(mask, load(a + i)));
        for (Index j = 0; j <= i; j += W) store(b + j, load(b + j) + y[i0 + i + r]);
        store(b + i, only(mask, load(b + i)));
      }
    }
    multiply(ahead, F, C, D, {R_, D, 1}, Vt, C, dK, C, SET);  // dk, as (F, C)
    const Place to_k = place(g_k, i0, map == NONE ? rows : 0, F, U);
    transpose(F, C, {dK, C}, to_k.p, to_k.row, r_);
    multiply_upper(F, {G, 1, C}, Q, to_k.p, to_k.row);
    if (to_k.p == U) write<map>(g_k, i0, rows, F, U, nullptr, K.p);

    const Place to_v = place(g_v, i0, rows, D, O);
    multiply(ahead, C, D, F, {K.p, K.row, 1}, R_, D, to_v.p, to_v.row, SET);
    multiply_upper(D, {A, 1, C}, X, to_v.p, to_v.row);
    if (to_v.p == O) write(g_v, i0, rows, D, O);

    multiply(ahead, F, D, C, {Q.p, 1, Q.row}, X.p, D, R_, D, ADD);
    add_rows(F, Q, y + i0, r_);
  }
  copy_matrix(f, d, R_, D, g_s, d);
  std::memcpy(g_z, r_, sizeof(float) * f);
}

}  // namespace

// Called by pytorch.py.
extern "C" {

// s and z: before the first position, overwritten with those after the last. lengths: valid positions; the outputs and
// gradients of padding are 0. lengths may be null.
void forward(Index batch, Index heads, Index n, Heads q, Heads k, Heads v, float* s, float* z, const Index* lengths,
             float eps, Heads out, int elu, int threads) {
  const Index f = k.width, d = v.width, F = padded(f), D = padded(d);
  in_large_pages(out, batch * heads * n * d);
  each_head(batch, heads, n, lengths, threads, forward_room(F, D), [&](Index b, Index h, Index valid, Room& room) {
    const Index row = b * heads + h;
    const Sizes sizes = {valid, f, d, F, D};
    clear(out.row(b, h), valid, n);
    (elu ? forward_row<ELU> : forward_row<NONE>)(
        sizes, q.row(b, h), k.row(b, h), v.row(b, h), s + row * f * d, z + row * f, out.row(b, h), eps, room);
  });
}

// g_s and g_z: those after the last position, overwritten with those before the first.
void backward(Index batch, Index heads, Index n, Heads g, Heads q, Heads k, Heads v, const float* s, const float* z,
              const Index* lengths, float eps, Heads g_q, Heads g_k, Heads g_v, float* g_s, float* g_z, int elu,
              int threads) {
  const Index f = k.width, d = v.width, F = padded(f), D = padded(d);
  for (const Heads& t : {g_q, g_k, g_v}) in_large_pages(t, batch * heads * n * t.width);
  each_head(batch, heads, n, lengths, threads, backward_room(n, F, D), [&](Index b, Index h, Index valid, Room& room) {
    const Index row = b * heads + h;
    const Sizes sizes = {valid, f, d, F, D};
    for (const Heads& t : {g_q, g_k, g_v}) clear(t.row(b, h), valid, n);
    (elu ? backward_row<ELU> : backward_row<NONE>)(
        sizes, g.row(b, h), q.row(b, h), k.row(b, h), v.row(b, h), s + row * f * d, z + row * f, g_q.row(b, h),
        g_k.row(b, h), g_v.row(b, h), g_s + row * f * d, g_z + row * f, eps, room);
  });
}
}
