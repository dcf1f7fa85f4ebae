// Causal attention by positive random features on the CPU, forward and backward (Choromanski et al. 2020, lemma 1).
//
// Letters are those of `positive_favor` in pytorch.py. A thread computes a head of a row, chunk
// after chunk; only one chunk's features and scores are in memory.
//
// Features of keys, and their sums, are scaled by e^-r. The reference r, one number for each feature, is the greatest
// log phi(k) up to some key. It does not change until a key is more than LIMIT above it. That key begins a new chunk
// (the chunk before ends early), and r is raised to the greatest log phi(k) up to it. So no reference depends on later
// keys, no feature of a key exceeds e^LIMIT, and with queries scaled by exp(-max(log phi(q) + r)) no denominator is
// below 1.

#include <cmath>
#include <vector>

#include "../runtime/gemm_tiles.hpp"

namespace {

constexpr float LIMIT = 40;  // a query's feature below e^-87 is lost; times e^LIMIT it would be negligible
constexpr float NONE_YET = -1e37f;  // the reference before the first key: every key is above it, and it is finite
constexpr float NEVER = -__builtin_inff();

// out[i, j] = a_i . b_j + more_i where j <= i, for C rows; b is given as (n, C). The rest of `out` is 0 and remains 0.
void scores(Ahead& ahead, Index n, const float* a, const float* b, const float* more, float* out) {
  for (Index i = 0; i < C; i += W) {
    multiply(ahead, W, i + W, n, {a + i * n, n, 1}, b, C, out + i * C, C, SET);
    for (int r = 0; r < W; ++r) {
      float* row = out + (i + r) * C;
      if (more)
        for (Index j = 0; j <= i; j += W) store(row + j, load(row + j) + more[i + r]);
      store(row + i, only(places() <= (Bits{} + r), load(row + i)));
    }
  }
}

// -------------------------------------------------------------------------------------------------- a chunk's features

INLINE Vector greater(Vector a, Vector b) { return a > b ? a : b; }

struct Row {
  Index n;                 // positions
  Index e, f, d, E, F, D;  // columns of queries and keys, features, columns of values; padded to whole vectors
  Head q, k, v;
  const float* omega;   // (F, E)
  float scale;          // of queries and keys
};

struct Chunk {
  Index first, n;
  bool raised;  // whether the reference differs from that of the chunk before
};

// Computes the features of one chunk after another, and the reference, which may change from chunk to chunk.
class Features {
 public:
  static Index room(const Row& row) {
    const Index E = row.E, F = row.F;
    return 2 * C * (E + F) + E * F + 3 * F + C + 7 * 16;
  }

  // m: (F), the greatest log phi(k) before the first position.
  Features(const Row& row, const float* m, Room& room) : row_(row), E(row.E), F(row.F) {
    q = room.take(2 * C * E);
    k = q + C * E;
    Q = room.take(2 * C * F);
    K = Q + C * F;
    r = room.take(F);
    kept = room.take(F);
    m_ = room.take(F);
    offset_ = room.take(C);
    omega_ = room.take(E * F);
    for (Index i = 0; i < row.f; ++i)
      for (Index j = 0; j < row.e; ++j) omega_[j * F + i] = row.scale * row.omega[i * row.e + j];
    for (Index i = 0; i < F; ++i) r[i] = m_[i] = i < row.f && m[i] > NONE_YET ? m[i] : NONE_YET;
  }

  // Compute the features of the chunk that begins at `first`, and return its end.
  Chunk begin(Ahead& ahead, Index first) {
    Index n = at_most(C, row_.n - first);
    logarithms(ahead, first, n);
    const bool raised = rises(0, 1);
    if (raised) raise(1);
    if (rises(1, n))
      for (n = 1; !rises(n, n + 1);) ++n;
    for (Index j = 0; j < F; j += W) store(m_ + j, maximum(n, j));
    exponentials(n);
    return {first, n, raised};
  }

  // Compute a chunk's features again; r is that of the chunk.
  void repeat(Ahead& ahead, Chunk chunk) {
    logarithms(ahead, chunk.first, chunk.n);
    exponentials(chunk.n);
  }

