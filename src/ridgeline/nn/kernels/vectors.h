// Vectors of the processor: floats, and sums of products of 16-bit inputs with 8-bit weights, one lane an output.
//
// An input is two signed bytes, v = 256 · high + low, for VNNI's vpdpbusd, and 16 bits for vpmaddwd and plain C++. Codes
// of weights are unsigned bytes, four inputs of an output side by side. All give the same integers.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "storage.h"

// Loops over what stays in registers are unrolled before arrays are told apart.
#define UNROLL _Pragma("GCC unroll 16")

namespace {

constexpr int64_t kFour = 4;     // inputs of one step
constexpr int64_t kTile = 32;    // outputs whose codes lie together
constexpr int32_t kLargest = 32639;  // of an input: 127 · 256 + 127

#if defined(__AVX512BW__)
using Floats = __m512;
constexpr int64_t kFloats = 16;
inline Floats no_floats() { return _mm512_setzero_ps(); }
inline Floats all_floats(float v) { return _mm512_set1_ps(v); }
inline float total(Floats f) { return _mm512_reduce_add_ps(f); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline void store_floats(float* p, Floats f) { _mm512_storeu_ps(p, f); }
template <int T>
inline Floats load_floats(const void* p, int64_t at) {
  if constexpr (T == F32) return _mm512_loadu_ps(static_cast<const float*>(p) + at);
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(p) + at));
  if constexpr (T == F16) return _mm512_cvtph_ps(low);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(low), 16));
}

#elif defined(__AVX2__) && defined(__FMA__)
using Floats = __m256;
constexpr int64_t kFloats = 8;
inline Floats no_floats() { return _mm256_setzero_ps(); }
inline Floats all_floats(float v) { return _mm256_set1_ps(v); }
inline float total(Floats f) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(f), _mm256_extractf128_ps(f, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline void store_floats(float* p, Floats f) { _mm256_storeu_ps(p, f); }
template <int T>
inline Floats load_floats(const void* p, int64_t at) {
  if constexpr (T == F32) return _mm256_loadu_ps(static_cast<const float*>(p) + at);
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(p) + at));
  if constexpr (T == F16) return _mm256_cvtph_ps(low);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(low), 16));
}

#else  // left to the compiler
struct Floats { float v[8]; };
constexpr int64_t kFloats = 8;
inline Floats no_floats() { return {}; }
inline Floats all_floats(float v) { return {{v, v, v, v, v, v, v, v}}; }
inline float total(Floats f) {
  return ((f.v[0] + f.v[4]) + (f.v[2] + f.v[6])) + ((f.v[1] + f.v[5]) + (f.v[3] + f.v[7]));
}
inline Floats add(Floats a, Floats b) {
  for (int i = 0; i < 8; i++) a.v[i] += b.v[i];
  return a;
}
inline Floats multiply(Floats a, Floats b) {
  for (int i = 0; i < 8; i++) a.v[i] *= b.v[i];
  return a;
}
inline Floats multiply_add(Floats a, Floats b, Floats c) {
  for (int i = 0; i < 8; i++) c.v[i] += a.v[i] * b.v[i];
  return c;
}
inline void store_floats(float* p, Floats f) { std::memcpy(p, f.v, sizeof f.v); }
template <int T>
inline Floats load_floats(const void* p, int64_t at) {
  Floats f;
  load<float>(p, T, at, 8, f.v);
  return f;
}
#endif

// ---- integers: Codes are 4 · kFloats bytes of weights, Four are four inputs of one row, two Sums are of kFloats outputs ------

#if defined(__AVX512BW__)
using Bytes4 = __m512i;
inline Bytes4 load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Bytes4 low_halves(Bytes4 x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Bytes4 high_halves(Bytes4 x) { return low_halves(_mm512_srli_epi16(x, 4)); }
inline Bytes4 looked_up(Bytes4 x, const uint8_t* table) {  // of 16 numbers
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), x);
}
inline Floats numbers(__m512i less, int32_t v) { return _mm512_cvtepi32_ps(_mm512_sub_epi32(less, _mm512_set1_epi32(v))); }
constexpr int kRows = 6;  // rows of inputs whose sums stay in registers
constexpr int kWide = 2;  // beside each other: vectors of outputs

#if defined(__AVX512VNNI__)
#define SPLIT_INPUTS
using Codes = __m512i;
struct Four { __m512i high, low; };
using Sums = __m512i;  // of the high bytes, and of the low ones
inline Codes unfolded(Bytes4 x) { return x; }
inline Four load_four(const int8_t* p) {
  int32_t high, low;  // each is read where it is broadcast
  std::memcpy(&high, p, 4);
  std::memcpy(&low, p + 4, 4);
  return {_mm512_set1_epi32(high), _mm512_set1_epi32(low)};
}
inline Sums no_sums() { return _mm512_setzero_si512(); }
template <int H>
inline Sums add_products(Sums s, Codes w, Four x) { return _mm512_dpbusd_epi32(s, w, H ? x.low : x.high); }
inline Floats joined(Sums high, Sums low, int32_t less) {
  return numbers(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low), less);
}
#else
struct Codes { __m512i a, b; };
using Four = __m512i;
using Sums = __m512i;  // of half of the outputs, two for each
inline Codes unfolded(Bytes4 x) {
  return {_mm512_cvtepu8_epi16(_mm512_castsi512_si256(x)), _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(x, 1))};
}
inline Four load_four(const int8_t* p) {
  int64_t v;
  std::memcpy(&v, p, 8);
  return _mm512_set1_epi64(v);
}
inline Sums no_sums() { return _mm512_setzero_si512(); }
template <int H>
inline Sums add_products(Sums s, Codes w, Four x) { return _mm512_add_epi32(s, _mm512_madd_epi16(H ? w.b : w.a, x)); }
inline Floats joined(Sums a, Sums b, int32_t less) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return numbers(_mm512_add_epi32(_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b)), less);
}
#endif

