// Linear attention with decay and the delta rule on the CPU, forward and backward.
//
// Letters are those at the top of pytorch.py and of `_gradients` in triton_kernels.py. A thread computes a head of a row.
// Decays within a chunk are products of those of single positions, so there is no difference of sums of logarithms.

#include "../runtime/gemm_tiles.hpp"

namespace {

enum class Decay { NONE, HEAD, CHANNEL };

constexpr Index GROUP = 4;  // chunks for each state that the backward pass keeps; the others are computed again

// The sum of each of W vectors.
INLINE Vector sums_of(Vector* m) {
  transpose(m);
  for (int r = 1; r < W; ++r) m[0] += m[r];
  return m[0];
}

// A head's inputs, or their gradients. log_decay has width 1, or that of keys; beta has width 1.
struct Inputs {
  Head q, k, v, log_decay, beta;
};

// Copy numbers of n positions from `first` on; the rest of the chunk is 0.
void read_numbers(Head from, Index first, Index n, float* to) {
  for (Index i = 0; i < C; ++i) to[i] = i < n ? from.p[(first + i) * from.stride] : 0.f;
}

void write_numbers(Head to, Index first, Index n, const float* from) {
  for (Index i = 0; i < n; ++i) to.p[(first + i) * to.stride] = from[i];
}

// F += N U row by row, from the first, and U = beta F.
__attribute__((noinline)) void substitute(Index D, const float* N, const float* beta, float* F_, float* U) {
  for (Index i = 0; i < C; i += R) {
    tiles(nullptr, D, i, {N + i * C, C, 1}, U, D, F_ + i * D, D, true);
    for (Index r = i; r < i + R; ++r)
      for (Index j = 0; j < D; j += W) {
        Vector x = load(F_ + r * D + j);
        for (Index p = i; p < r; ++p) x += N[r * C + p] * load(U + p * D + j);
        store(F_ + r * D + j, x);
        store(U + r * D + j, x * beta[r]);
      }
  }
}

// X += N^T E row by row, from the last, and E = beta X.
__attribute__((noinline)) void substitute_backward(Index D, const float* N, const float* beta, float* X, float* E) {
  for (Index i = C - R; i >= 0; i -= R) {
    tiles(nullptr, D, C - i - R, {N + (i + R) * C + i, 1, C}, E + (i + R) * D, D, X + i * D, D, true);
    for (Index r = i + R - 1; r >= i; --r)
      for (Index j = 0; j < D; j += W) {
        Vector x = load(X + r * D + j);
        for (Index p = r + 1; p < i + R; ++p) x += N[p * C + r] * load(E + p * D + j);
        store(X + r * D + j, x);
        store(E + r * D + j, x * beta[r]);
      }
  }
}

struct Rule {
  Decay decay;
  bool delta;
};

// The parts of a chunk that do not depend on the state.
class Chunk {
 public:
  Rows Q, K, Q_in, K_in, K_out;  // queries and keys; a * Q, a * K, r * K
  float *A, *N, *beta;           // A; -P, 0 on and above the diagonal
  const Decay decay;
  const bool delta;

  Chunk(Rule rule, const Sizes& sizes, Room& room) : decay(rule.decay), delta(rule.delta), sizes_(sizes) {
    const Index F = sizes.F;
    for (float** p : {&q_, &k_, &q_in_, &k_in_, &k_out_, &kt_, &decays_, &before_, &after_}) *p = room.take(C * F);
    for (float** p : {&A, &N, &between_}) *p = room.take(C * C);
    beta = room.take(C);
    if (decay == Decay::NONE)
      for (Index i = 0; i < C; ++i)
        for (Index j = 0; j <= i; ++j) between_[i * C + j] = 1;
  }

  static Index room(Index F) { return 9 * C * F + 3 * C * C + C; }

