// The paged KV cache: [block, layer, K|V, kv head, slot, dim], float32.
#pragma once

#include "vectors.h"

extern "C" {

struct kvf_cache {
  float* memory;
  int64_t blocks, layers, kv_heads, block_size, dim;
};

// Rows of a step. A row is a run of consecutive positions of one sequence; row i owns tokens starts[i] .. starts[i + 1] - 1.
struct kvf_batch {
  int64_t tokens, rows, table_width;
  const int64_t* starts;    // [rows + 1]
  const int64_t* contexts;  // [rows]: tokens in the cache after this step
  const int64_t* tables;    // [rows, table_width]: block ids
  const int64_t* slots;     // [tokens]: block * block_size + offset
};
}

namespace kvf {

// K of a block in a layer for one head, [slot, dim]; V lies `side` floats behind.
struct HeadBlocks {
  const float* first;
  int64_t stride;  // floats from one block to the next
  int64_t side;

  static KVF_INLINE HeadBlocks of(const kvf_cache& cache, int64_t layer, int64_t head) {
    const int64_t per_head = cache.block_size * cache.dim;
    const int64_t side = cache.kv_heads * per_head;
    return {cache.memory + layer * 2 * side + head * per_head, cache.layers * 2 * side, side};
  }
};

// Whether every number of the batch lies within the cache, so that nothing outside of it is read or written.
inline bool fits(const kvf_cache& cache, const kvf_batch& batch) {
  if (batch.rows < 0 || batch.tokens < 0 || (batch.rows > 0 && batch.starts[0] != 0)) return false;
  for (int64_t row = 0; row < batch.rows; ++row) {
    const int64_t queries = batch.starts[row + 1] - batch.starts[row], context = batch.contexts[row];
    if (queries < 1 || context < queries || context > batch.table_width * cache.block_size) return false;
    const int64_t used = (context + cache.block_size - 1) / cache.block_size;
    for (int64_t index = 0; index < used; ++index) {
      const int64_t block = batch.tables[row * batch.table_width + index];
      if (block < 0 || block >= cache.blocks) return false;
    }
  }
  if ((batch.rows > 0 ? batch.starts[batch.rows] : 0) != batch.tokens) return false;
  for (int64_t token = 0; token < batch.tokens; ++token) {
    if (batch.slots[token] < 0 || batch.slots[token] >= cache.blocks * cache.block_size) return false;
  }
  return true;
}

}  // namespace kvf
