// Causal attention through block tables: softmax(q k^T / sqrt(dim)) v over the positions up to each query's own.
//
// A task is a run of queries of one row and one KV head (positions times the query heads that share it). It goes over the
// context in chunks that begin at multiples of CHUNK, keeping for each query the largest score, the sum of exponents and the
// weighted values (online softmax, arXiv:1805.02867). What is done for a query depends on its own position alone, not on its
// neighbours: its result is the same bits decoded, in a prompt, and in any chunk of one. Slots behind a row's context are
// never read.
#pragma once

#include "cache.h"
#include "team.h"

namespace kvf {

constexpr int CHUNK = 64;         // positions
constexpr int TASK_QUERIES = 32;  // of one task
constexpr int GROUP = 4;          // queries computed together
constexpr int MAX_DIM = 256;
constexpr int MAX_VECTORS = MAX_DIM / LANES;

struct AttentionScratch {
  Floats queries[TASK_QUERIES][MAX_VECTORS];  // scaled, padded with zeros
  Floats values[TASK_QUERIES][MAX_VECTORS];   // weighted sums
  float scores[GROUP][CHUNK];
  float largest[TASK_QUERIES];
  float total[TASK_QUERIES];
  int64_t limit[TASK_QUERIES];  // positions that a query sees
};

// One row's context as one KV head sees it.
struct Context {
  HeadBlocks blocks;
  const int64_t* table;
  int64_t block_size, dim;
  int vectors;  // full ones of `dim`
  int rest;     // floats behind them

  KVF_INLINE const float* key(int64_t position) const {
    return blocks.first + table[position / block_size] * blocks.stride + position % block_size * dim;
  }
  // How many positions from this one on, up to `end`, lie side by side.
  KVF_INLINE int64_t run(int64_t position, int64_t end) const {
    const int64_t left = block_size - position % block_size;
    return position + left < end ? left : end - position;
  }
};

// scores[g][0 .. last - first - 1] of `QUERIES` queries.
template <int QUERIES>
KVF_INLINE void score_chunk(const Context& context, AttentionScratch& scratch, int query, int64_t first, int64_t last) {
  for (int64_t position = first; position < last;) {
    int64_t count = context.run(position, last);
    if (count > LANES) count = LANES;
    const float* key = context.key(position);
    Floats parts[QUERIES][LANES];
    for (int64_t slot = 0; slot < count; ++slot, key += context.dim) {
      Floats sums[QUERIES] = {};
      for (int at = 0; at < context.vectors; ++at) {
        const Floats k = load(key + at * LANES);
#pragma GCC unroll 4
        for (int g = 0; g < QUERIES; ++g) sums[g] += k * scratch.queries[query + g][at];
      }
      if (context.rest) {
        const Floats k = load_some(key + context.vectors * LANES, context.rest);
        for (int g = 0; g < QUERIES; ++g) sums[g] += k * scratch.queries[query + g][context.vectors];
      }
#pragma GCC unroll 4
      for (int g = 0; g < QUERIES; ++g) parts[g][slot] = sums[g];
    }
    for (int64_t slot = count; slot < LANES; ++slot) {
      for (int g = 0; g < QUERIES; ++g) parts[g][slot] = Floats{};
    }
#pragma GCC unroll 4
    for (int g = 0; g < QUERIES; ++g) {
      const Floats found = sums(parts[g]);
      std::memcpy(&scratch.scores[g][position - first], &found, sizeof(float) * count);
    }
    position += count;
  }
}

// Scores of one query to weights, its largest score and total brought up to date; what its old values count now.
KVF_INLINE float weigh(AttentionScratch& scratch, int g, int query, int64_t first, int64_t last) {
  float* scores = scratch.scores[g];
  int64_t seen = scratch.limit[query] - first;
  seen = seen < 0 ? 0 : seen < last - first ? seen : last - first;
  for (int64_t at = seen; at < CHUNK; ++at) scores[at] = -INFINITY;
  Floats top = load(scores);
  for (int at = LANES; at < CHUNK; at += LANES) top = larger(top, load(scores + at));
  const float found = max(top), before = scratch.largest[query];
  const float largest = found < before ? before : found;
  Floats added{};
  for (int at = 0; at < CHUNK; at += LANES) {
    const Floats weights = exp(load(scores + at) - splat(largest));
    store(scores + at, weights);
    added += weights;
  }
  const float kept = exp(splat(before - largest))[0];
  scratch.total[query] = scratch.total[query] * kept + sum(added);
  scratch.largest[query] = largest;
  return kept;
}

template <int QUERIES, int VECTORS>
KVF_INLINE void add_values_at(const Context& context, AttentionScratch& scratch, int query, int64_t first, int64_t last,
                              int at) {
  Floats sums[QUERIES][VECTORS];
#pragma GCC unroll 4
  for (int g = 0; g < QUERIES; ++g) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) sums[g][v] = scratch.values[query + g][at + v];
  }
  for (int64_t position = first; position < last;) {
    const int64_t count = context.run(position, last);
    const float* value = context.key(position) + context.blocks.side + at * LANES;
    for (int64_t slot = 0; slot < count; ++slot, value += context.dim) {
      Floats read[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) read[v] = load(value + v * LANES);
#pragma GCC unroll 4
      for (int g = 0; g < QUERIES; ++g) {
        const Floats weight = splat(scratch.scores[g][position - first + slot]);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) sums[g][v] += weight * read[v];
      }
    }
    position += count;
  }
#pragma GCC unroll 4
  for (int g = 0; g < QUERIES; ++g) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) scratch.values[query + g][at + v] = sums[g][v];
  }
}

