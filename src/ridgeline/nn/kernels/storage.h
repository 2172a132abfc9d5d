// Storage types, converted to and from the compute type of a kernel in pieces that stay in the first cache.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

enum Type { F32 = 0, F64 = 1, BF16 = 2, F16 = 3, E8M0 = 4 };  // E8M0: powers of two, which are only loaded

inline float bf16_to_float(uint16_t v) {
  uint32_t bits = uint32_t(v) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline uint16_t float_to_bf16(float f) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  uint32_t nan = (bits & 0x7fffffffu) > 0x7f800000u;
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return uint16_t(nan ? 0x7fc0u : rounded);
}

template <class C>
void load(const void* from, int type, int64_t at, int64_t n, C* __restrict to) {
  switch (type) {
    case F32: { auto p = static_cast<const float*>(from) + at;
#pragma omp simd
      for (int64_t i = 0; i < n; i++) to[i] = C(p[i]);
      return; }
    case F64: { auto p = static_cast<const double*>(from) + at;
#pragma omp simd
      for (int64_t i = 0; i < n; i++) to[i] = C(p[i]);
      return; }
    case BF16: { auto p = static_cast<const uint16_t*>(from) + at;
#pragma omp simd
      for (int64_t i = 0; i < n; i++) to[i] = C(bf16_to_float(p[i]));
      return; }
    case E8M0: { auto p = static_cast<const uint8_t*>(from) + at;
      for (int64_t i = 0; i < n; i++) {
        uint32_t bits = p[i] ? uint32_t(p[i]) << 23 : 0x00400000u;  // 2^-127 is no normal number
        float f;
        std::memcpy(&f, &bits, 4);
        to[i] = C(f);
      }
      return; }
#ifdef __FLT16_MAX__
    case F16: { auto p = static_cast<const _Float16*>(from) + at;
      int64_t i = 0;
#if defined(__AVX2__) && defined(__F16C__)
      if constexpr (std::is_same_v<C, float>)
        for (; i + 8 <= n; i += 8)
          _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i))));
#endif
      for (; i < n; i++) to[i] = C(float(p[i]));
      return; }
#endif
  }
}

template <class C>
void store(void* into, int type, int64_t at, int64_t n, const C* __restrict from) {
  switch (type) {
    case F32: { auto p = static_cast<float*>(into) + at;
#pragma omp simd
      for (int64_t i = 0; i < n; i++) p[i] = float(from[i]);
      return; }
    case F64: { auto p = static_cast<double*>(into) + at;
#pragma omp simd
      for (int64_t i = 0; i < n; i++) p[i] = double(from[i]);
      return; }
    case BF16: { auto p = static_cast<uint16_t*>(into) + at;
#pragma omp simd
      for (int64_t i = 0; i < n; i++) p[i] = float_to_bf16(float(from[i]));
      return; }
#ifdef __FLT16_MAX__
    case F16: { auto p = static_cast<_Float16*>(into) + at;
      for (int64_t i = 0; i < n; i++) p[i] = _Float16(float(from[i]));
      return; }
#endif
  }
}

// Room that grows, and is kept.
template <class T>
T* at_least(std::vector<T>& v, size_t n) {
  if (v.size() < n) v.resize(n);
  return v.data();
}

}  // namespace
