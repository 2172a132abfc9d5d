// Functions that compilers vectorize.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

inline double exponential(double x) { return std::exp(x); }

// exp(x) = 2^k exp(r) with |r| <= ln 2 / 2, a polynomial of degree 6; below 2 units in the last place.
inline float exponential(float x) {
  x = x < -87.3f ? -87.3f : (x > 88.3f ? 88.3f : x);
  float k = std::nearbyint(x * 1.44269504f);
  float r = std::fma(k, -0.693145752f, x);
  r = std::fma(k, -1.42860677e-6f, r);
  float p = 1.38888889e-3f;
  p = std::fma(p, r, 8.33333333e-3f);
  p = std::fma(p, r, 4.16666667e-2f);
  p = std::fma(p, r, 1.66666667e-1f);
  p = std::fma(p, r, 0.5f);
  p = std::fma(p, r, 1.0f);
  p = std::fma(p, r, 1.0f);
  int32_t bits = (int32_t(k) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return p * scale;
}

template <class C>
inline C sigmoid(C x) { return C(1) / (C(1) + exponential(-x)); }

template <class C>
inline C tanh_of(C x) { return C(2) * sigmoid(C(2) * x) - C(1); }

constexpr double kGelu = 0.7978845608028654, kCube = 0.044715;

}  // namespace