  // Raise the reference to the greatest logarithms so far, including the first n keys of the chunk.
  void raise(Index n = 0) {
    for (Index j = 0; j < F; j += W) {
      const Vector after = maximum(n, j);
      store(kept + j, remainder(load(r + j), after));
      store(r + j, after);
    }
  }

  // Return to the reference `before`.
  void lower(const float* before) {
    for (Index j = 0; j < F; j += W) {
      store(kept + j, remainder(load(before + j), load(r + j)));
      store(r + j, load(before + j));
    }
  }

  // (F), the greatest log phi(k) so far.
  void greatest(float* to) const {
    for (Index i = 0; i < row_.f; ++i) to[i] = m_[i] > NONE_YET ? m_[i] : NEVER;
  }

  float *q, *k;     // (C, E), the inputs
  float *Q, *K;     // (C, F), their features; 0 from the chunk's end on
  float *r, *kept;  // (F), the reference, and the factor of sums that were scaled by the one before

 private:
  void logarithms(Ahead& ahead, Index first, Index n) {
    read(row_.q, first, n, E, q);
    read(row_.k, first, n, E, k);
    dot_rows(E, {k, E}, {k, E}, offset_);
    const float factor = -row_.scale * row_.scale / 2, constant = -std::log(float(row_.f)) / 2;
    for (Index i = 0; i < C; ++i) offset_[i] = i < n ? factor * offset_[i] + constant : NEVER;
    multiply(ahead, 2 * C, F, E, {q, E, 1}, omega_, F, Q, F, SET);
    for (Index j = 0; j < F; j += W) {  // the offset last: it may be large beside the rest
      const Bits inside = places() < (Bits{} + std::int32_t(row_.f - j));
      for (Index i = 0; i < C; ++i) {
        float* to_k = K + i * F + j;
        store(to_k, inside ? load(to_k) + offset_[i] : all(NEVER));
      }
      if (row_.f - j < W)
        for (Index i = 0; i < C; ++i) store(Q + i * F + j, inside ? load(Q + i * F + j) : all(NEVER));
    }
  }

  // Whether one of these keys is too far above the reference.
  bool rises(Index first, Index last) const {
    Bits any = {};
    for (Index j = 0; j < F; j += W)
      for (Index i = first; i < last; ++i) any |= load(K + i * F + j) - load(r + j) > all(LIMIT);
    std::int32_t found = 0;
    for (int i = 0; i < W; ++i) found |= any[i];
    return found;
  }

  // e^(before - after), the factor of sums scaled by `before`; 0 if there was no key.
  static INLINE Vector remainder(Vector before, Vector after) {
    return only(before > all(NONE_YET), exponential(before - after));
  }

  // The greatest logarithms of the keys before the chunk and of its first n keys.
  INLINE Vector maximum(Index n, Index j) const {
    Vector x = load(m_ + j);
    for (Index i = 0; i < n; ++i) x = greater(load(K + i * F + j), x);
    return x;
  }

  void exponentials(Index n) {
    for (Index i = 0; i < n; ++i) {
      float *to_q = Q + i * F, *to_k = K + i * F;
      Vector top = all(NEVER);
      for (Index j = 0; j < F; j += W) {
        const Vector x = load(to_q + j) + load(r + j);
        store(to_q + j, x);
        top = greater(x, top);
      }
      float t = top[0];
      for (int e = 1; e < W; ++e) t = top[e] > t ? top[e] : t;
      for (Index j = 0; j < F; j += W) {
        store(to_q + j, exponential(load(to_q + j) - t));
        store(to_k + j, exponential(load(to_k + j) - load(r + j)));
      }
    }
    std::memset(Q + n * F, 0, sizeof(float) * (C - n) * F);
    std::memset(K + n * F, 0, sizeof(float) * (C - n) * F);
  }

