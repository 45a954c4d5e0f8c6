// All layers of a Llama decoder for one step, entered once by the team.
#pragma once

#include "attention.h"
#include "linear.h"
#include "norm.h"
#include "rope.h"

extern "C" {

// Packed weights and norms of one layer; queries and keys are made for interleaved rotation.
struct kvf_layer {
  const float *attention_norm, *qkv, *output, *mlp_norm, *gate, *up, *down;
};

struct kvf_decoder {
  int64_t hidden, heads, kv_heads, dim, inner, layers, vocab;
  float eps;
  const float* embedding;  // packed [vocab, hidden]
  const kvf_layer* weights;
};

// One step, beside its batch. `work` holds tokens * kvf_work_floats(decoder) floats.
struct kvf_step {
  const int64_t* token_ids;  // [tokens]
  const float* phases;       // [tokens, dim / 2, 2]: cosine and sine of each pair of dimensions
  float* hidden;             // [tokens, hidden]: the result
  float* work;
};
}

namespace kvf {

// The parts of `work`.
struct Work {
  float *normed, *qkv, *attended, *inner;
  int64_t qkv_width, attended_width;

  static int64_t floats(const kvf_decoder& of) {
    return of.hidden + (of.heads + 2 * of.kv_heads) * of.dim + of.heads * of.dim + of.inner;
  }
  static Work of(const kvf_decoder& decoder, float* work, int64_t tokens) {
    Work out{};
    out.qkv_width = (decoder.heads + 2 * decoder.kv_heads) * decoder.dim;
    out.attended_width = decoder.heads * decoder.dim;
    out.normed = work;
    out.qkv = out.normed + tokens * decoder.hidden;
    out.attended = out.qkv + tokens * out.qkv_width;
    out.inner = out.attended + tokens * out.attended_width;
    return out;
  }
};

inline void run_layer(Member& member, const kvf_decoder& decoder, const kvf_cache& cache, const kvf_batch& batch,
                      const kvf_step& step, const Work& work, int64_t index) {
  const kvf_layer& layer = decoder.weights[index];
  const int64_t tokens = batch.tokens, hidden = decoder.hidden, dim = decoder.dim;
  const auto normalize = [&](const float* weight) {
    member.loop(tokens, [&](int64_t token) {
      rms_norm(step.hidden + token * hidden, weight, hidden, decoder.eps, work.normed + token * hidden);
    });
  };
  normalize(layer.attention_norm);
  linear<false>(member, work.normed, tokens, hidden, layer.qkv, work.qkv_width, work.qkv);
  member.loop(tokens, [&](int64_t token) {
    float* qkv = work.qkv + token * work.qkv_width;
    rotate(qkv, decoder.heads + decoder.kv_heads, dim, step.phases + token * dim);
    const float* k = qkv + decoder.heads * dim;
    write_slot(cache, index, batch.slots[token], k, k + decoder.kv_heads * dim);
  });
  const Heads heads{work.qkv, work.qkv_width, work.attended, work.attended_width, decoder.heads};
  attend(member, cache, batch, heads, index);
  linear<true>(member, work.attended, tokens, work.attended_width, layer.output, hidden, step.hidden);
  normalize(layer.mlp_norm);
  gated_linear(member, work.normed, tokens, hidden, layer.gate, layer.up, decoder.inner, work.inner);
  linear<true>(member, work.inner, tokens, decoder.inner, layer.down, hidden, step.hidden);
}

}  // namespace kvf
