// Vectors of the processor: 32 products of 16-bit integers, summed in 32 bits, and floats.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "storage.h"

namespace {

constexpr int64_t kLanes = 32;  // inputs of one step of a row

#if defined(__AVX512BW__)

struct Pairs { __m512i v; };
using Sums = __m512i;
using Floats = __m512;
inline Pairs load16(const int16_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store16(int16_t* p, Pairs x) { _mm512_storeu_si512(p, x.v); }
inline Pairs widen(const int8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Pairs nibbles(const uint8_t* p, bool high) {
  __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {high ? _mm512_srli_epi16(x, 4) : _mm512_and_si512(x, _mm512_set1_epi16(15))};
}
inline Pairs looked_up(Pairs x, const int8_t* table) {  // of 16 numbers
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm512_permutexvar_epi16(x.v, _mm512_broadcast_i64x4(wide))};
}
inline Sums no_sums() { return _mm512_setzero_si512(); }
inline Sums add_products(Sums s, Pairs a, Pairs b) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(s, a.v, b.v);
#else
  return _mm512_add_epi32(s, _mm512_madd_epi16(a.v, b.v));
#endif
}
inline Sums add(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
inline Floats no_floats() { return _mm512_setzero_ps(); }
inline Floats add_scaled(Floats f, Sums s, float scale) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(s), _mm512_set1_ps(scale), f);
}
inline float total(Floats f) { return _mm512_reduce_add_ps(f); }
constexpr int64_t kFloats = 16;
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
template <int T>
inline Floats load_floats(const void* p, int64_t at) {
  if constexpr (T == F32) return _mm512_loadu_ps(static_cast<const float*>(p) + at);
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(p) + at));
  if constexpr (T == F16) return _mm512_cvtph_ps(low);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(low), 16));
}
constexpr int kRows = 4;

#elif defined(__AVX2__) && defined(__FMA__)

struct Pairs { __m256i a, b; };
using Sums = __m256i;
using Floats = __m256;
inline __m256i half(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline Pairs load16(const int16_t* p) { return {half(p), half(p + 16)}; }
inline void store16(int16_t* p, Pairs x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16), x.b);
}
inline __m128i bytes16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline Pairs widen(const int8_t* p) {
  return {_mm256_cvtepi8_epi16(bytes16(p)), _mm256_cvtepi8_epi16(bytes16(p + 16))};
}
inline __m256i nibble_half(const uint8_t* p, bool high) {
  __m256i x = _mm256_cvtepu8_epi16(bytes16(p));
  return high ? _mm256_srli_epi16(x, 4) : _mm256_and_si256(x, _mm256_set1_epi16(15));
}
inline Pairs nibbles(const uint8_t* p, bool high) { return {nibble_half(p, high), nibble_half(p + 16, high)}; }
inline __m256i looked_up_half(__m256i x, __m256i table) {  // of the low bytes, with their sign
  return _mm256_srai_epi16(_mm256_slli_epi16(_mm256_shuffle_epi8(table, x), 8), 8);
}
inline Pairs looked_up(Pairs x, const int8_t* table) {
  const __m256i t = _mm256_broadcastsi128_si256(bytes16(table));
  return {looked_up_half(x.a, t), looked_up_half(x.b, t)};
}
inline Sums no_sums() { return _mm256_setzero_si256(); }
inline Sums add_products(Sums s, Pairs x, Pairs y) {
#if defined(__AVXVNNI__)
  return _mm256_dpwssd_avx_epi32(_mm256_dpwssd_avx_epi32(s, x.a, y.a), x.b, y.b);
#else
  s = _mm256_add_epi32(s, _mm256_madd_epi16(x.a, y.a));
  return _mm256_add_epi32(s, _mm256_madd_epi16(x.b, y.b));
#endif
}
inline Sums add(Sums a, Sums b) { return _mm256_add_epi32(a, b); }
inline Floats no_floats() { return _mm256_setzero_ps(); }
inline Floats add_scaled(Floats f, Sums s, float scale) {
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(s), _mm256_set1_ps(scale), f);
}
inline float total(Floats f) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(f), _mm256_extractf128_ps(f, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
constexpr int64_t kFloats = 8;
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
template <int T>
inline Floats load_floats(const void* p, int64_t at) {
  if constexpr (T == F32) return _mm256_loadu_ps(static_cast<const float*>(p) + at);
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(p) + at));
  if constexpr (T == F16) return _mm256_cvtph_ps(low);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(low), 16));
}
constexpr int kRows = 2;

#else  // left to the compiler

struct Pairs { int16_t v[kLanes]; };
struct Sums { int32_t v[8]; };
struct Floats { float v[8]; };
inline Pairs load16(const int16_t* p) {
  Pairs x;
  std::memcpy(x.v, p, sizeof x.v);
  return x;
}
inline void store16(int16_t* p, Pairs x) { std::memcpy(p, x.v, sizeof x.v); }
inline Pairs widen(const int8_t* p) {
  Pairs x;
  for (int i = 0; i < kLanes; i++) x.v[i] = p[i];
  return x;
}
inline Pairs nibbles(const uint8_t* p, bool high) {
  Pairs x;
  for (int i = 0; i < kLanes; i++) x.v[i] = high ? p[i] >> 4 : p[i] & 15;
  return x;
}
inline Pairs looked_up(Pairs x, const int8_t* table) {
  for (int i = 0; i < kLanes; i++) x.v[i] = table[x.v[i]];
  return x;
}
inline Sums no_sums() { return {}; }
inline Sums add_products(Sums s, Pairs a, Pairs b) {
  for (int j = 0; j < kLanes; j += 8)
    for (int i = 0; i < 8; i++) s.v[i] += int32_t(a.v[j + i]) * int32_t(b.v[j + i]);
  return s;
}
inline Sums add(Sums a, Sums b) {
  for (int i = 0; i < 8; i++) a.v[i] += b.v[i];
  return a;
}
inline Floats no_floats() { return {}; }
inline Floats add_scaled(Floats f, Sums s, float scale) {
  for (int i = 0; i < 8; i++) f.v[i] += float(s.v[i]) * scale;
  return f;
}
inline float total(Floats f) {
  return ((f.v[0] + f.v[4]) + (f.v[2] + f.v[6])) + ((f.v[1] + f.v[5]) + (f.v[3] + f.v[7]));
}
constexpr int64_t kFloats = 8;
inline Floats add(Floats a, Floats b) {
  for (int i = 0; i < 8; i++) a.v[i] += b.v[i];
  return a;
}
inline Floats multiply_add(Floats a, Floats b, Floats c) {
  for (int i = 0; i < 8; i++) c.v[i] += a.v[i] * b.v[i];
  return c;
}
template <int T>
inline Floats load_floats(const void* p, int64_t at) {
  Floats f;
  load<float>(p, T, at, 8, f.v);
  return f;
}
constexpr int kRows = 2;

#endif

}  // namespace
