// Attention over a paged cache of keys and values, plain or in codes, and how a new one is written to it.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "mathematics.h"
#include "storage.h"
#include "vectors.h"

namespace {

enum Store { PLAIN = 0, INT8 = 1, INT4 = 2, FP8 = 3 };

struct Cache {
  void* rows;              // [G, slots, width] of `type`, or codes [G, slots, width or width / 2]
  uint16_t* scale;         // fp16 [G, slots, scales]
  uint16_t* least;         // fp16, the same (INT4)
  int64_t store, type;     // INT4: `type` is the group that shares a scale
};

struct Pages {
  const int32_t* table;    // [rows, blocks]
  const int32_t* lengths;  // [rows]: tokens of each sequence, the new one included
  int64_t blocks, block, slots, sequence;  // `sequence`: slots between the sequences of a cache without pages, else 0
};

float half_to_float(uint16_t h) {
  float f;
  load<float>(&h, F16, 0, 1, &f);
  return f;
}

float fp8_to_float(uint8_t v) {  // e4m3fn
  int exponent = (v >> 3) & 15, mantissa = v & 7;
  float size = exponent ? std::ldexp(1.0f + mantissa / 8.0f, exponent - 7) : std::ldexp(mantissa / 8.0f, -6);
  if ((v & 127) == 127) size = std::numeric_limits<float>::quiet_NaN();
  return v & 128 ? -size : size;
}

struct Fp8Table {
  float value[256];
  Fp8Table() {
    for (int i = 0; i < 256; i++) value[i] = fp8_to_float(uint8_t(i));
  }
};

// The key or value in slot `at` of the cache (counted over all heads): in place, or expanded into `buffer`.
inline const float* cached(const Cache& c, int64_t at, int64_t width, float* buffer) {
  switch (c.store) {
    case INT8: {
      auto p = static_cast<const int8_t*>(c.rows) + at * width;
      float scale = half_to_float(c.scale[at]);
#pragma omp simd
      for (int64_t i = 0; i < width; i++) buffer[i] = float(p[i]) * scale;
      return buffer; }
    case INT4: {  // two codes a byte: the first half of the row in the low bits; groups of 64 or what divides the width
      auto p = static_cast<const uint8_t*>(c.rows) + at * (width / 2);
      const int64_t group = c.type, groups = width / group;
#pragma omp simd
      for (int64_t i = 0; i < width / 2; i++) {
        buffer[i] = float(p[i] & 15);
        buffer[i + width / 2] = float(p[i] >> 4);
      }
      for (int64_t g = 0; g < groups; g++) {
        float scale = half_to_float(c.scale[at * groups + g]), least = half_to_float(c.least[at * groups + g]);
#pragma omp simd
        for (int64_t i = g * group; i < (g + 1) * group; i++) buffer[i] = least + buffer[i] * scale;
      }
      return buffer; }
    case FP8: {
      static const Fp8Table table;
      auto p = static_cast<const uint8_t*>(c.rows) + at * width;
      for (int64_t i = 0; i < width; i++) buffer[i] = table.value[p[i]];
      return buffer; }
    default:
      if (c.type == F32) return static_cast<const float*>(c.rows) + at * width;
      load<float>(c.rows, int(c.type), at * width, width, buffer);
      return buffer;
  }
}

uint16_t half_of(float v) {
  uint16_t h;
  store<float>(&h, F16, 0, 1, &v);
  return h;
}

uint8_t fp8_of(float v) {  // to the nearest, ties to even; beyond 448 the largest
  const uint8_t sign = std::signbit(v) ? 128 : 0;
  if (std::isnan(v)) return sign | 127;
  const float size = std::min(std::fabs(v), 448.0f);
  if (size < 0.015625f) return sign | uint8_t(std::nearbyint(size * 512.0f));
  int exponent;
  std::frexp(size, &exponent);  // size in [2^(exponent - 1), 2^exponent)
  const int mantissa = int(std::nearbyint(std::ldexp(size, 4 - exponent)));  // 8 … 16
  return sign | uint8_t(((exponent + 6) << 3) + mantissa - 8);
}

float scale_of(float v) { return half_to_float(half_of(std::min(65504.0f, std::max(5.9604645e-8f, v)))); }

inline float code_of(float v, float low, float high) { return std::min(high, std::max(low, std::nearbyint(v))); }

// Write a key or value to slot `at`, as nn/quant/quantized_kv.py does.
void put_cached(const Cache& c, int64_t at, int64_t width, const float* x) {
  switch (c.store) {
    case INT8: {
      float peak = 0;
      for (int64_t i = 0; i < width; i++) peak = std::max(peak, std::fabs(x[i]));
      const float scale = scale_of(peak / 127.0f);
      auto to = static_cast<int8_t*>(c.rows) + at * width;
      for (int64_t i = 0; i < width; i++) to[i] = int8_t(code_of(x[i] / scale, -127, 127));
      c.scale[at] = half_of(scale);
      return; }
    case INT4: {
      const int64_t group = c.type, groups = width / group, half = width / 2;
      auto to = static_cast<uint8_t*>(c.rows) + at * half;
      std::memset(to, 0, half);
      for (int64_t g = 0; g < groups; g++) {
        const float* from = x + g * group;
        const float lowest = *std::min_element(from, from + group), highest = *std::max_element(from, from + group);
        const float least = half_to_float(half_of(lowest)), scale = scale_of((highest - least) / 15.0f);
        for (int64_t i = g * group; i < (g + 1) * group; i++) {
          const uint8_t code = uint8_t(code_of((x[i] - least) / scale, 0, 15));
          to[i % half] |= i < half ? code : code << 4;
        }
        c.least[at * groups + g] = half_of(least);
        c.scale[at * groups + g] = half_of(scale);
      }
      return; }
    case FP8: {
      auto to = static_cast<uint8_t*>(c.rows) + at * width;
      for (int64_t i = 0; i < width; i++) to[i] = fp8_of(x[i]);
      return; }
    default: store<float>(c.rows, int(c.type), at * width, width, x);
  }
}

constexpr int64_t kKeys = 32;  // keys whose scores are weighted at a time

// What a model's attention does to its scores beside scaling and masking them, as ScoreChanges of nn/model/attention.py.
struct Changes {
  const float* slopes;  // [heads] of ALiBi, or null
  const float* sinks;   // [heads]: the score of one more key without a value, or null
  double cap;           // of soft caps; 0: none
};

// Scores [R, kKeys] of R query heads q [R, width] with `n` keys.
template <int R>
void score(const float* q, const float* const* keys, int64_t n, int64_t width, float* scores) {
  const int64_t whole = width / kFloats * kFloats;
  for (int64_t i = 0; i < n; i++) {
    Floats sum[R];
UNROLL
    for (int r = 0; r < R; r++) sum[r] = no_floats();
    for (int64_t j = 0; j < whole; j += kFloats) {
      const Floats k = load_floats<F32>(keys[i], j);
UNROLL
      for (int r = 0; r < R; r++) sum[r] = multiply_add(load_floats<F32>(q, r * width + j), k, sum[r]);
    }
    for (int r = 0; r < R; r++) {
      float dot = total(sum[r]);
      for (int64_t j = whole; j < width; j++) dot += q[r * width + j] * keys[i][j];
      scores[r * kKeys + i] = dot;
    }
  }
}

// Adds `n` values, weighted by R heads' scores [R, kKeys], to out [R, width].
template <int R>
void weigh(const float* scores, const float* const* values, int64_t n, int64_t width, float* out) {
  const int64_t whole = width / kFloats * kFloats;
  for (int64_t j = 0; j < whole; j += kFloats) {
    Floats sum[R];
UNROLL
    for (int r = 0; r < R; r++) sum[r] = load_floats<F32>(out, r * width + j);
    for (int64_t i = 0; i < n; i++) {
      const Floats v = load_floats<F32>(values[i], j);
UNROLL
      for (int r = 0; r < R; r++) sum[r] = multiply_add(all_floats(scores[r * kKeys + i]), v, sum[r]);
    }
UNROLL
    for (int r = 0; r < R; r++) store_floats(out + r * width + j, sum[r]);
  }
  for (int r = 0; r < R; r++)
    for (int64_t i = 0; i < n; i++)
      for (int64_t j = whole; j < width; j++) out[r * width + j] += scores[r * kKeys + i] * values[i][j];
}

// Calls f(r, R) for all `repeat` heads, R of them from r on at a time.
template <class F>
void by_heads(int64_t repeat, F f) {
  int64_t r = 0;
  for (; r + 4 <= repeat; r += 4) f(r, std::integral_constant<int, 4>());
  for (; r < repeat; r++) f(r, std::integral_constant<int, 1>());
}

// The query heads of one key head of one sequence, [repeat, width], already scaled → out [repeat, width]. `window`:
// tokens that are seen, the newest; 0: all; negative: those of the last chunk of -window tokens.
void attend(const float* q, float* out, int64_t repeat, int64_t width, const Cache& keys, const Cache& values,
            const Pages& p, int64_t row, int64_t head, int64_t window, const Changes& changes,
            std::vector<float>& room) {
  float* buffer = at_least(room, kKeys * width + repeat * (kKeys + 2));
  float *scores = buffer + kKeys * width, *peak = scores + repeat * kKeys, *sum = peak + repeat;
  const int64_t length = p.lengths[row];
  const int64_t first = window < 0 ? (length - 1) / -window * -window : window && window < length ? length - window : 0;
  const int32_t* table = p.table + row * p.blocks;
  const int64_t base = head * p.slots + row * p.sequence;
  for (int64_t r = 0; r < repeat; r++) {
    peak[r] = changes.sinks ? changes.sinks[head * repeat + r] : -std::numeric_limits<float>::infinity();
    sum[r] = changes.sinks ? 1.0f : 0.0f;
  }
  std::memset(out, 0, repeat * width * sizeof(float));
  for (int64_t start = first; start < length; start += kKeys) {
    const int64_t n = std::min(kKeys, length - start);
    int64_t slot[kKeys];
    for (int64_t i = 0; i < n; i++) slot[i] = base + int64_t(table[(start + i) / p.block]) * p.block + (start + i) % p.block;
    const float* rows[kKeys];
    for (int64_t i = 0; i < n; i++) rows[i] = cached(keys, slot[i], width, buffer + i * width);
    by_heads(repeat, [&](int64_t r, auto some) {
      score<some>(q + r * width, rows, n, width, scores + r * kKeys);
    });
    for (int64_t r = 0; r < repeat; r++) {
      float* s = scores + r * kKeys;
      if (changes.cap > 0)
        for (int64_t i = 0; i < n; i++) s[i] = float(changes.cap) * std::tanh(s[i] / float(changes.cap));
      if (changes.slopes) {
        const float slope = changes.slopes[head * repeat + r];
        for (int64_t i = 0; i < n; i++) s[i] += slope * float(start + i + 1 - length);
      }
      float higher = peak[r];
      for (int64_t i = 0; i < n; i++) higher = std::max(higher, s[i]);
      const float shrink = peak[r] == -std::numeric_limits<float>::infinity() ? 0.0f : std::exp(peak[r] - higher);
      float added = 0;
#pragma omp simd reduction(+ : added)
      for (int64_t i = 0; i < n; i++) {
        s[i] = s[i] - higher < -87.0f ? 0.0f : exponential(s[i] - higher);
        added += s[i];
      }
      sum[r] = sum[r] * shrink + added;
      peak[r] = higher;
      if (shrink != 1.0f) {
        float* to = out + r * width;
#pragma omp simd
        for (int64_t j = 0; j < width; j++) to[j] *= shrink;
      }
    }
    for (int64_t i = 0; i < n; i++) rows[i] = cached(values, slot[i], width, buffer + i * width);
    by_heads(repeat, [&](int64_t r, auto some) {
      weigh<some>(scores + r * kKeys, rows, n, width, out + r * width);
    });
  }
  for (int64_t r = 0; r < repeat; r++) {
    const float inverse = 1.0f / sum[r];
#pragma omp simd
    for (int64_t j = 0; j < width; j++) out[r * width + j] *= inverse;
  }
}

}  // namespace