  void find(Ahead& ahead, const Inputs& t, Index i0, bool with_queries) {
    const Index F = sizes_.F, rows = at_most(C, sizes_.n - i0);
    if (with_queries) Q = Q_in = view(t.q, i0, rows, F, q_);
    K = K_in = K_out = view(t.k, i0, rows, F, k_);
    if (delta) read_numbers(t.beta, i0, rows, beta);
    if (decay != Decay::NONE) {
      find_decays(t.log_decay, i0, rows);
      if (with_queries) Q_in = {from_start(Q, q_in_), F};
      if (with_queries || delta) K_in = {from_start(K, k_in_), F};
      K_out = {to_end(K, k_out_), F};
    }
    if (decay == Decay::CHANNEL) {
      if (with_queries || delta) find_scores_by_channel(with_queries);
    } else if (with_queries || delta) {
      transpose(C, F, K, kt_, C);  // (F, C)
      if (with_queries) products(ahead, F, Q, kt_, A);
      if (delta) {
        products(ahead, F, K, kt_, N);
        below_diagonal(N, -1);
      }
    }
  }

  // to[i, j] = l_ij x_i . y_j for j <= i, 0 above, without l_ij for decays per channel; y is (width, C).
  void products(Ahead& ahead, Index width, Rows x, const float* y, float* to) const {
    for (Index i = 0; i < C; i += W) {
      multiply(ahead, W, i + W, width, {x.p + i * x.row, x.row, 1}, y, C, to + i * C, C, SET);
      if (decay != Decay::CHANNEL)
        for (Index p = i * C; p < (i + W) * C; p += W) store(to + p, load(to + p) * load(between_ + p));
    }
  }

  // Multiply with a number below the diagonal, and with 0 on it.
  static void below_diagonal(float* m, float weight) {
    for (Index p = 0; p < C * C; p += W) store(m + p, load(m + p) * weight);
    for (Index i = 0; i < C; ++i) m[i * C + i] = 0;
  }

  // x * a or x * r into a buffer, which is returned; in place if they are the same.
  float* from_start(Rows x, float* to) const { return scaled(x, before_, to); }

  float* to_end(Rows x, float* to) const { return scaled(x, after_, to); }

  // F = V - (a * K) S - P U, and U = beta F.
  void values(Ahead& ahead, Rows V, const float* S, float* F_, float* U) const {
    const Index D = sizes_.D;
    multiply(ahead, C, D, sizes_.F, {K_in.p, K_in.row, 1}, S, D, U, D, SET);
    for (Index i = 0; i < C; ++i)
      for (Index j = 0; j < D; j += W) store(F_ + i * D + j, load(V.p + i * V.row + j) - load(U + i * D + j));
    substitute(D, N, beta, F_, U);
  }

  // X = A^T G + (r * K) R - P^T E in place of the first two terms, and E = beta X.
  void values_backward(float* X, float* E) const { substitute_backward(sizes_.D, N, beta, X, E); }

  // to = a_C * from, a state; they may be the same.
  void decay_state(const float* from, float* to) const {
    const Index F = sizes_.F, D = sizes_.D;
    const float* last = before_ + (C - 1) * (decay == Decay::HEAD ? 1 : F);
    if (decay == Decay::NONE && from == to) return;
    for (Index i = 0; i < F; ++i) {
      const Vector weight = all(decay == Decay::NONE ? 1.f : last[decay == Decay::HEAD ? 0 : i]);
      for (Index j = i * D; j < (i + 1) * D; j += W) store(to + j, load(from + j) * weight);
    }
  }

  // to = a_C * from + (r * K)^T U.
  void advance(Ahead& ahead, Rows U, const float* from, float* to) const {
    const Index D = sizes_.D;
    decay_state(from, to);
    multiply(ahead, sizes_.F, D, C, {K_out.p, 1, K_out.row}, U.p, U.row, to, D, ADD);
  }

  // Add the gradients of X and of K as columns to dX and dK, from those of scores X K^T, G.
  void scores_backward(const float* G, Rows X, float* dX, float* dK) const {
    const Index F = sizes_.F;
    if (decay != Decay::CHANNEL) {
      multiply_lower(F, {G, C, 1}, K, dX, F);
      multiply_upper(F, {G, 1, C}, X, dK, F);
      return;
    }
    for (Index f = 0; f < F; f += W)
      for (Index i = 0; i < C; ++i) {
        const Vector x = load(X.p + i * X.row + f);
        Vector between = all(1.f), sum = {};
        for (Index j = i; j >= 0; --j) {
          const Vector g = G[i * C + j] * between;
          sum += g * load(K.p + j * K.row + f);
          store(dK + j * F + f, load(dK + j * F + f) + g * x);
          between *= load(decays_ + j * F + f);
        }
        store(dX + i * F + f, load(dX + i * F + f) + sum);
      }
  }

