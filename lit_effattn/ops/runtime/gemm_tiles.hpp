// Building blocks of the CPU kernels: vectors, matrix products with tiles in registers, and copies of chunks.
//
// A kernel processes each head in chunks of C positions. Data whose layout does not fit are copied into buffers that
// stay in the first-level caches, padded with zeros to whole vectors. Most of the time is spent in the products. Their
// tiles of R rows by some vectors stay in registers: sums over t of a[r, t] b[t, :], where a is read number by number
// and b by vectors. A factor b that is stored by columns is transposed. The next chunk is prefetched during a product.

#pragma once

#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace {

typedef std::int64_t Index;

#if defined(__AVX512F__)
constexpr int W = 16;  // numbers of a vector
constexpr int COLUMNS = 4;  // vectors of a tile
#elif defined(__AVX2__)
constexpr int W = 8;
constexpr int COLUMNS = 2;
#else
constexpr int W = 4;
constexpr int COLUMNS = 4;
#endif
constexpr int R = 4;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TALL = 16;  // rows of a tile that is one vector wide: as many sums at once as fill the pipeline
#else
constexpr int TALL = 8;
#endif
constexpr Index C = 16;  // a multiple of R, of TALL and of every W

typedef float Vector __attribute__((vector_size(4 * W)));
typedef std::int32_t Bits __attribute__((vector_size(4 * W)));

#define INLINE inline __attribute__((always_inline))

