// Vectors of floats in the compiler's own vector types: one source for AVX-512, AVX and whatever else there is.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define KVF_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define KVF_LANES 16
#elif defined(__AVX__)
#define KVF_LANES 8
#else
#define KVF_LANES 4
#endif

// Registers that vectors can be kept in, which limits the rows that are multiplied at once.
#if defined(__AVX512F__) || defined(__aarch64__)
#define KVF_TILE_ROWS 12
#else
#define KVF_TILE_ROWS 6
#endif

namespace kvf {

constexpr int LANES = KVF_LANES;

typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Ints __attribute__((vector_size(LANES * sizeof(int32_t))));

KVF_INLINE Floats splat(float value) { return value - Floats{}; }

KVF_INLINE Floats load(const float* from) {
  Floats out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

KVF_INLINE void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

// The first `count` lanes (under LANES); the others are zero.
KVF_INLINE Floats load_some(const float* from, int count) {
  Floats out{};
  std::memcpy(&out, from, sizeof(float) * count);
  return out;
}

KVF_INLINE void store_some(float* to, Floats value, int count) { std::memcpy(to, &value, sizeof(float) * count); }

KVF_INLINE Floats bits_as_floats(Ints value) {
  Floats out;
  std::memcpy(&out, &value, sizeof out);
  return out;
}

// The larger of each pair; NaN in `a` stays.
KVF_INLINE Floats larger(Floats a, Floats b) { return a < b ? b : a; }

template <int HALF>
KVF_INLINE Ints swapped_lanes() {
  Ints order;
  for (int lane = 0; lane < LANES; ++lane) order[lane] = lane ^ HALF;
  return order;
}

// Lane i of the result is lane i ^ HALF of `value`.
template <int HALF>
KVF_INLINE Floats swap_lanes(Floats value) {
#if defined(__clang__)
  Floats out;
  for (int lane = 0; lane < LANES; ++lane) out[lane] = value[lane ^ HALF];
  return out;
#else
  return __builtin_shuffle(value, swapped_lanes<HALF>());
#endif
}

template <int HALF>
KVF_INLINE Floats fold_sum(Floats value) {
  if constexpr (HALF == 0) return value;
  else return fold_sum<HALF / 2>(value + swap_lanes<HALF>(value));
}

KVF_INLINE float sum(Floats value) { return fold_sum<LANES / 2>(value)[0]; }

template <int HALF>
KVF_INLINE Floats fold_max(Floats value) {
  if constexpr (HALF == 0) return value;
  else return fold_max<HALF / 2>(larger(value, swap_lanes<HALF>(value)));
}

KVF_INLINE float max(Floats value) { return fold_max<LANES / 2>(value)[0]; }

// One stage of `sums`: of two vectors, whose lanes are to be added, one of which half the lanes belong to each.
template <int HALF>
KVF_INLINE Floats join(Floats a, Floats b) {
  Ints upper;
  for (int lane = 0; lane < LANES; ++lane) upper[lane] = (lane & HALF) ? -1 : 0;
  const Floats kept = upper ? b : a;
  const Floats other = upper ? a : b;
  return kept + swap_lanes<HALF>(other);
}

template <int HALF>
KVF_INLINE Floats join_all(Floats* parts) {
  if constexpr (HALF == 0) {
    return parts[0];
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < HALF; ++i) parts[i] = join<HALF>(parts[i], parts[i + HALF]);
    return join_all<HALF / 2>(parts);
  }
}

// Lane i of the result is the sum of parts[i]'s lanes. `parts`: LANES vectors, overwritten.
KVF_INLINE Floats sums(Floats* parts) { return join_all<LANES / 2>(parts); }

// e^x within 2 units in the last place; 0 below -87 and infinite above 88, NaN stays NaN.
KVF_INLINE Floats exp(Floats x) {
  const Floats top = splat(88.0f), bottom = splat(-87.0f);
  const Floats clamped = x > top ? top : x;
  const Floats scaled = clamped * splat(1.44269504088896341f);
  const Floats rounded = scaled + (scaled < splat(0.0f) ? splat(-0.5f) : splat(0.5f));
  const Floats in_range = rounded < splat(-126.0f) ? splat(-126.0f) : rounded;
  const Ints power = __builtin_convertvector(in_range, Ints);
  const Floats n = __builtin_convertvector(power, Floats);
  Floats r = clamped - n * splat(0.693359375f);
  r = r - n * splat(-2.12194440e-4f);
  Floats p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * r * r + r + splat(1.0f);
  const Floats result = p * bits_as_floats((power + 127) << 23);
  return x < bottom ? splat(0.0f) : x > top ? splat(INFINITY) : result;
}

}  // namespace kvf
