// Rotary embedding of one token's queries and keys, and its place in the cache.
#pragma once

#include "cache.h"

namespace kvf {

// Turns dimensions 2 i and 2 i + 1 of `heads` vectors by phases [dim / 2][cos, sin].
inline void rotate(float* x, int64_t heads, int64_t dim, const float* phases) {
  for (int64_t head = 0; head < heads; ++head, x += dim) {
    for (int64_t i = 0; i + 1 < dim; i += 2) {
      const float real = x[i], imaginary = x[i + 1], cosine = phases[i], sine = phases[i + 1];
      x[i] = real * cosine - imaginary * sine;
      x[i + 1] = real * sine + imaginary * cosine;
    }
  }
}

// Copies a token's K and V, each [kv_heads, dim], to its slot of a layer.
inline void write_slot(const kvf_cache& cache, int64_t layer, int64_t slot, const float* k, const float* v) {
  const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
  for (int64_t head = 0; head < cache.kv_heads; ++head) {
    const HeadBlocks blocks = HeadBlocks::of(cache, layer, head);
    float* to = const_cast<float*>(blocks.first) + block * blocks.stride + offset * cache.dim;
    std::memcpy(to, k + head * cache.dim, sizeof(float) * cache.dim);
    std::memcpy(to + blocks.side, v + head * cache.dim, sizeof(float) * cache.dim);
  }
}

}  // namespace kvf