INLINE Vector load(const float* p) {
  Vector x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

INLINE void store(float* p, Vector x) { std::memcpy(p, &x, sizeof x); }

INLINE Vector all(float x) { return x - Vector{}; }

// Keep a vector in a register. Compilers would load it again for each product, and loads are the bottleneck.
INLINE void hold(Vector& x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
}

// The places in a vector, 0 to W - 1.
INLINE Bits places() {
  Bits x;
  for (int i = 0; i < W; ++i) x[i] = i;
  return x;
}

// x where the mask's bits are set, else 0, even where x is NaN.
INLINE Vector only(Bits mask, Vector x) { return (Vector)((Bits)x & mask); }

INLINE Vector less(Vector a, Vector b) { return a < b ? a : b; }

// e^x for x <= 88, to 1.2 units in the last place; 0 below -87.7; NaN for NaN.
INLINE Vector exponential(Vector x) {
  const Vector lowest = all(-88.f), round = all(12582912.f);  // 1.5 * 2^23: adding it rounds to a whole number
  x = lowest > x ? lowest : x;
  const Vector shifted = x * 1.44269504f + round, n = shifted - round;
  const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // x - n ln 2, ln 2 in two parts
  // e^r = 1 + r + r^2 q(r), q fitted for |r| <= ln 2 / 2; relative error 3e-9.
  Vector y = all(1.38145976e-3f);
  for (float term : {8.36871658e-3f, 4.16683890e-2f, 0.166665211f, 0.499999940f, 1.f, 1.f}) y = y * r + term;
  const Bits power = ((Bits)shifted - 0x4b400000 + 127) << 23;  // n, without the bits of `round`; 2^-127 is 0
  return y * (Vector)power;
}

Index padded(Index n) { return (n + W - 1) / W * W; }

// --------------------------------------------------------------------------------------------------------- prefetching

enum Use { READ, WRITE };

struct Part {
  const float* p;
  Index stride, rows, width;
  Use use;
};

// Prefetches the memory of the next chunk's inputs and of this chunk's results, two cache lines at a time: more at once
// would delay the loads of the present product.
class Ahead {
 public:
  // Fetch the rest of the present parts, and clear the list.
  void restart() {
    while (now_.rows > 0 || part_ < count_) fetch();
    count_ = part_ = 0;
  }

  void add(Part part) {
    if (part.rows > 0) parts_[count_++] = part;
  }

  INLINE void fetch() {
    if (now_.rows == 0) {
      if (part_ == count_) return;
      now_ = parts_[part_++];
      column_ = 0;
    }
    const float* p = now_.p + column_;
    if (now_.use == READ) {
      __builtin_prefetch(p, READ, 2);
      __builtin_prefetch(p + 16, READ, 2);
    } else {
      __builtin_prefetch(p, WRITE, 2);
      __builtin_prefetch(p + 16, WRITE, 2);
    }
    column_ += 32;
    if (column_ >= now_.width) {
      column_ = 0;
      now_.p += now_.stride;
      --now_.rows;
    }
  }

 private:
  Part parts_[8];
  Index count_ = 0, part_ = 0, column_ = 0;
  Part now_ = {};  // the rest of the part that is being fetched
};

// ------------------------------------------------------------------------------------------------------------ products

// A matrix's numbers from p on: [row, column] is at p[row * rows + column * columns].
struct Left {
  const float* p;
  Index rows, columns;
};

// Rows of numbers: [i, j] is at p[i * row + j].
struct Rows {
  const float* p;
  Index row;
};

// out[r, :] (+)= sum over t < n of a[r, t] b[t, :], for some rows and vectors of columns; n is a multiple of 4.
// Prefetches meanwhile if `ahead` is not null.
template <int rows, int vectors>
INLINE void tile(Ahead* ahead, Index n, Left a, const float* b, Index b_row, float* out, Index out_row, bool add) {
  Vector sums[rows][vectors];
  for (int r = 0; r < rows; ++r)
    for (int j = 0; j < vectors; ++j) sums[r][j] = add ? load(out + r * out_row + j * W) : Vector{};
  const float* fours[rows / 4];  // a pointer for every four rows; an address within them costs no instruction
  for (int r = 0; r < rows; r += 4) fours[r / 4] = a.p + r * a.rows;
  for (Index t = 0; t < n; t += 4) {
    if (ahead) ahead->fetch();
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
      Vector line[vectors];
      for (int j = 0; j < vectors; ++j) {
        line[j] = load(b + j * W);
        if (vectors > 1) hold(line[j]);
      }
      b += b_row;
      for (int r = 0; r < rows; ++r) {
        const Vector x = all(fours[r / 4][r % 4 * a.rows]);
        for (int j = 0; j < vectors; ++j) sums[r][j] += x * line[j];
      }
      for (int r = 0; r < rows; r += 4) {
        fours[r / 4] += a.columns;
        asm("" : "+r"(fours[r / 4]));
      }
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int j = 0; j < vectors; ++j) store(out + r * out_row + j * W, sums[r][j]);
}

// The same for `width` columns and R rows. Only tiles at multiples of 64 columns prefetch: as often for any W.
INLINE void tiles(Ahead* ahead, Index width, Index n, Left a, const float* b, Index b_row, float* out, Index out_row,
                  bool add) {
  Index j = 0;
  const auto one = [&](auto vectors) __attribute__((always_inline)) {
    tile<R, vectors()>(j % 64 ? nullptr : ahead, n, a, b + j, b_row, out + j, out_row, add);
    j += vectors() * W;
  };
  while (j + COLUMNS * W <= width) one(std::integral_constant<int, COLUMNS>());
  while (j + 2 * W <= width) one(std::integral_constant<int, 2>());
  while (j < width) one(std::integral_constant<int, 1>());
}

enum Sum { SET, ADD };

// The same for any number of rows.
__attribute__((noinline)) void multiply(Ahead& ahead, Index rows, Index width, Index n, Left a, const float* b,
                                        Index b_row, float* out, Index out_row, Sum sum) {
  Index r = 0;
  if (width == W)
    for (; r + TALL <= rows; r += TALL)
      tile<TALL, 1>(&ahead, n, {a.p + r * a.rows, a.rows, a.columns}, b, b_row, out + r * out_row, out_row, sum == ADD);
  for (; r < rows; r += R)
    tiles(&ahead, width, n, {a.p + r * a.rows, a.rows, a.columns}, b, b_row, out + r * out_row, out_row, sum == ADD);
}

// out[i, :] += sum over j <= i of a[i, j] b[j, :], for C rows; a is 0 where j > i.
__attribute__((noinline)) void multiply_lower(Index width, Left a, Rows b, float* out, Index out_row) {
  for (Index i = 0; i < C; i += R)
    tiles(nullptr, width, i + R, {a.p + i * a.rows, a.rows, a.columns}, b.p, b.row, out + i * out_row, out_row, true);
}

// out[j, :] += sum over i >= j of a[j, i] b[i, :], for C rows; a is 0 where i < j.
__attribute__((noinline)) void multiply_upper(Index width, Left a, Rows b, float* out, Index out_row) {
  for (Index j = 0; j < C; j += R)
    tiles(nullptr, width, C - j, {a.p + j * a.rows + j * a.columns, a.rows, a.columns}, b.p + j * b.row, b.row,
          out + j * out_row, out_row, true);
}

template <int step, int... e>
INLINE void exchange(Vector& a, Vector& b, std::integer_sequence<int, e...>) {
  const Vector upper = __builtin_shufflevector(a, b, ((e & step) ? W + e - step : e)...);
  const Vector lower = __builtin_shufflevector(a, b, ((e & step) ? W + e : e + step)...);
  a = upper;
  b = lower;
}

// Transpose W vectors: swap the off-diagonal halves of blocks of 2 x 2, then of 4 x 4, and so on.
template <int step = 1>
INLINE void transpose(Vector* m) {
  if constexpr (step < W) {
    for (int i = 0; i < W; ++i)
      if (!(i & step)) exchange<step>(m[i], m[i + step], std::make_integer_sequence<int, W>{});
    transpose<2 * step>(m);
  }
}

// to[j, i] = from[i, j], plus more[i] unless it is null; rows and columns are multiples of W.
__attribute__((noinline)) void transpose(Index rows, Index columns, Rows from, float* to, Index to_row,
                                         const float* more = nullptr) {
  for (Index i = 0; i < rows; i += W) {
    const Vector added = more ? load(more + i) : Vector{};
    for (Index j = 0; j < columns; j += W) {
      Vector m[W];
      for (int r = 0; r < W; ++r) m[r] = load(from.p + (i + r) * from.row + j);
      transpose(m);
      for (int r = 0; r < W; ++r) store(to + (j + r) * to_row + i, m[r] + added);
    }
  }
}

// to[i] = a_i . b_i for C rows.
__attribute__((noinline)) void dot_rows(Index width, Rows a, Rows b, float* to) {
  for (Index i = 0; i < C; i += W) {
    Vector m[W];
    for (int r = 0; r < W; ++r) {
      m[r] = Vector{};
      for (Index j = 0; j < width; j += W) m[r] += load(a.p + (i + r) * a.row + j) * load(b.p + (i + r) * b.row + j);
    }
    transpose(m);
    for (int r = 1; r < W; ++r) m[0] += m[r];
    store(to + i, m[0]);
  }
}

// ---------------------------------------------------------------------------------------------------- loads and stores

// A row of heads, (N, width): position i is at p + i * stride.
struct Head {
  float* p;
  Index stride, width;

  Part part(Index first, Index n, Use use = READ) const { return {p + first * stride, stride, n, width, use}; }
};

enum Map { NONE, ELU };  // ELU: phi(x) = elu(x) + 1

// Copy n positions from `first` on into a buffer of C rows, mapped, and times their weights unless they are null; the
// other rows are 0.
template <Map map = NONE>
void read(Head from, Index first, Index n, Index width, float* to, const float* weights = nullptr) {
  for (Index i = 0; i < C; ++i) {
    const Vector weight = all(weights && i < n ? weights[i] : 1.f);
    for (Index j = 0; j < width; j += W) {
      Vector x = {};
      if (i < n) {
        const float* p = from.p + (first + i) * from.stride + j;
        const Index left = from.width - j;
        if (left >= W)
          x = load(p);
        else
          std::memcpy(&x, p, sizeof(float) * left);
        if (map == ELU) {
          x = x > all(0.f) ? x + 1.f : exponential(x);
          if (left < W) x = only(places() < (Bits{} + std::int32_t(left)), x);
        }
        x *= weight;
      }
      store(to + i * width + j, x);
    }
  }
}

// The same, without a copy where the rows in memory have the buffer's layout.
template <Map map = NONE>
Rows view(Head from, Index first, Index n, Index width, float* buffer) {
  if (map == NONE && n == C && from.width == width) return {from.p + first * from.stride, from.stride};
  read<map>(from, first, n, width, buffer);
  return {buffer, width};
}

// Write a vector to columns from j on of position i.
INLINE void put(Head to, Index i, Index j, Vector x) {
  float* p = to.p + i * to.stride + j;
  const Index left = to.width - j;
  if (left >= W)
    store(p, x);
  else
    std::memcpy(p, &x, sizeof(float) * left);
}

// Copy n positions of a buffer to memory, times their weights unless they are null. With ELU, they are gradients of
// phi(x) = `mapped`, and are multiplied by phi'(x) = min(phi(x), 1).
template <Map map = NONE>
void write(Head to, Index first, Index n, Index width, const float* from, const float* weights = nullptr,
           const float* mapped = nullptr) {
  for (Index i = 0; i < n; ++i) {
    const Vector weight = all(weights ? weights[i] : 1.f);
    for (Index j = 0; j < to.width; j += W) {
      Vector x = load(from + i * width + j) * weight;
      if (map == ELU) x *= less(load(mapped + i * width + j), all(1.f));
      put(to, first + i, j, x);
    }
  }
}

// The place to which C positions from `first` on are written as rows of whole vectors: in memory, or in a buffer.
struct Place {
  float* p;
  Index row;
};

Place place(Head to, Index first, Index n, Index width, float* buffer) {
  if (n == C && to.width == width) return {to.p + first * to.stride, to.stride};
  return {buffer, width};
}

// A thread's buffers, initially 0.
class Room {
 public:
  explicit Room(Index numbers)
      : start_(static_cast<float*>(::operator new(sizeof(float) * numbers, std::align_val_t(64)))), next_(start_) {
    std::memset(start_, 0, sizeof(float) * numbers);
  }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  ~Room() { ::operator delete(start_, std::align_val_t(64)); }

  float* take(Index numbers) {
    float* taken = next_;
    next_ += needed(numbers);
    return taken;
  }

  // Start from the first buffer again; contents are kept.
  void rewind() { next_ = start_; }

  static Index needed(Index numbers) { return (numbers + 15) / 16 * 16; }

 private:
  float *start_, *next_;
};

void copy_matrix(Index rows, Index columns, const float* from, Index from_row, float* to, Index to_row) {
  for (Index i = 0; i < rows; ++i) std::memcpy(to + i * to_row, from + i * from_row, sizeof(float) * columns);
}

// Copy a matrix (f, d) into a buffer (F, D), whose other numbers are 0.
void read_matrix(Index f, Index d, const float* from, Index F, Index D, float* to) {
  std::memset(to, 0, sizeof(float) * F * D);
  copy_matrix(f, d, from, d, to, D);
}

// The same into a buffer (D, F), transposed.
void read_transposed(Index f, Index d, const float* from, Index F, Index D, float* to) {
  std::memset(to, 0, sizeof(float) * F * D);
  for (Index i = 0; i < f; ++i)
    for (Index j = 0; j < d; ++j) to[j * F + i] = from[i * d + j];
}

// sum[:] += weights[i] rows[i, :] for C rows; null weights are 1.
void add_rows(Index width, Rows rows, const float* weights, float* sum) {
  for (Index j = 0; j < width; j += W) {
    Vector x = load(sum + j);
    for (Index i = 0; i < C; ++i) {
      const Vector row = load(rows.p + i * rows.row + j);
      x += weights ? weights[i] * row : row;
    }
    store(sum + j, x);
  }
}

struct Sizes {
  Index n;     // positions
  Index f, d;  // columns of queries and keys, of values
  Index F, D;  // padded to whole vectors
};

Index at_most(Index n, Index most) { return n < most ? n : most; }

}  // namespace

