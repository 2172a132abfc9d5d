#pragma once
// Products with weights in 4- and 8-bit codes on the CPU: y = x · Wᵀ, W[n, k] = (code - zero) · scale by groups of inputs,
// or E2M1 numbers times scale.
//
// Inputs are coded in 16-bit integers, with a scale for each group (an error of at most half of 1 / 32639 of the group's largest),
// and multiplied exactly. Codes lie in tiles of 32 outputs, four inputs of an output side by side, so that a vector of
// sums is of neighboring outputs and an input is broadcast to all of them. A tile of some rows of inputs times some
// outputs stays in registers, and each weight is read once for as many rows. A group's sum is scaled once.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "storage.h"
#include "vectors.h"

namespace {

constexpr int64_t kSlab = 64;     // rows of inputs that stay in the second cache while a tile of weights passes
constexpr int64_t kGroup = 256;   // inputs at most that share a scale: their sums do not overflow
constexpr int64_t kPiece = 16384; // bytes of a tile of weights that stay in the first cache while rows of inputs pass
constexpr int64_t kAhead = 2048;  // bytes that are fetched ahead
// Into which cache: on Zen 4, fetching into the second one makes steps with fp32 weights faster, and with bytes and one
// row; not with nibbles, nor with vectors of AVX2. Not known of others.
#if defined(__AVX512BW__) && (defined(__znver3__) || defined(__znver4__) || defined(__znver5__))
constexpr int kNear = 2;
#else
constexpr int kNear = 3;
#endif

// ---- weights: how many steps of four inputs a vector of codes has, and which ---------------------------------------------

struct Bytes {
  static constexpr int kSteps = 1;
  static constexpr int32_t kMiddle = 128;  // the code of zero
  static constexpr float kUnit = 1;        // what the integer 1 stands for, before the scale
  static Codes step(Bytes4 x, int) { return unfolded(x); }
  static float number(uint8_t byte, int64_t) { return float(byte - kMiddle); }  // of one input, before the scale
};

struct Nibbles {  // the first four inputs of eight in the low halves, the others in the high ones
  static constexpr int kSteps = 2;
  static constexpr int32_t kMiddle = 8;
  static constexpr float kUnit = 1;
  static Codes step(Bytes4 x, int i) { return unfolded(i ? high_halves(x) : low_halves(x)); }
  static float number(uint8_t byte, int64_t i) { return float((i ? byte >> 4 : byte & 15) - kMiddle); }
};

struct Floats4 {  // 4-bit floating point (E2M1) in the order of Nibbles; twice the numbers are whole
  static constexpr int kSteps = 2;
  static constexpr int32_t kMiddle = 12;
  static constexpr float kUnit = 0.5f;
  static constexpr uint8_t kTwice[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  static Codes step(Bytes4 x, int i) { return unfolded(looked_up(i ? high_halves(x) : low_halves(x), kTwice)); }
  static float number(uint8_t byte, int64_t i) { return float(kTwice[i ? byte >> 4 : byte & 15] - kMiddle); }
};

// ---- inputs ----------------------------------------------------------------------------------------------------------

struct Inputs {
  int64_t rows, width, steps, group, groups;  // steps: of four inputs, even; group: inputs that share a scale
  int64_t stride;                             // bytes of a row of codes
  int8_t* codes;                              // [rows, stride]: two bytes an input
  float* scale;                               // [rows, groups]
  int32_t* sum;                               // [rows, groups], of the integers
};

// One row. Whole numbers (`exact`) are their own codes.
void code(const Inputs& in, const float* x, int64_t row, bool exact) {
  int8_t* codes = in.codes + row * in.stride;
  for (int64_t g = 0; g < in.groups; g++) {
    const int64_t start = g * in.group, n = std::min(in.group, in.width - start);
    const float* from = x + start;
    alignas(64) int16_t to[kGroup + 8];
    float peak = 0, faulty = 0;
#pragma omp simd reduction(max : peak) reduction(+ : faulty)
    for (int64_t i = 0; i < n; i++) {
      float size = std::fabs(from[i]);
      peak = size > peak ? size : peak;
      faulty += from[i] - from[i];  // NaN of anything that is not finite
    }
    float scale = exact ? 1.0f : peak / kLargest, inverse = exact ? 1.0f : kLargest / peak;
    int32_t sum = 0;
    if (faulty == 0 && std::isfinite(inverse)) {  // of a peak near zero nothing is left
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < n; i++) {
        int32_t v = int32_t(std::nearbyint(from[i] * inverse));
        to[i] = int16_t(v);
        sum += v;
      }
    } else {
      std::memset(to, 0, n * sizeof(int16_t));
    }
    if (faulty != 0) scale = faulty;
    in.scale[row * in.groups + g] = scale;
    in.sum[row * in.groups + g] = sum;
    std::memset(to + n, 0, 8 * sizeof(int16_t));
    for (int64_t i = 0; i < n; i += 8) put_eight(codes + 2 * (start + i), to + i);
  }
}

// ---- a tile: N vectors of outputs times M rows of inputs ---------------------------------------------------------------

struct Weight {
  const uint8_t* codes;  // [tiles, steps or half as many, kTile, 4]
  const void* scale;     // [tiles, scales, kTile] of type ts
  const void* zero;      // the same, less the code of zero; or null
  int ts;
  int64_t out, scales;
};

// Adds the products of groups `begin` to `end` of the inputs to f [M, kTile]. `scale` and `zero` [scales, kTile], or no
// zero. Not inlined, so that registers are left to the sums.
template <class W, int N, int M>
__attribute__((noinline)) void tile(const uint8_t* w, const Inputs& in, int64_t row, int64_t begin, int64_t end,
                                    const float* scale, const float* zero, int64_t scales, float* f) {
  const int8_t* x = in.codes + row * in.stride;
  const int64_t stride = in.stride, each = in.groups / scales;  // groups of inputs that share a scale of the weight
  for (int64_t g = begin; g < end; g++) {
    Sums s[N][M], t[N][M];
UNROLL
    for (int n = 0; n < N; n++)
UNROLL
      for (int m = 0; m < M; m++) s[n][m] = t[n][m] = no_sums();
    const int64_t inputs = kFour * W::kSteps, last = (std::min((g + 1) * in.group, in.width) + inputs - 1) / inputs;
    for (int64_t c = g * in.group / inputs; c < last; c++) {
      Bytes4 held[N];
UNROLL
      for (int n = 0; n < N; n++) {
        const uint8_t* at = w + c * kFour * kTile + n * kFour * kFloats;
        held[n] = load_bytes(at);
        if (n * kFour * kFloats % 64 == 0) __builtin_prefetch(at + kAhead, 0, W::kSteps == 1 && M == 1 ? kNear : 3);
      }
UNROLL
      for (int i = 0; i < W::kSteps; i++) {
        Codes codes[N];
UNROLL
        for (int n = 0; n < N; n++) codes[n] = W::step(held[n], i);
UNROLL
        for (int m = 0; m < M; m++) {
          const Four four = load_four(x + m * stride + (c * W::kSteps + i) * 2 * kFour);
UNROLL
          for (int n = 0; n < N; n++) {
            s[n][m] = add_products<0>(s[n][m], codes[n], four);
            t[n][m] = add_products<1>(t[n][m], codes[n], four);
          }
        }
      }
    }
UNROLL
    for (int n = 0; n < N; n++) {
      const int64_t at = g / each * kTile + n * kFloats;
      const Floats own = load_floats<F32>(scale, at);
UNROLL
      for (int m = 0; m < M; m++) {
        const int64_t group = (row + m) * in.groups + g;
        Floats all = joined(s[n][m], t[n][m], W::kMiddle * in.sum[group]);
        if (zero) all = multiply_add(load_floats<F32>(zero, at), all_floats(-float(in.sum[group])), all);
        float* to = f + m * kTile + n * kFloats;
        store_floats(to, multiply_add(all, multiply(own, all_floats(in.scale[group])), load_floats<F32>(to, 0)));
      }
    }
  }
}

struct Output {
  void* y;  // [rows, out] of type ty
  int ty;
  const float* bias;   // [out] or null
  bool adds = false;   // y (fp32) += factor · result
  float factor = 1.0f;