 private:
  Sizes sizes_;
  float *q_, *k_, *q_in_, *k_in_, *k_out_, *kt_;
  float *decays_, *before_, *after_;  // e^log_decay, a and r, for each position, or each position and channel
  float* between_;                    // l_ij, 0 above the diagonal

  void find_decays(Head log_decay, Index i0, Index rows) {
    const Index width = decay == Decay::HEAD ? 1 : sizes_.F;
    if (decay == Decay::HEAD)
      read_numbers(log_decay, i0, rows, decays_);
    else
      read(log_decay, i0, rows, width, decays_);
    for (Index p = 0; p < C * width; p += W) store(decays_ + p, exponential(load(decays_ + p)));
    for (Index p = 0; p < width; ++p) {
      float a = 1, r = 1;
      for (Index i = 0; i < C; ++i) {
        before_[i * width + p] = a *= decays_[i * width + p];
        after_[(C - 1 - i) * width + p] = r;
        r *= decays_[(C - 1 - i) * width + p];
      }
    }
    if (decay == Decay::HEAD)
      for (Index i = 0; i < C; ++i) {
        for (Index j = 0; j < i; ++j) between_[i * C + j] = between_[(i - 1) * C + j] * decays_[i];
        between_[i * C + i] = 1;
      }
  }

  float* scaled(Rows x, const float* weights, float* to) const {
    const Index F = sizes_.F;
    if (decay == Decay::NONE && x.p == to) return to;
    for (Index i = 0; i < C; ++i)
      for (Index j = 0; j < F; j += W) {
        Vector y = load(x.p + i * x.row + j);
        if (decay != Decay::NONE) y *= decay == Decay::HEAD ? all(weights[i]) : load(weights + i * F + j);
        store(to + i * F + j, y);
      }
    return to;
  }