// A tensor from Python: (B, H, N, width), contiguous in the last dimension.
struct Heads {
  float* p;
  Index b, h, n, width;

  Head row(Index batch, Index head) const { return {p + batch * b + head * h, n, width}; }
};

namespace {

// Set the padding of a result to 0: the positions from `first` to n. t.p may be null.
void clear(const Head& t, Index first, Index n) {
  if (!t.p) return;
  for (Index i = first; i < n; ++i) std::memset(t.p + i * t.stride, 0, sizeof(float) * t.width);
}

// Request large pages for results, for systems that give them only on request: newly allocated memory then costs a page
// fault for 2 MiB, not for 4 KiB. For results of 4 MiB the faults of small pages take half as long as the kernel.
void in_large_pages(const Heads& t, Index numbers) {
#if defined(__linux__)
  const std::uintptr_t page = getpagesize(), start = std::uintptr_t(t.p) / page * page;
  const std::size_t bytes = std::uintptr_t(t.p + numbers) - start;
  if (bytes >= 2 << 20) madvise(reinterpret_cast<void*>(start), bytes, MADV_HUGEPAGE);  // the system may ignore it
#endif
}

// Call compute(b, h, valid, room) for each head of each row, in parallel: `valid` is the row's entry of `lengths`, or n
// if that is null, and `room` has the thread's buffers, of as many numbers.
template <class Compute>
void each_head(Index batch, Index heads, Index n, const Index* lengths, int threads, Index numbers, Compute compute) {
#pragma omp parallel num_threads(threads)
  {
    Room room(numbers);
#pragma omp for schedule(dynamic)
    for (Index row = 0; row < batch * heads; ++row) {
      room.rewind();
      compute(row / heads, row % heads, lengths ? lengths[row / heads] : n, room);
    }
  }
}

}  // namespace

extern "C" {

int width_of_vectors() { return W; }
}
