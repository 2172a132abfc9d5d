#pragma once
// Products of a few rows with dense weights on the CPU: y = x · Wᵀ. A tile of some rows of the weight times some rows of
// inputs stays in registers, so that each weight is read once for as many rows. With instructions for products in bf16
// that are faster than those for fp32, which Intel's are not, inputs of such weights are rounded to bf16, as PyTorch's
// products do.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "lowbit.h"
#include "storage.h"
#include "vectors.h"

namespace {

#if defined(__AVX512BW__)
constexpr int kOutputs = 4;  // rows of the weight in a tile
#else
constexpr int kOutputs = 2;
#endif
constexpr int kInputs = 6;  // rows of inputs in a tile
constexpr int64_t kNext = 32768;  // bytes of a tile's rows up to which the next ones are fetched

// Vectors of products of weights and inputs: fp32 weights times fp32 inputs, or 16-bit weights that are widened first.
template <int T>
struct Widened {
  using Input = float;
  static constexpr int64_t kStep = kFloats;
  static Floats weight(const void* p, int64_t at) { return load_floats<T>(p, at); }
  static Floats input(const float* p) { return load_floats<F32>(p, 0); }
  static Floats add_products(Floats sum, Floats w, Floats x) { return multiply_add(w, x, sum); }
  static float number(float x) { return x; }
};

#if defined(__AVX512BF16__)
struct Halves {  // bf16 times bf16
  using Input = uint16_t;
  static constexpr int64_t kStep = 32;
  static __m512bh weight(const void* p, int64_t at) { return input(static_cast<const uint16_t*>(p) + at); }
  static __m512bh input(const uint16_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static Floats add_products(Floats sum, __m512bh w, __m512bh x) { return _mm512_dpbf16_ps(sum, w, x); }
  static float number(uint16_t x) { return bf16_to_float(x); }
};
#endif

// Rows `first` to first + R of a weight of type T times M rows of inputs, in out [M, R]. U sums of each hide the latency
// of a product where R · M are too few.
template <class K, int T, int R, int M, int U>
__attribute__((noinline)) void dense_tile(const void* weight, int64_t first, const typename K::Input* x, int64_t width,
                                          float* out) {
  Floats f[U][M][R];
UNROLL
  for (int u = 0; u < U; u++)
UNROLL
    for (int m = 0; m < M; m++)
UNROLL
      for (int r = 0; r < R; r++) f[u][m][r] = no_floats();
  constexpr int64_t bytes = T == F32 ? 4 : 2;
  const int64_t block = R * width * bytes, ahead = R > 1 && block <= kNext ? block : kAhead;  // the next rows, if near
  int64_t i = 0;
  for (; i + U * K::kStep <= width; i += U * K::kStep) {
UNROLL
    for (int u = 0; u < U; u++) {
      decltype(K::weight(weight, 0)) w[R];
UNROLL
      for (int r = 0; r < R; r++) {
        const int64_t at = (first + r) * width + i + u * K::kStep;
        w[r] = K::weight(weight, at);
        __builtin_prefetch(static_cast<const char*>(weight) + at * bytes + ahead, 0, kNear);
      }
UNROLL
      for (int m = 0; m < M; m++) {
        const auto input = K::input(x + m * width + i + u * K::kStep);
UNROLL
        for (int r = 0; r < R; r++) f[u][m][r] = K::add_products(f[u][m][r], w[r], input);
      }
    }
  }
UNROLL
  for (int m = 0; m < M; m++)
UNROLL
    for (int r = 0; r < R; r++) {
      Floats all = f[0][m][r];
UNROLL
      for (int u = 1; u < U; u++) all = add(all, f[u][m][r]);
      out[m * R + r] = total(all);
    }
  for (; i < width; i++)
    for (int r = 0; r < R; r++) {
      float w;
      load<float>(weight, T, (first + r) * width + i, 1, &w);
      for (int m = 0; m < M; m++) out[m * R + r] += w * K::number(x[m * width + i]);
    }
}

template <class K, int T, int R, int M>
void dense_rows(const void* weight, int64_t out, int64_t first, const typename K::Input* x, int64_t width, int64_t rows,
                int64_t row, const Output& o) {
  if constexpr (M > 1)
    if (rows < M) return dense_rows<K, T, R, M - 1>(weight, out, first, x, width, rows, row, o);
  constexpr int kR = M > 2 ? R : 1;  // what waits for memory reads it in order
  float sums[M * kR];
  for (int64_t n = first; n < first + R; n += kR) {
    dense_tile<K, T, kR, M, (M > 2 ? 1 : 4)>(weight, n, x + row * width, width, sums);
    for (int m = 0; m < M; m++) o.put((row + m) * out, n, kR, sums + m * kR);
  }
}

// Called by every thread of a team, which may return before the others have. weight [out, width], x [rows, width].
template <class K, int T>
void team_dense(const void* weight, int64_t out, int64_t width, const typename K::Input* x, int64_t rows,
                const Output& o) {
  const int64_t block = even_part(rows, kInputs), whole = out / kOutputs, rest = out % kOutputs;
#pragma omp for schedule(static) nowait
  for (int64_t n = 0; n < whole + rest; n++)
    for (int64_t row = 0; row < rows; row += block) {
      const int64_t some = std::min(block, rows - row);
      if (n < whole) dense_rows<K, T, kOutputs, kInputs>(weight, out, n * kOutputs, x, width, some, row, o);
      else dense_rows<K, T, 1, kInputs>(weight, out, whole * kOutputs + n - whole, x, width, some, row, o);
    }
}

// Inputs fp32. `own`: room for them in bf16.
inline void team_dense(int type, const void* weight, int64_t out, int64_t width, const float* x, int64_t rows,
                       const Output& o, std::vector<uint16_t>& own) {
  if (type == F32) return team_dense<Widened<F32>, F32>(weight, out, width, x, rows, o);
  if (type == F16) return team_dense<Widened<F16>, F16>(weight, out, width, x, rows, o);
#if defined(__AVX512BF16__)
  if (!__builtin_cpu_is("intel")) {
    uint16_t* low = at_least(own, rows * width);
    store<float>(low, BF16, 0, rows * width, x);
    return team_dense<Halves, BF16>(weight, out, width, low, rows, o);
  }
#endif
  (void)own;
  team_dense<Widened<BF16>, BF16>(weight, out, width, x, rows, o);
}

}  // namespace