  void find_scores_by_channel(bool with_queries) {
    const Index F = sizes_.F;
    float* between = kt_;  // l_ij for one i and j
    for (Index i = 0; i < C; ++i) {
      Vector of_q[C] = {}, of_k[C] = {};
      for (Index f = 0; f < F; f += W) store(between + f, all(1.f));
      for (Index j = i; j >= 0; --j)
        for (Index f = 0; f < F; f += W) {
          const Vector l = load(between + f), k = load(K.p + j * K.row + f) * l;
          if (with_queries) of_q[j] += k * load(Q.p + i * Q.row + f);
          if (delta) of_k[j] += k * load(K.p + i * K.row + f);
          store(between + f, l * load(decays_ + j * F + f));
        }
      for (Index j = 0; j <= i; j += W) {
        if (with_queries) store(A + i * C + j, sums_of(of_q + j));
        if (delta) store(N + i * C + j, -sums_of(of_k + j));
      }
      if (delta) N[i * C + i] = 0;
    }
  }
};

void prefetch(Ahead& ahead, const Inputs& t, Index i0, Index n, bool with_queries) {
  if (with_queries) ahead.add(t.q.part(i0, n));
  ahead.add(t.k.part(i0, n));
  ahead.add(t.v.part(i0, n));
  if (t.log_decay.width > 1) ahead.add(t.log_decay.part(i0, n));
}

Index forward_room(Index F, Index D) { return F * D + 4 * C * D + Chunk::room(F) + 16 * 20; }

void forward_row(Rule rule, const Sizes& sizes, const Inputs& t, float* state, Head out, Room& room) {
  const Index n = sizes.n, F = sizes.F, D = sizes.D;
  float *S = room.take(F * D), *v_room = room.take(C * D), *Y = room.take(C * D);
  float *F_ = room.take(C * D), *U_ = room.take(C * D);
  Chunk c(rule, sizes, room);
  read_matrix(sizes.f, sizes.d, state, F, D, S);
  Ahead ahead;
  for (Index i0 = 0; i0 < n; i0 += C) {
    const Index rows = at_most(C, n - i0), next = at_most(C, n - i0 - rows);
    ahead.restart();
    ahead.add(out.part(i0, rows, WRITE));
    prefetch(ahead, t, i0 + rows, next, true);
    c.find(ahead, t, i0, true);
    Rows U = view(t.v, i0, rows, D, v_room);
    if (rule.delta) {
      c.values(ahead, U, S, F_, U_);
      U = {U_, D};
    }
    const Place to = place(out, i0, rows, D, Y);
    multiply(ahead, C, D, F, {c.Q_in.p, c.Q_in.row, 1}, S, D, to.p, to.row, SET);
    multiply_lower(D, {c.A, C, 1}, U, to.p, to.row);
    if (to.p == Y) write(out, i0, rows, D, Y);
    c.advance(ahead, U, S, S);
  }
  copy_matrix(sizes.f, sizes.d, S, D, state, sizes.d);
}

Index groups_of(Index n) { return (n + GROUP * C - 1) / (GROUP * C); }

Index backward_room(Index n, Index F, Index D, bool delta) {
  return (groups_of(n) + GROUP) * F * D + (delta ? n + C : 0) * D + 9 * C * D + 5 * C * F + 2 * C * C + 4 * F +
         Chunk::room(F) + 16 * 40;
}

// From the state's gradient after the last position to that before the first.
void backward_row(Rule rule, const Sizes& sizes, const Inputs& t, Head g, const float* state, const Inputs& to,
                  float* g_state, Room& room) {
  const Decay decay = rule.decay;
  const bool delta = rule.delta;
  const Index n = sizes.n, F = sizes.F, D = sizes.D, groups = groups_of(n);
  float *again = room.take((GROUP - 1) * F * D), *R_ = room.take(F * D);
  float *v_room = room.take(C * D), *g_room = room.take(C * D), *U_ = room.take(C * D), *X = room.take(C * D);
  float *E_ = room.take(C * D), *Gt = room.take(C * D), *Ut = room.take(C * D), *Et = room.take(C * D);
  float *dQ = room.take(C * F), *dK = room.take(C * F), *dRead = room.take(C * F), *T = room.take(C * F);
  float *of_A = room.take(C * C), *of_P = room.take(C * C);
  float *rest = room.take(F), *numbers = room.take(C), *more = room.take(C);
  Chunk c(rule, sizes, room);
  // Last, since n differs by row, and the others keep their zeros.
  float *kept = room.take(groups * F * D), *all_F = room.take(delta ? (n + C) * D : 0);
  Ahead ahead;

  // U of the chunk at i0, whose F is known.
  const auto values_of = [&](Index i0, Index rows) {
    if (!delta) return view(t.v, i0, rows, D, v_room);
    for (Index i = 0; i < C; ++i)
      for (Index j = 0; j < D; j += W) store(U_ + i * D + j, load(all_F + (i0 + i) * D + j) * c.beta[i]);
    return Rows{U_, D};
  };
  // The gradient that all sums of logarithms after the chunk have: S * R, summed over values.
  const auto find_rest = [&](const float* S) {
    if (decay == Decay::NONE) return;
    for (Index i = 0; i < F; i += W) {
      Vector m[W];
      for (int r = 0; r < W; ++r) {
        m[r] = Vector{};
        for (Index j = (i + r) * D; j < (i + r + 1) * D; j += W) m[r] += load(S + j) * load(R_ + j);
      }
      store(rest + i, sums_of(m));
    }
  };

  // Forward: F of all positions, and the state before each group of chunks.
  float* const S = again;
  read_matrix(sizes.f, sizes.d, state, F, D, S);
  for (Index i0 = 0; i0 < n; i0 += C) {
    const Index rows = at_most(C, n - i0), next = at_most(C, n - i0 - rows);
    ahead.restart();
    prefetch(ahead, t, i0 + rows, next, false);
    if (i0 / C % GROUP == 0) std::memcpy(kept + i0 / C / GROUP * F * D, S, sizeof(float) * F * D);
    c.find(ahead, t, i0, false);
    Rows U = view(t.v, i0, rows, D, v_room);
    if (delta) {
      c.values(ahead, U, S, all_F + i0 * D, U_);
      U = {U_, D};
    }
    c.advance(ahead, U, S, S);
  }
  read_matrix(sizes.f, sizes.d, g_state, F, D, R_);
  find_rest(S);

  for (Index group = groups - 1; group >= 0; --group) {
    const Index first = group * GROUP * C, count = at_most(GROUP, (n - first + C - 1) / C);
    const auto state_of = [&](Index i) { return i == 0 ? kept + group * F * D : again + (i - 1) * F * D; };
    ahead.restart();
    for (Index i = 0; i < count - 1; ++i) {
      c.find(ahead, t, first + i * C, false);
      c.advance(ahead, values_of(first + i * C, C), state_of(i), state_of(i + 1));
    }
    for (Index i = count - 1; i >= 0; --i) {
      const Index i0 = first + i * C, rows = at_most(C, n - i0);
      const float* S = state_of(i);
      ahead.restart();
      for (const Head* t : {&to.q, &to.k, &to.v}) ahead.add(t->part(i0, rows, WRITE));
      if (i0 > 0) {
        prefetch(ahead, t, i0 - C, C, true);
        ahead.add(g.part(i0 - C, C));
      }
      c.find(ahead, t, i0, true);
      const Rows U = values_of(i0, rows), G = view(g, i0, rows, D, g_room);

      multiply(ahead, C, D, F, {c.K_out.p, c.K_out.row, 1}, R_, D, X, D, SET);
      multiply_upper(D, {c.A, 1, C}, G, X, D);
      const float* E = X;
      if (delta) {
        c.values_backward(X, E_);
        E = E_;
        dot_rows(D, {X, D}, {all_F + i0 * D, D}, numbers);
        write_numbers(to.beta, i0, rows, numbers);
      }
      write(to.v, i0, rows, D, E);

      transpose(C, D, G, Gt, C);  // (D, C)
      transpose(C, D, U, Ut, C);
      multiply(ahead, F, C, D, {S, D, 1}, Gt, C, T, C, SET);
      transpose(F, C, {T, C}, dQ, F);
      c.from_start({dQ, F}, dQ);
      multiply(ahead, F, C, D, {R_, D, 1}, Ut, C, T, C, SET);
      transpose(F, C, {T, C}, dK, F);
      c.to_end({dK, F}, dK);
      c.products(ahead, D, G, Ut, of_A);
      c.scores_backward(of_A, c.Q, dQ, dK);
      if (delta) {
        for (Index p = 0; p < C * D; p += W) store(E_ + p, -load(E_ + p));
        transpose(C, D, {E_, D}, Et, C);
        multiply(ahead, F, C, D, {S, D, 1}, Et, C, T, C, SET);
        transpose(F, C, {T, C}, dRead, F);
        c.from_start({dRead, F}, dRead);
        c.products(ahead, D, {E_, D}, Ut, of_P);
        c.below_diagonal(of_P, 1);
        c.scores_backward(of_P, c.K, dRead, dK);
      }
      if (decay == Decay::HEAD) {
        float sum = 0;
        for (Index f = 0; f < F; ++f) sum += rest[f];
        dot_rows(F, c.Q, {dQ, F}, numbers);
        dot_rows(F, c.K, {dK, F}, more);
        for (Index r = 0; r < C; ++r) numbers[r] -= more[r];
        if (delta) {
          dot_rows(F, c.K, {dRead, F}, more);
          for (Index r = 0; r < C; ++r) numbers[r] += more[r];
        }
        for (Index r = C - 1; r >= 0; --r) numbers[r] = sum += numbers[r];
        write_numbers(to.log_decay, i0, rows, numbers);
      }
      if (decay == Decay::CHANNEL)
        for (Index f = 0; f < F; f += W) {
          Vector sum = load(rest + f);
          for (Index r = C - 1; r >= 0; --r) {
            Vector of_key = load(dK + r * F + f);
            if (delta) of_key -= load(dRead + r * F + f);
            sum += load(c.Q.p + r * c.Q.row + f) * load(dQ + r * F + f) - load(c.K.p + r * c.K.row + f) * of_key;
            if (r < rows && f < sizes.f) put(to.log_decay, i0 + r, f, sum);
          }
        }
      for (Index r = 0; r < C; ++r)
        for (Index p = r * F; p < (r + 1) * F; p += W) {
          Vector x = load(dK + p);
          if (delta) x += load(dRead + p);
          store(dK + p, x);
        }
      write(to.q, i0, rows, F, dQ);
      write(to.k, i0, rows, F, dK);

      c.decay_state(R_, R_);
      multiply(ahead, F, D, C, {c.Q_in.p, 1, c.Q_in.row}, G.p, G.row, R_, D, ADD);
      if (delta) multiply(ahead, F, D, C, {c.K_in.p, 1, c.K_in.row}, E_, D, R_, D, ADD);
      find_rest(S);
    }
  }
  copy_matrix(sizes.f, sizes.d, R_, D, g_state, sizes.d);
}

Rule rule_of(const Heads& log_decay, const Heads& beta) {
  const Decay decay = !log_decay.p ? Decay::NONE : log_decay.width == 1 ? Decay::HEAD : Decay::CHANNEL;
  return {decay, beta.p != nullptr};
}

}  // namespace