#elif defined(__AVX2__) && defined(__FMA__)
using Bytes4 = __m256i;
inline Bytes4 load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Bytes4 low_halves(Bytes4 x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Bytes4 high_halves(Bytes4 x) { return low_halves(_mm256_srli_epi16(x, 4)); }
inline Bytes4 looked_up(Bytes4 x, const uint8_t* table) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), x);
}
inline Floats numbers(__m256i less, int32_t v) { return _mm256_cvtepi32_ps(_mm256_sub_epi32(less, _mm256_set1_epi32(v))); }
constexpr int kRows = 3;
constexpr int kWide = 2;

#if defined(__AVXVNNI__)
#define SPLIT_INPUTS
using Codes = __m256i;
struct Four { __m256i high, low; };
using Sums = __m256i;  // of the high bytes, and of the low ones
inline Codes unfolded(Bytes4 x) { return x; }
inline Four load_four(const int8_t* p) {
  int32_t high, low;  // each is read where it is broadcast
  std::memcpy(&high, p, 4);
  std::memcpy(&low, p + 4, 4);
  return {_mm256_set1_epi32(high), _mm256_set1_epi32(low)};
}
inline Sums no_sums() { return _mm256_setzero_si256(); }
template <int H>
inline Sums add_products(Sums s, Codes w, Four x) { return _mm256_dpbusd_avx_epi32(s, w, H ? x.low : x.high); }
inline Floats joined(Sums high, Sums low, int32_t less) {
  return numbers(_mm256_add_epi32(_mm256_slli_epi32(high, 8), low), less);
}
#else
struct Codes { __m256i a, b; };
using Four = __m256i;
using Sums = __m256i;  // of half of the outputs, two for each
inline Codes unfolded(Bytes4 x) {
  return {_mm256_cvtepu8_epi16(_mm256_castsi256_si128(x)), _mm256_cvtepu8_epi16(_mm256_extracti128_si256(x, 1))};
}
inline Four load_four(const int8_t* p) {
  int64_t v;
  std::memcpy(&v, p, 8);
  return _mm256_set1_epi64x(v);
}
inline Sums no_sums() { return _mm256_setzero_si256(); }
template <int H>
inline Sums add_products(Sums s, Codes w, Four x) { return _mm256_add_epi32(s, _mm256_madd_epi16(H ? w.b : w.a, x)); }
inline Floats joined(Sums a, Sums b, int32_t less) {
  return numbers(_mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), 0xD8), less);
}
#endif

#else
struct Bytes4 { uint8_t v[32]; };
using Codes = Bytes4;
struct Four { int16_t v[4]; };
struct Sums { int32_t v[4]; };  // of half of the outputs
inline Bytes4 load_bytes(const uint8_t* p) {
  Bytes4 x;
  std::memcpy(x.v, p, 32);
  return x;
}
inline Bytes4 low_halves(Bytes4 x) {
  for (int i = 0; i < 32; i++) x.v[i] &= 15;
  return x;
}
inline Bytes4 high_halves(Bytes4 x) {
  for (int i = 0; i < 32; i++) x.v[i] >>= 4;
  return x;
}
inline Bytes4 looked_up(Bytes4 x, const uint8_t* table) {
  for (int i = 0; i < 32; i++) x.v[i] = table[x.v[i]];
  return x;
}
inline Codes unfolded(Bytes4 x) { return x; }
inline Four load_four(const int8_t* p) {
  Four x;
  std::memcpy(x.v, p, 8);
  return x;
}
inline Sums no_sums() { return {}; }
template <int H>
inline Sums add_products(Sums s, Codes w, Four x) {
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) s.v[i] += int32_t(w.v[16 * H + 4 * i + j]) * int32_t(x.v[j]);
  return s;
}
inline Floats joined(Sums a, Sums b, int32_t less) {
  Floats f;
  for (int i = 0; i < 4; i++) {
    f.v[i] = float(a.v[i] - less);
    f.v[4 + i] = float(b.v[i] - less);
  }
  return f;
}
constexpr int kRows = 2;
constexpr int kWide = 1;
#endif

// Eight inputs as two of Four: 16 bits each, or the high bytes of four and then their low ones.
inline void put_eight(int8_t* to, const int16_t* v) {
#if defined(SPLIT_INPUTS)
  const __m128i up = _mm_add_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(v)), _mm_set1_epi16(128));
  const __m128i apart = _mm_shuffle_epi8(up, _mm_setr_epi8(1, 3, 5, 7, 0, 2, 4, 6, 9, 11, 13, 15, 8, 10, 12, 14));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_xor_si128(apart, _mm_set1_epi64x(int64_t(0x8080808000000000))));
#else
  std::memcpy(to, v, 16);
#endif
}

}  // namespace
