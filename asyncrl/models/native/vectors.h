// Vectors of 16 floats, loaded from and stored to rows of float32 or bfloat16. Only native.cpp includes this file.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int W = 16;  // Lanes of a vector. The compiler splits a vector over registers if needed.
typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};

inline v16 broadcast(float x) { return v16{} + x; }

inline v16 load(const float* p) {
  v16 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline v16 load(const bf16* p) {
  h16 x;
  std::memcpy(&x, p, sizeof x);
  return (v16)(__builtin_convertvector(x, u16) << 16);
}
inline void store(float* p, v16 x) { std::memcpy(p, &x, sizeof x); }
// Rounds to nearest, ties to even. NaN stays NaN.
inline void store(bf16* p, v16 x) {
  u16 bits = (u16)x;
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  bits = x == x ? bits : u16{} + 0x7fc0;
  h16 narrow = __builtin_convertvector(bits, h16);
  std::memcpy(p, &narrow, sizeof narrow);
}
inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// `load` and `store` of `count` values; the other lanes of `load_some` are `fill`.
template <class T>
inline v16 load_some(const T* p, long count, float fill) {
  T lanes[W];
  std::memcpy(lanes, p, count * sizeof(T));
  float values[W];
  for (int i = 0; i < W; ++i) values[i] = i < count ? to_float(lanes[i]) : fill;
  return load(values);
}
template <class T>
inline void store_some(T* p, long count, v16 x) {
  T lanes[W];
  store(lanes, x);
  std::memcpy(p, lanes, count * sizeof(T));
}

inline float sum(v16 x) {
  x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  return x[0] + x[1];
}
inline float largest(v16 x) {
  float maximum = x[0];
  for (int i = 1; i < W; ++i) maximum = x[i] > maximum ? x[i] : maximum;
  return maximum;
}
inline v16 max(v16 a, v16 b) { return a > b ? a : b; }

// exp with an error of 2 units in the last place (the polynomial of Cephes' expf, Moshier). Arguments are clamped to [-87, 88],
// so the result is at least 1.6e-38 and finite. NaN stays NaN.
inline v16 exp(v16 x) {
  x = x < -87.0f ? broadcast(-87.0f) : x;
  x = x > 88.0f ? broadcast(88.0f) : x;
  // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
  const v16 round = broadcast(12582912.0f);
  v16 n = x * 1.44269504088896341f + round - round;
  v16 r = x - n * 0.693359375f + n * 2.12194440e-4f;
  v16 y = broadcast(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  i16 power = (__builtin_convertvector(n, i16) + 127) << 23;
  return y * (v16)power;
}

}  // namespace
