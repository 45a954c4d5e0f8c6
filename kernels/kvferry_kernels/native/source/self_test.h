// Whether this build computes on this CPU at all, and right: run once in a process of its own before a library is kept.
#pragma once

#include "attention.h"
#include "linear.h"

namespace kvf {

// 0, or the number of the check that failed.
inline int32_t self_test() {
  constexpr int64_t rows = TILE_ROWS + 3, in = 37, out = PANEL + 5;
  float x[rows * in], weight[out * in], packed[2 * PANEL * in], y[rows * out];
  for (int64_t i = 0; i < rows * in; ++i) x[i] = static_cast<float>(i % 13 - 6);
  for (int64_t i = 0; i < out * in; ++i) weight[i] = static_cast<float>(i % 7 - 3);
  pack(weight, out, in, packed);
  Shared shared;
  Member alone(shared, 0, 1);
  linear<false>(alone, x, rows, in, packed, out, y);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < out; ++column) {
      float expected = 0;
      for (int64_t k = 0; k < in; ++k) expected += x[row * in + k] * weight[column * in + k];
      if (y[row * out + column] != expected) return 1;  // whole numbers: exact
    }
  }
  // All keys are equal, so attention is the mean of the values.
  constexpr int64_t dim = LANES + 2, block_size = 4, context = 6;
  float memory[2 * 2 * block_size * dim], query[dim], attended[dim];
  for (float& value : memory) value = 1.0f;
  for (float& value : query) value = 0.5f;
  for (int64_t position = 0; position < context; ++position) {
    float* value = memory + (position / block_size * 2 + 1) * block_size * dim + position % block_size * dim;
    for (int64_t i = 0; i < dim; ++i) value[i] = static_cast<float>(position);
  }
  const int64_t starts[] = {0, 1}, contexts[] = {context}, tables[] = {0, 1}, slots[] = {5};
  attend(alone, {memory, 2, 1, 1, block_size, dim}, {1, 1, 2, starts, contexts, tables, slots},
         {query, dim, attended, dim, 1}, 0);
  for (float value : attended) {
    if (!(std::fabs(value - 2.5f) < 1e-5f)) return 2;
  }
  return 0;
}

}  // namespace kvf