  const Row row_;
  const Index E, F;
  float *m_, *offset_;  // (F), the greatest log phi(k) so far; (C), the common term of a key's logarithms
  float* omega_;        // (E, F), scaled
};

// ------------------------------------------------------------------------------------------------ forward and backward

// z_i for each position, and 1 / q_i . z_i, of the denominators; 0 where nothing is seen.
void divisors(const Features& x, Index F, float* z, float* sums, float* above) {
  for (Index j = 0; j < F; j += W) {
    Vector s = load(z + j);
    for (Index i = 0; i < C; ++i) store(sums + i * F + j, s += load(x.K + i * F + j));
    store(z + j, s);
  }
  dot_rows(F, {x.Q, F}, {sums, F}, above);
  for (Index i = 0; i < C; ++i) above[i] = above[i] != 0 ? 1 / above[i] : 0;
}

void scale_rows(Index rows, Index columns, const float* by, float* p) {
  for (Index i = 0; i < rows; ++i)
    for (Index j = 0; j < columns; j += W) store(p + i * columns + j, by[i] * load(p + i * columns + j));
}

void scale_columns(Index rows, Index columns, const float* by, float* p) {
  for (Index i = 0; i < rows; ++i)
    for (Index j = 0; j < columns; j += W) store(p + i * columns + j, load(by + j) * load(p + i * columns + j));
}

Index forward_room(const Row& row) {
  return Features::room(row) + row.F * row.D + row.F + 2 * C * (row.F + row.D) + C * C + C + 16;
}

void forward_row(const Row& row, float* s, float* z, float* m, Head out, Room& room) {
  const auto [n, e, f, d, E, F, D, q, k, v, omega, scale] = row;
  Features x(row, m, room);
  float *S = room.take(F * D), *Z = room.take(F), *Kt = room.take(C * F), *sums = room.take(C * F);
  float *v_room = room.take(C * D), *Y = room.take(C * D), *A = room.take(C * C);
  float* above = room.take(C);
  read_matrix(f, d, s, F, D, S);
  read_matrix(1, f, z, 1, F, Z);
  Ahead ahead;
  for (Index first = 0, count; first < n; first += count) {
    const Index limit = at_most(C, n - first), next = at_most(C, n - first - limit);
    ahead.restart();
    ahead.add(v.part(first, limit));
    ahead.add(out.part(first, limit, WRITE));
    for (const Head& t : {q, k}) ahead.add(t.part(first + limit, next));
    const Chunk chunk = x.begin(ahead, first);
    count = chunk.n;
    const Rows V = view(v, first, count, D, v_room);
    if (chunk.raised) {
      scale_rows(F, D, x.kept, S);
      scale_columns(1, F, x.kept, Z);
    }
    divisors(x, F, Z, sums, above);
    transpose(C, F, {x.K, F}, Kt, C);  // (F, C)
    scores(ahead, F, x.Q, Kt, nullptr, A);  // A[i, j] = q_i . k_j
    multiply(ahead, C, D, F, {x.Q, F, 1}, S, D, Y, D, SET);
    multiply_lower(D, {A, C, 1}, V, Y, D);
    write(out, first, count, D, Y, above);
    multiply(ahead, F, D, C, {x.K, 1, F}, V.p, V.row, S, D, ADD);
  }
  x.raise();
  scale_rows(F, D, x.kept, S);
  scale_columns(1, F, x.kept, Z);
  copy_matrix(f, d, S, D, s, d);
  std::memcpy(z, Z, sizeof(float) * f);
  x.greatest(m);
}

Index backward_room(const Row& row) {
  const Index E = row.E, F = row.F, D = row.D;
  return Features::room(row) + F * D + F + E * F + C * (3 * F + 4 * D + E) + 2 * C * C + 2 * C + 2 * (row.n + C + 16) +
         2 * 16;
}

// From g_s and g_z after the last position to those before the first. With x_i = g_i / denominator_i:
//   d log q_i = q_i (S_i x_i + y_i z_i),  y_i = -q_i . S_i x_i / denominator_i,  d log k_j = k_j (R_j v_j + r_j),
//   dv_j = R_j^T k_j
// The forward pass over the chunks stores their borders and the references for the backward pass. There are few
// references, since they are seldom raised.
void backward_row(const Row& row, Head g, const float* s, const float* z, const float* m, Head g_q, Head g_k, Head g_v,
                  float* g_s, float* g_z, Room& room) {
  const auto [n, e, f, d, E, F, D, q, k, v, omega, scale] = row;
  Features x(row, m, room);
  float *S = room.take(F * D), *Z = room.take(F), *scaled = room.take(E * F), *Kt = room.take(C * F);
  float *sums = room.take(C * F), *T = room.take(C * F);
  float *v_room = room.take(C * D), *Vt = room.take(C * D), *X = room.take(C * D), *O = room.take(C * D);
  float *U = room.take(C * E), *A = room.take(C * C), *G = room.take(C * C);
  float* g_log = room.take(C);
  float *above = room.take(n + C), *y = room.take(n + C);  // last: n differs by row, and the others keep their zeros
  for (Index i = 0; i < f; ++i)
    for (Index j = 0; j < e; ++j) scaled[i * E + j] = scale * omega[i * e + j];
  std::vector<Chunk> chunks;
  std::vector<float> references(x.r, x.r + F);
  Ahead ahead;

  // Forward, for dq: S is stored as (D, F).
  read_transposed(f, d, s, F, D, S);
  read_matrix(1, f, z, 1, F, Z);
  for (Index first = 0, count; first < n; first += count) {
    const Index limit = at_most(C, n - first), next = at_most(C, n - first - limit);
    ahead.restart();
    for (const Head& t : {v, g}) ahead.add(t.part(first, limit));
    ahead.add(g_q.part(first, limit, WRITE));
    for (const Head& t : {q, k}) ahead.add(t.part(first + limit, next));
    chunks.push_back(x.begin(ahead, first));
    count = chunks.back().n;
    if (chunks.back().raised) {
      scale_columns(D, F, x.kept, S);
      scale_columns(1, F, x.kept, Z);
      references.insert(references.end(), x.r, x.r + F);
    }
    const Rows V = view(v, first, count, D, v_room);
    divisors(x, F, Z, sums, above + first);
    read(g, first, count, D, X, above + first);

    transpose(C, D, V, Vt, C);  // (D, C)
    scores(ahead, D, X, Vt, nullptr, G);  // G[i, j] = x_i . v_j
    multiply(ahead, C, F, D, {X, D, 1}, S, F, T, F, SET);
    multiply_lower(F, {G, C, 1}, {x.K, F}, T, F);  // S_i x_i
    dot_rows(F, {x.Q, F}, {T, F}, y + first);
    for (Index i = first; i < first + C; ++i) y[i] *= -above[i];
    for (Index i = 0; i < count; ++i)
      for (Index j = i * F; j < (i + 1) * F; j += W)
        store(T + j, load(x.Q + j) * (load(T + j) + y[first + i] * load(sums + j)));
    multiply(ahead, C, E, F, {T, F, 1}, scaled, E, U, E, SET);
    write(g_q, first, count, E, U);
    multiply(ahead, D, F, C, {Vt, C, 1}, x.K, F, S, F, ADD);
  }

  // Backward, for dk and dv: R is stored as (F, D) in place of S, r in place of z.
  float *const R_ = S, *const r_ = Z;
  read_matrix(f, d, g_s, F, D, R_);
  read_matrix(1, f, g_z, 1, F, r_);
  x.raise();
  scale_rows(F, D, x.kept, R_);
  scale_columns(1, F, x.kept, r_);
  x.lower(&references[references.size() - F]);
  for (; !chunks.empty(); chunks.pop_back()) {
    const auto [first, count, raised] = chunks.back();
    const Index next = at_most(C, first);
    ahead.restart();
    for (const Head& t : {v, g}) ahead.add(t.part(first, count));
    for (const Head& t : {g_k, g_v}) ahead.add(t.part(first, count, WRITE));
    for (const Head& t : {q, k}) ahead.add(t.part(first - next, next));
    x.repeat(ahead, chunks.back());
    const Rows V = view(v, first, count, D, v_room);
    read(g, first, count, D, X, above + first);

    transpose(C, F, {x.K, F}, Kt, C);  // (F, C)
    transpose(C, D, V, Vt, C);  // (D, C)
    scores(ahead, F, x.Q, Kt, nullptr, A);  // A[i, j] = q_i . k_j
    scores(ahead, D, X, Vt, y + first, G);  // G[i, j] = x_i . v_j + y_i
    for (Index c = 0; c < F; ++c)  // d log k, as (F, C)
      for (Index j = 0; j < C; j += W) store(T + c * C + j, all(r_[c]));
    multiply(ahead, F, C, D, {R_, D, 1}, Vt, C, T, C, ADD);
    for (Index j = 0; j < C; j += W)
      multiply(ahead, F, W, C - j, {x.Q + j * F, 1, F}, G + j * C + j, C, T + j, C, ADD);
    for (Index j = 0; j < C; j += W) {
      Vector sum = {};
      for (Index c = j; c < F * C; c += C) {
        const Vector t = load(Kt + c) * load(T + c);
        store(T + c, t);
        sum += t;
      }
      store(g_log + j, sum);
    }
    multiply(ahead, C, E, F, {T, 1, C}, scaled, E, U, E, SET);
    for (Index i = 0; i < count; ++i)
      for (Index j = i * E; j < (i + 1) * E; j += W)
        store(U + j, load(U + j) - scale * scale * g_log[i] * load(x.k + j));
    write(g_k, first, count, E, U);

    const Place to_v = place(g_v, first, count, D, O);
    multiply(ahead, C, D, F, {Kt, 1, C}, R_, D, to_v.p, to_v.row, SET);
    multiply_upper(D, {A, 1, C}, {X, D}, to_v.p, to_v.row);
    if (to_v.p == O) write(g_v, first, count, D, O);

    multiply(ahead, F, D, C, {x.Q, 1, F}, X, D, R_, D, ADD);
    add_rows(F, {x.Q, F}, y + first, r_);
    if (raised) {
      references.resize(references.size() - F);
      x.lower(&references[references.size() - F]);
      scale_rows(F, D, x.kept, R_);
      scale_columns(1, F, x.kept, r_);
    }
  }
  copy_matrix(f, d, R_, D, g_s, d);
  std::memcpy(g_z, r_, sizeof(float) * f);
}

}  // namespace