// The floats behind the last full vector.
template <int QUERIES>
KVF_INLINE void add_rest(const Context& context, AttentionScratch& scratch, int query, int64_t first, int64_t last) {
  for (int64_t position = first; position < last; ++position) {
    const Floats read =
        load_some(context.key(position) + context.blocks.side + context.vectors * LANES, context.rest);
    for (int g = 0; g < QUERIES; ++g) {
      scratch.values[query + g][context.vectors] += splat(scratch.scores[g][position - first]) * read;
    }
  }
}

template <int QUERIES>
inline void attend_chunk(const Context& context, AttentionScratch& scratch, int query, int64_t first, int64_t last) {
  score_chunk<QUERIES>(context, scratch, query, first, last);
  for (int g = 0; g < QUERIES; ++g) {
    const Floats kept = splat(weigh(scratch, g, query + g, first, last));
    for (int at = 0; at < context.vectors + (context.rest > 0); ++at) scratch.values[query + g][at] *= kept;
  }
  int at = 0;
  for (; at + 4 <= context.vectors; at += 4) add_values_at<QUERIES, 4>(context, scratch, query, first, last, at);
  for (; at < context.vectors; ++at) add_values_at<QUERIES, 1>(context, scratch, query, first, last, at);
  if (context.rest) add_rest<QUERIES>(context, scratch, query, first, last);
}

// Where a step's queries and results lie: token t, head h at `data + t * stride + h * dim`.
struct Heads {
  const float* queries;
  int64_t query_stride;
  float* out;
  int64_t out_stride;
  int64_t heads;
};

// Queries `begin` .. `end` - 1 (at most TASK_QUERIES) of a row and KV head: query i is of position i / shared.
inline void attend_task(const kvf_cache& cache, const kvf_batch& batch, const Heads& heads, int64_t layer, int64_t row,
                        int64_t kv_head, int64_t begin, int64_t end, AttentionScratch& scratch) {
  const int64_t shared = heads.heads / cache.kv_heads, dim = cache.dim, start = batch.starts[row];
  const int64_t before = batch.contexts[row] - (batch.starts[row + 1] - start);
  const Context context{HeadBlocks::of(cache, layer, kv_head), batch.tables + row * batch.table_width, cache.block_size,
                        dim, static_cast<int>(dim / LANES), static_cast<int>(dim % LANES)};
  const int vectors = context.vectors + (context.rest > 0);
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const int count = static_cast<int>(end - begin);
  for (int i = 0; i < count; ++i) {
    const int64_t token = (begin + i) / shared, head = kv_head * shared + (begin + i) % shared;
    const float* query = heads.queries + (start + token) * heads.query_stride + head * dim;
    for (int at = 0; at < context.vectors; ++at) scratch.queries[i][at] = load(query + at * LANES) * splat(scale);
    if (context.rest) {
      scratch.queries[i][context.vectors] = load_some(query + context.vectors * LANES, context.rest) * splat(scale);
    }
    for (int at = 0; at < vectors; ++at) scratch.values[i][at] = Floats{};
    scratch.largest[i] = -INFINITY;
    scratch.total[i] = 0.0f;
    scratch.limit[i] = before + token + 1;
  }
  const int64_t longest = scratch.limit[count - 1];
  for (int64_t first = 0; first < longest; first += CHUNK) {
    const int64_t last = first + CHUNK < longest ? first + CHUNK : longest;
    for (int query = 0; query < count; query += GROUP) {
      const int queries = count - query < GROUP ? count - query : GROUP;
      if (scratch.limit[query + queries - 1] <= first) continue;
      if (queries == 4) attend_chunk<4>(context, scratch, query, first, last);
      else if (queries == 3) attend_chunk<3>(context, scratch, query, first, last);
      else if (queries == 2) attend_chunk<2>(context, scratch, query, first, last);
      else attend_chunk<1>(context, scratch, query, first, last);
    }
  }
  for (int i = 0; i < count; ++i) {
    const int64_t token = (begin + i) / shared, head = kv_head * shared + (begin + i) % shared;
    float* out = heads.out + (start + token) * heads.out_stride + head * dim;
    const Floats share = splat(1.0f / scratch.total[i]);
    for (int at = 0; at < context.vectors; ++at) store(out + at * LANES, scratch.values[i][at] * share);
    if (context.rest) store_some(out + context.vectors * LANES, scratch.values[i][context.vectors] * share, context.rest);
  }
}

// All rows and heads of one layer, shared among the team. Ends with a barrier.
inline void attend(Member& member, const kvf_cache& cache, const kvf_batch& batch, const Heads& heads, int64_t layer) {
  const int64_t shared = heads.heads / cache.kv_heads;
  AttentionScratch scratch;
  int64_t first_task = 0, mine = member.claim();
  for (int64_t row = 0; row < batch.rows; ++row) {
    const int64_t queries = (batch.starts[row + 1] - batch.starts[row]) * shared;
    const int64_t cuts = (queries + TASK_QUERIES - 1) / TASK_QUERIES;
    const int64_t tasks = cuts * cache.kv_heads;
    while (mine < first_task + tasks) {
      const int64_t head = (mine - first_task) / cuts, begin = (mine - first_task) % cuts * TASK_QUERIES;
      const int64_t end = begin + TASK_QUERIES < queries ? begin + TASK_QUERIES : queries;
      attend_task(cache, batch, heads, layer, row, head, begin, end, scratch);
      mine = member.claim();
    }
    first_task += tasks;
  }
  member.barrier();
}

}  // namespace kvf