// Called by pytorch.py.
extern "C" {

// log_decay.p and beta.p may be null. state: before the first position, overwritten with that after the last. lengths:
// valid positions, or null; the outputs and gradients of padding are 0.
void forward(Index batch, Index heads, Index n, Heads q, Heads k, Heads v, Heads log_decay, Heads beta, float* state,
             const Index* lengths, Heads out, int threads) {
  const Index f = k.width, d = v.width, F = padded(f), D = padded(d);
  in_large_pages(out, batch * heads * n * d);
  const Rule rule = rule_of(log_decay, beta);
  each_head(batch, heads, n, lengths, threads, forward_room(F, D), [&](Index b, Index h, Index valid, Room& room) {
    const Sizes sizes = {valid, f, d, F, D};
    const Inputs inputs = {q.row(b, h), k.row(b, h), v.row(b, h), log_decay.row(b, h), beta.row(b, h)};
    clear(out.row(b, h), valid, n);
    forward_row(rule, sizes, inputs, state + (b * heads + h) * f * d, out.row(b, h), room);
  });
}

// g_state: after the last position, overwritten with that before the first.
void backward(Index batch, Index heads, Index n, Heads g, Heads q, Heads k, Heads v, Heads log_decay, Heads beta,
              const float* state, const Index* lengths, Heads g_q, Heads g_k, Heads g_v, Heads g_log_decay,
              Heads g_beta, float* g_state, int threads) {
  const Index f = k.width, d = v.width, F = padded(f), D = padded(d);
  for (const Heads& t : {g_q, g_k, g_v}) in_large_pages(t, batch * heads * n * t.width);
  const Rule rule = rule_of(log_decay, beta);
  const Index numbers = backward_room(n, F, D, rule.delta);
  each_head(batch, heads, n, lengths, threads, numbers, [&](Index b, Index h, Index valid, Room& room) {
    const Index row = b * heads + h;
    const Sizes sizes = {valid, f, d, F, D};
    const Inputs inputs = {q.row(b, h), k.row(b, h), v.row(b, h), log_decay.row(b, h), beta.row(b, h)};
    const Inputs to = {g_q.row(b, h), g_k.row(b, h), g_v.row(b, h), g_log_decay.row(b, h), g_beta.row(b, h)};
    for (const Heads& t : {g_q, g_k, g_v, g_log_decay, g_beta}) clear(t.row(b, h), valid, n);
    backward_row(rule, sizes, inputs, g.row(b, h), state + row * f * d, to, g_state + row * f * d, room);
  });
}
}
