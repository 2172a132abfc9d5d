#pragma once
// Products with weights in 4- and 8-bit codes on the CPU: y = x · Wᵀ, W[n, k] = (code - zero) · scale by groups of inputs,
// or E2M1 numbers times scale.
//
// Inputs are coded in 16-bit integers, with a scale for each group (error below 2⁻¹⁶ of the group's largest magnitude),
// so that a product is one multiply-add of pairs (VNNI's vpdpwssd, or vpmaddwd) per 16 or 32 weights, exact in 32 bits.
// The sum of code · input is scaled once a group; what zero subtracts is zero · scale · Σ input, added at the end.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "storage.h"
#include "vectors.h"

namespace {

constexpr int64_t kSlab = 64;    // rows of inputs that stay in the second cache while a tile of weights passes
constexpr int64_t kDirect = 4;   // rows of inputs up to which weights are decoded in registers only
constexpr int64_t kAhead = 2048; // bytes that are fetched ahead: rows are short for the processor's own prefetching

template <int T>
inline void prefetch_dense(const void* p, int64_t at) {
  const char* from = static_cast<const char*>(p) + at * (T == F32 ? 4 : 2) + kAhead;
  for (int64_t i = 0; i < (T == F32 ? 4 : 2); i++) __builtin_prefetch(from + 64 * i);
}

// ---- weights: codes of a row, 32 or twice 32 at a time ---------------------------------------------------------------

struct Bytes {
  static constexpr float kUnit = 1;  // what the integer 1 stands for, before the scale
  const int8_t* at;
  static int64_t stride(int64_t width) { return width; }
  static Bytes from(const uint8_t* p) { return {reinterpret_cast<const int8_t*>(p)}; }
  void two(int64_t pair, Pairs& first, Pairs& second) const {
    first = widen(at + pair * 2 * kLanes);
    second = widen(at + pair * 2 * kLanes + kLanes);
  }
  void fetch(int64_t pair) const { __builtin_prefetch(at + pair * 2 * kLanes + kAhead); }
  Pairs one(uint64_t step, int64_t n) const {  // of which `n` inputs are left
    if (n >= kLanes) return widen(at + step * kLanes);
    int8_t some[kLanes] = {};
    std::memcpy(some, at + step * kLanes, n);
    return widen(some);
  }
};

struct Nibbles {  // of 64 inputs, byte i of 32 has input i in its low and input i + 32 in its high half
  static constexpr float kUnit = 1;
  const uint8_t* at;
  static int64_t stride(int64_t width) { return (width + 63) / 64 * 32; }
  static Nibbles from(const uint8_t* p) { return {p}; }
  void two(int64_t pair, Pairs& first, Pairs& second) const {
    first = nibbles(at + pair * 32, false);
    second = nibbles(at + pair * 32, true);
  }
  void fetch(int64_t pair) const { __builtin_prefetch(at + pair * 32 + kAhead); }
  Pairs one(uint64_t step, int64_t) const { return nibbles(at + step / 2 * 32, step & 1); }  // rows are padded
};

struct Floats4 {  // 4-bit floating point (E2M1) in the order of Nibbles; twice the numbers are whole
  static constexpr float kUnit = 0.5f;
  static constexpr int8_t kTwice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  const uint8_t* at;
  static int64_t stride(int64_t width) { return Nibbles::stride(width); }
  static Floats4 from(const uint8_t* p) { return {p}; }
  void two(int64_t pair, Pairs& first, Pairs& second) const {
    first = looked_up(nibbles(at + pair * 32, false), kTwice);
    second = looked_up(nibbles(at + pair * 32, true), kTwice);
  }
  void fetch(int64_t pair) const { __builtin_prefetch(at + pair * 32 + kAhead); }
  Pairs one(uint64_t step, int64_t) const { return looked_up(nibbles(at + step / 2 * 32, step & 1), kTwice); }
};

struct Wide {  // decoded
  const int16_t* at;
  void two(int64_t pair, Pairs& first, Pairs& second) const {
    first = load16(at + pair * 2 * kLanes);
    second = load16(at + pair * 2 * kLanes + kLanes);
  }
  void fetch(int64_t) const {}
  Pairs one(uint64_t step, int64_t) const { return load16(at + step * kLanes); }
};

// ---- inputs ----------------------------------------------------------------------------------------------------------

struct Inputs {
  int64_t rows, width, steps, group, groups;  // steps: of 32 inputs; group: inputs that share a scale
  int16_t* codes;                             // [rows, 32 · steps]
  float* scale;                               // [rows, groups]
  float* sum;                                 // [rows, groups], of what the codes stand for
};

// One row. Whole numbers (`exact`) are their own codes.
void code(const Inputs& in, const float* x, int64_t row, bool exact) {
  int16_t* codes = in.codes + row * in.steps * kLanes;
  for (int64_t g = 0; g < in.groups; g++) {
    int64_t start = g * in.group, n = std::min(in.group, in.width - start);
    const float* from = x + start;
    int16_t* to = codes + start;
    float peak = 0, faulty = 0;
#pragma omp simd reduction(max : peak) reduction(+ : faulty)
    for (int64_t i = 0; i < n; i++) {
      float size = std::fabs(from[i]);
      peak = size > peak ? size : peak;
      faulty += from[i] - from[i];  // NaN of anything that is not finite
    }
    float scale = exact ? 1.0f : peak / 32767.0f, inverse = exact ? 1.0f : 32767.0f / peak;
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
    in.sum[row * in.groups + g] = scale * float(sum);
  }
  std::memset(codes + in.width, 0, (in.steps * kLanes - in.width) * sizeof(int16_t));
}

// ---- a tile: R rows of the weight times M rows of inputs -------------------------------------------------------------

template <class W, int R, int M>
struct Tile {
  static constexpr int kSums = R * M > 2 ? 1 : R * M == 2 ? 2 : 4;  // chains that hide the latency of a product
  const W* w;
  const float* scale;  // [R, groups], with those of the inputs: [R, M, groups] in order
  const Inputs& in;
  const int16_t* x;
  Floats f[R][M];
  Sums s[kSums][R][M];