// Called by pytorch.py.
extern "C" {

struct Inputs {
  Index batch, heads, n, features;
  Heads q, k, v;
  const float* omega;
  const Index* lengths;  // valid positions; may be null
  float scale;

  Row row(Index b, Index h, Index valid) const {
    const Index e = k.width, f = features, d = v.width;
    return {valid, e, f, d, padded(e), padded(f), padded(d), q.row(b, h), k.row(b, h), v.row(b, h),
            omega + h * f * e, scale};
  }
};

// s, z and m: before the first position, overwritten with those after the last. Outputs and gradients of padding are 0.
void forward(Inputs x, float* s, float* z, float* m, Heads out, int threads) {
  const Index f = x.features, d = x.v.width;
  in_large_pages(out, x.batch * x.heads * x.n * d);
  const Index numbers = forward_room(x.row(0, 0, x.n));
  each_head(x.batch, x.heads, x.n, x.lengths, threads, numbers, [&](Index b, Index h, Index valid, Room& room) {
    const Index row = b * x.heads + h;
    clear(out.row(b, h), valid, x.n);
    forward_row(x.row(b, h, valid), s + row * f * d, z + row * f, m + row * f, out.row(b, h), room);
  });
}

// g_s and g_z: those after the last position, overwritten with those before the first.
void backward(Inputs x, Heads g, const float* s, const float* z, const float* m, Heads g_q, Heads g_k, Heads g_v,
              float* g_s, float* g_z, int threads) {
  const Index f = x.features, d = x.v.width;
  for (const Heads& t : {g_q, g_k, g_v}) in_large_pages(t, x.batch * x.heads * x.n * t.width);
  const Index numbers = backward_room(x.row(0, 0, x.n));
  each_head(x.batch, x.heads, x.n, x.lengths, threads, numbers, [&](Index b, Index h, Index valid, Room& room) {
    const Index row = b * x.heads + h;
    for (const Heads& t : {g_q, g_k, g_v}) clear(t.row(b, h), valid, x.n);
    backward_row(x.row(b, h, valid), g.row(b, h), s + row * f * d, z + row * f, m + row * f, g_q.row(b, h),
                 g_k.row(b, h), g_v.row(b, h), g_s + row * f * d, g_z + row * f, room);
  });
}
}