  // Results `v` of `n` neighboring outputs from `column`, of the row that begins at `row`.
  inline void put(int64_t row, int64_t column, int64_t n, float* v) const {
    if (bias)
      for (int64_t i = 0; i < n; i++) v[i] += bias[column + i];
    if (!adds) return store<float>(y, ty, row + column, n, v);
    float* to = static_cast<float*>(y) + row + column;
    for (int64_t i = 0; i < n; i++) to[i] += factor * v[i];
  }
};

// `n` cut into parts of at most `most` that are as equal as can be: the size of all but the last.
inline int64_t even_part(int64_t n, int64_t most) {
  const int64_t parts = (n + most - 1) / most;
  return parts ? (n + parts - 1) / parts : 1;
}

// Rows `row` to `row + rows` of the inputs, at most kRows, times a tile of the weight.
template <class W, int M>
void some_rows(int64_t rows, const uint8_t* w, const Inputs& in, int64_t row, int64_t begin, int64_t end,
               const float* scale, const float* zero, const Weight& t, float* f) {
  if constexpr (M > 1)
    if (rows < M) return some_rows<W, M - 1>(rows, w, in, row, begin, end, scale, zero, t, f);
  constexpr int N = M == 1 ? kTile / kFloats : kWide;
  for (int64_t at = 0; at < kTile; at += N * kFloats)
    tile<W, N, M>(w + at * kFour, in, row, begin, end, scale + at, zero ? zero + at : nullptr, t.scales, f + at);
}

// What one thread of a team needs; grows, and is kept between products.
struct Scratch {
  std::vector<float> row, scale, zero, sums;
};

// Called by every thread of a team: the inputs' codes, complete when all have returned.
inline void team_code(const Inputs& in, const void* x, int tx, bool exact, Scratch& own) {
  float* row = at_least(own.row, in.width);
#pragma omp for
  for (int64_t i = 0; i < in.rows; i++) {
    load<float>(x, tx, i * in.width, in.width, row);
    code(in, row, i, exact);
  }
}

// Called by every thread of a team, which may return before the others have.
template <class W>
void team_product(const Weight& t, const Inputs& in, const Output& o, Scratch& own) {
  constexpr int64_t inputs = kFour * W::kSteps;
  const int64_t tiles = (t.out + kTile - 1) / kTile, numbers = t.scales * kTile;
  const int64_t slab = even_part(in.rows, kSlab), bytes = (in.width + inputs - 1) / inputs * kFour * kTile;
  float *scale = at_least(own.scale, numbers), *zero = t.zero ? at_least(own.zero, numbers) : nullptr;
  const int64_t piece = in.rows > kRows ? std::max<int64_t>(1, kPiece * in.groups / bytes) : in.groups;
  float* sums = at_least(own.sums, slab * kTile);
#pragma omp for collapse(2) schedule(static) nowait
  for (int64_t from = 0; from < in.rows; from += slab)
    for (int64_t i = 0; i < tiles; i++) {
      load<float>(t.scale, t.ts, i * numbers, numbers, scale);
      if constexpr (W::kUnit != 1)
        for (int64_t j = 0; j < numbers; j++) scale[j] *= W::kUnit;
      if (zero) load<float>(t.zero, t.ts, i * numbers, numbers, zero);
      const int64_t rows = std::min(slab, in.rows - from), block = even_part(rows, kRows);
      std::memset(sums, 0, rows * kTile * sizeof(float));
      for (int64_t g = 0; g < in.groups; g += piece)
        for (int64_t m = 0; m < rows; m += block)
          some_rows<W, kRows>(std::min(block, rows - m), t.codes + i * bytes, in, from + m, g,
                              std::min(g + piece, in.groups), scale, zero, t, sums + m * kTile);
      const int64_t first = i * kTile, some = std::min(kTile, t.out - first);
      for (int64_t m = 0; m < rows; m++) o.put((from + m) * t.out, first, some, sums + m * kTile);
    }
}

// Inputs that share a scale: the weight's group or, so that an outlier takes the precision of few inputs, a part of it.
inline int64_t part_of(int64_t group, int64_t width) {
  int64_t own = kGroup;
  while (group < width && group % own) own -= 32;
  return own;
}

// By a team: rows `start` to `stop` of the weight [out, width] itself, to y of type ty.
template <class W>
void team_expand(const Weight& t, int64_t width, int64_t start, int64_t stop, void* y, int ty) {
  constexpr int64_t inputs = kFour * W::kSteps;
  const int64_t group = width / t.scales, part = part_of(group, width), numbers = t.scales * kTile;
  const int64_t bytes = (width + inputs - 1) / inputs * kFour * kTile;
  std::vector<float> scale(numbers), zero(numbers);
  float row[kGroup + inputs];
#pragma omp for schedule(static)
  for (int64_t i = start / kTile; i < (stop + kTile - 1) / kTile; i++) {
    load<float>(t.scale, t.ts, i * numbers, numbers, scale.data());
    if (t.zero) load<float>(t.zero, t.ts, i * numbers, numbers, zero.data());
    for (int64_t at = 0; at < width; at += part)  // whose codes stay in the first cache
      for (int64_t n = std::max(start, i * kTile); n < std::min(stop, (i + 1) * kTile); n++) {
        const int64_t some = std::min(part, width - at), own = at / group * kTile + n - i * kTile;
        const uint8_t* from = t.codes + i * bytes + at / inputs * kFour * kTile + (n - i * kTile) * kFour;
        for (int64_t c = 0; c * inputs < some; c++)
UNROLL
          for (int64_t j = 0; j < inputs; j++)
            row[c * inputs + j] = W::number(from[c * kFour * kTile + j % kFour], j / kFour);
        const float less = zero[own], factor = scale[own] * W::kUnit;
#pragma omp simd
        for (int64_t j = 0; j < some; j++) row[j] = (row[j] - less) * factor;
        store<float>(y, ty, (n - start) * width + at, some, row);
      }
  }
}

// Room for the codes of inputs: kept between calls.
struct InputStore {
  std::vector<int8_t> codes;
  std::vector<float> scale;
  std::vector<int32_t> sum;

  // For inputs that are no more and no wider, with whatever groups.
  void reserve(int64_t rows, int64_t width) {
    for (int64_t group : {int64_t(32), width}) make(rows, width, group);
  }
  // `group`: inputs that share a scale of the weight, or the width.
  Inputs make(int64_t rows, int64_t width, int64_t group) {
    const int64_t own = part_of(group, width);
    const int64_t steps = (width + 7) / 8 * 2, groups = (width + own - 1) / own;
    const int64_t stride = steps * 2 * kFour + 64;  // rows do not fall on the same lines of the first cache
    int8_t* c = at_least(codes, rows * stride);
    float* s = at_least(scale, rows * groups);
    return {rows, width, steps, own, groups, stride, c, s, at_least(sum, rows * groups)};
  }
};

}  // namespace