  void clear() {
    for (int u = 0; u < kSums; u++)
      for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) s[u][r][m] = no_sums();
  }
  void add_step(int u, const Pairs* v, int64_t c) {
    for (int m = 0; m < M; m++) {
      Pairs input = load16(x + m * in.steps * kLanes + c * kLanes);
      for (int r = 0; r < R; r++) s[u % kSums][r][m] = add_products(s[u % kSums][r][m], v[r], input);
    }
  }
  void add_pair(int u, int64_t pair) {
    Pairs first[R], second[R];
    for (int r = 0; r < R; r++) w[r].two(pair, first[r], second[r]);
    add_step(2 * u, first, 2 * pair);
    add_step(2 * u + 1, second, 2 * pair + 1);
  }
  void add_one(int64_t c) {  // a step that is no part of a pair
    Pairs v[R];
    for (int r = 0; r < R; r++) v[r] = w[r].one(c, in.width - c * kLanes);
    add_step(0, v, c);
  }
  void end_group(int64_t g) {
    for (int r = 0; r < R; r++)
      for (int m = 0; m < M; m++) {
        Sums all = s[0][r][m];
        for (int u = 1; u < kSums; u++) all = add(all, s[u][r][m]);
        f[r][m] = add_scaled(f[r][m], all, scale[(r * M + m) * in.groups + g]);
      }
  }
  template <int N>  // groups of N pairs
  int64_t whole_groups() {
    const int64_t groups = in.width / (N * 2 * kLanes);
    for (int64_t g = 0; g < groups; g++) {
      clear();
      for (int i = 0; i < N; i++) {
        for (int r = 0; r < R; r++) w[r].fetch(g * N + i);
        add_pair(i, g * N + i);
      }
      end_group(g);
    }
    return groups;
  }
  int64_t half_groups() {  // of half a pair
    const int64_t pairs = in.width / (2 * kLanes);
    for (int64_t pair = 0; pair < pairs; pair++) {
      Pairs first[R], second[R];
      for (int r = 0; r < R; r++) {
        w[r].fetch(pair);
        w[r].two(pair, first[r], second[r]);
      }
      clear();
      add_step(0, first, 2 * pair);
      end_group(2 * pair);
      clear();
      add_step(0, second, 2 * pair + 1);
      end_group(2 * pair + 1);
    }
    return 2 * pairs;
  }
  void run() {
    for (int r = 0; r < R; r++)
      for (int m = 0; m < M; m++) f[r][m] = no_floats();
    const int64_t each = in.group / kLanes;
    int64_t g = each == 1 ? half_groups() : each == 2 ? whole_groups<1>() : each == 4 ? whole_groups<2>()
                : each == 8 ? whole_groups<4>() : 0;
    for (; g < in.groups; g++) {  // other sizes, and what is left of the row
      clear();
      for (int64_t c = g * each; c < std::min((g + 1) * each, in.steps); c++) add_one(c);
      end_group(g);
    }
  }
};

struct Weight {
  const uint8_t* codes;
  const void* scale;  // [out, scales] of type ts
  const void* zero;   // [out, scales] of type ts; null: `middle` for all
  int ts;
  int64_t out, scales;
  float middle;
};

struct Output {
  void* y;  // [rows, out] of type ty
  int ty;
  const float* bias;   // [out] or null
  bool adds = false;   // y (fp32) += factor · result
  float factor = 1.0f;

  inline void put(int64_t at, int64_t column, float v) const {
    if (bias) v += bias[column];
    if (adds) static_cast<float*>(y)[at] += factor * v;
    else store<float>(y, ty, at, 1, &v);
  }
};

// `scale` and `shift` [R, scales] of the weight; `both`: room for [R, M, groups].
template <class W, int R, int M>
inline void finish(const W* w, const float* scale, const float* shift, float* both, const Weight& t, const Inputs& in,
                   int64_t first, int64_t row, const Output& o) {
  const bool grouped = t.scales > 1;  // otherwise one scale for all groups of inputs
  for (int r = 0; r < R; r++)
    for (int m = 0; m < M; m++) {
      float* to = both + (r * M + m) * in.groups;
      const float *a = scale + r * t.scales, *b = in.scale + (row + m) * in.groups;
#pragma omp simd
      for (int64_t g = 0; g < in.groups; g++) to[g] = (grouped ? a[g] : a[0]) * b[g];
    }
  Tile<W, R, M> tile{w, both, in, in.codes + row * in.steps * kLanes, {}, {}};
  tile.run();
  for (int m = 0; m < M; m++)
    for (int r = 0; r < R; r++) {
      float v = total(tile.f[r][m]);
      if (shift) {
        const float *z = shift + r * t.scales, *sum = in.sum + (row + m) * in.groups;
        float less = 0;
#pragma omp simd reduction(+ : less)
        for (int64_t g = 0; g < in.groups; g++) less += (grouped ? z[g] : z[0]) * sum[g];
        v -= less;
      }
      o.put((row + m) * t.out + first + r, first + r, v);
    }
}

template <class W, int R>
inline void rows_of_inputs(const W* w, const float* scale, const float* shift, float* both, const Weight& t,
                           const Inputs& in, int64_t first, int64_t from, int64_t to, const Output& o) {
  int64_t row = from;
  if constexpr (R == 1)
    for (; row + 4 <= to; row += 4) finish<W, R, 4>(w, scale, shift, both, t, in, first, row, o);
  for (; row + 2 <= to; row += 2) finish<W, R, 2>(w, scale, shift, both, t, in, first, row, o);
  if (row < to) finish<W, R, 1>(w, scale, shift, both, t, in, first, row, o);
}

// `R` rows of the weight from `first`, times rows `from` to `to` of the inputs.
template <class W, int R>
void some_outputs(const Weight& t, const Inputs& in, int64_t first, int64_t from, int64_t to, float* scale, float* shift,
                  float* both, int16_t* wide, const Output& o) {
  const int64_t n = R * t.scales, stride = W::stride(in.width);
  load<float>(t.scale, t.ts, first * t.scales, n, scale);
  if constexpr (W::kUnit != 1)
    for (int64_t i = 0; i < n; i++) scale[i] *= W::kUnit;
  const bool shifted = t.zero || t.middle != 0;
  if (t.zero) load<float>(t.zero, t.ts, first * t.scales, n, shift);
  if (shifted) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) shift[i] = (t.zero ? shift[i] : t.middle) * scale[i];
  }
  const float* z = shifted ? shift : nullptr;
  if (to - from <= kDirect) {
    for (int r = 0; r < R; r++) {
      W w = W::from(t.codes + (first + r) * stride);
      rows_of_inputs<W, 1>(&w, scale + r * t.scales, z ? z + r * t.scales : nullptr, both, t, in, first + r, from, to, o);
    }
    return;
  }
  const int64_t length = in.steps * kLanes;
  Wide w[R];
  for (int r = 0; r < R; r++) {
    W one = W::from(t.codes + (first + r) * stride);
    int16_t* to = wide + r * length;
    const int64_t pairs = in.width / (2 * kLanes);
    for (int64_t pair = 0; pair < pairs; pair++, to += 2 * kLanes) {
      Pairs first, second;
      one.fetch(pair);
      one.two(pair, first, second);
      store16(to, first);
      store16(to + kLanes, second);
    }
    for (int64_t c = 2 * pairs; c < in.steps; c++, to += kLanes) store16(to, one.one(c, in.width - c * kLanes));
    w[r].at = wide + r * length;
  }
  rows_of_inputs<Wide, R>(w, scale, z, both, t, in, first, from, to, o);
}

// What one thread of a team needs; grows, and is kept between products.
struct Scratch {
  std::vector<float> row, scale, shift, both;
  std::vector<int16_t> wide;
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
  const int64_t tiles = (t.out + kRows - 1) / kRows;
  float* scale = at_least(own.scale, kRows * t.scales);
  float* shift = at_least(own.shift, kRows * t.scales);
  float* both = at_least(own.both, 2 * kRows * in.groups);
  int16_t* wide = at_least(own.wide, in.rows > kDirect ? kRows * in.steps * kLanes : 1);
  for (int64_t from = 0; from < in.rows; from += kSlab) {
    const int64_t to = std::min(in.rows, from + kSlab);
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < tiles; i++) {
      int64_t first = i * kRows, last = std::min(t.out, first + kRows);
      if (last - first == kRows) {
        some_outputs<W, kRows>(t, in, first, from, to, scale, shift, both, wide, o);
      } else {
        for (; first < last; first++) some_outputs<W, 1>(t, in, first, from, to, scale, shift, both, wide, o);
      }
    }
  }
}

// Room for the codes of inputs: kept between calls.
struct InputStore {
  std::vector<int16_t> codes;
  std::vector<float> numbers;

  // `group`: inputs that share a scale of the weight. A whole row with one scale is cut, so that an outlier takes the
  // precision of few inputs.
  Inputs make(int64_t rows, int64_t width, int64_t group) {
    const int64_t steps = (width + kLanes - 1) / kLanes, own = group < width ? group : 256;
    const int64_t groups = (width + own - 1) / own;
    int16_t* c = at_least(codes, rows * steps * kLanes);
    float* n = at_least(numbers, 2 * rows * groups);
    return {rows, width, steps, own, groups, c, n, n + rows * groups};
  }
};

}  // namespace
