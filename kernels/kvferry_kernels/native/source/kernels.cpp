// The C interface of the operators. Tensors are float32 and contiguous unless a stride is given; sizes count elements.
//
// Functions that take numbers which index memory check them and return 0, or -1 when one is out of range: then nothing was
// read or written.
#include "decoder.h"
#include "self_test.h"

#define KVF_API extern "C" __attribute__((visibility("default")))

using namespace kvf;

KVF_API int32_t kvf_interface() { return 1; }

KVF_API int32_t kvf_self_test() { return self_test(); }

KVF_API int32_t kvf_lanes() { return LANES; }

KVF_API int32_t kvf_max_dim() { return MAX_DIM; }

KVF_API int64_t kvf_packed_floats(int64_t out, int64_t in) { return panels(out) * PANEL * in; }

KVF_API void kvf_pack(const float* weight, int64_t out, int64_t in, float* packed) { pack(weight, out, in, packed); }

KVF_API int32_t kvf_rows(const kvf_threads* threads, const float* packed, int64_t out, int64_t in, const int64_t* indices,
                         int64_t count, float* rows) {
  for (int64_t i = 0; i < count; ++i) {
    if (indices[i] < 0 || indices[i] >= out) return -1;
  }
  run_team(*threads, [&](Member& member) {
    member.loop(count, [&](int64_t i) { unpack_row(packed, in, indices[i], rows + i * in); });
  });
  return 0;
}

KVF_API void kvf_linear(const kvf_threads* threads, const float* x, int64_t rows, int64_t in, const float* packed,
                        int64_t out_features, float* out, int32_t add) {
  run_team(*threads, [&](Member& member) {
    if (add) linear<true>(member, x, rows, in, packed, out_features, out);
    else linear<false>(member, x, rows, in, packed, out_features, out);
  });
}

KVF_API void kvf_gated_linear(const kvf_threads* threads, const float* x, int64_t rows, int64_t in, const float* gate,
                              const float* up, int64_t out_features, float* out) {
  run_team(*threads, [&](Member& member) { gated_linear(member, x, rows, in, gate, up, out_features, out); });
}

KVF_API void kvf_rms_norm(const kvf_threads* threads, const float* x, const float* weight, int64_t rows, int64_t width,
                          float eps, float* out) {
  run_team(*threads, [&](Member& member) {
    member.loop(rows, [&](int64_t row) { rms_norm(x + row * width, weight, width, eps, out + row * width); });
  });
}

// Rotates the queries and keys of qkv [tokens, heads + 2 kv_heads, dim] in place and writes K and V to the layer's slots.
KVF_API int32_t kvf_rope_write(const kvf_threads* threads, const kvf_cache* cache, const kvf_batch* batch, int64_t layer,
                               int64_t heads, const float* phases, float* qkv) {
  if (layer < 0 || layer >= cache->layers || !fits(*cache, *batch)) return -1;
  const int64_t dim = cache->dim, width = (heads + 2 * cache->kv_heads) * dim;
  run_team(*threads, [&](Member& member) {
    member.loop(batch->tokens, [&](int64_t token) {
      float* at = qkv + token * width;
      rotate(at, heads + cache->kv_heads, dim, phases + token * dim);
      write_slot(*cache, layer, batch->slots[token], at + heads * dim, at + (heads + cache->kv_heads) * dim);
    });
  });
  return 0;
}

// Writes k and v [tokens, kv_heads, dim] to the layer's slots.
KVF_API int32_t kvf_write(const kvf_threads* threads, const kvf_cache* cache, const kvf_batch* batch, int64_t layer,
                          const float* k, const float* v) {
  if (layer < 0 || layer >= cache->layers || !fits(*cache, *batch)) return -1;
  const int64_t width = cache->kv_heads * cache->dim;
  run_team(*threads, [&](Member& member) {
    member.loop(batch->tokens, [&](int64_t token) {
      write_slot(*cache, layer, batch->slots[token], k + token * width, v + token * width);
    });
  });
  return 0;
}

// out [tokens, heads, dim] of q, which is the same shape with `stride` floats from token to token.
KVF_API int32_t kvf_attend(const kvf_threads* threads, const kvf_cache* cache, const kvf_batch* batch, int64_t layer,
                           int64_t heads, const float* q, int64_t stride, float* out) {
  if (layer < 0 || layer >= cache->layers || cache->dim > MAX_DIM || heads % cache->kv_heads) return -1;
  if (!fits(*cache, *batch)) return -1;
  const Heads given{q, stride, out, heads * cache->dim, heads};
  run_team(*threads, [&](Member& member) { attend(member, *cache, *batch, given, layer); });
  return 0;
}

KVF_API int64_t kvf_work_floats(const kvf_decoder* decoder) { return Work::floats(*decoder); }

// A step through all layers: `step->hidden` is what the last one gives, before the final norm.
KVF_API int32_t kvf_forward(const kvf_threads* threads, const kvf_decoder* decoder, const kvf_cache* cache,
                            const kvf_batch* batch, const kvf_step* step) {
  if (decoder->layers != cache->layers || decoder->kv_heads != cache->kv_heads || decoder->dim != cache->dim) return -1;
  if (decoder->dim > MAX_DIM || decoder->heads % decoder->kv_heads || !fits(*cache, *batch)) return -1;
  for (int64_t token = 0; token < batch->tokens; ++token) {
    if (step->token_ids[token] < 0 || step->token_ids[token] >= decoder->vocab) return -1;
  }
  const Work work = Work::of(*decoder, step->work, batch->tokens);
  run_team(*threads, [&](Member& member) {
    member.loop(batch->tokens, [&](int64_t token) {
      unpack_row(decoder->embedding, decoder->hidden, step->token_ids[token], step->hidden + token * decoder->hidden);
    });
    for (int64_t index = 0; index < decoder->layers; ++index) {
      run_layer(member, *decoder, *cache, *batch, *step, work, index);
    }
  });
  return 0;
}
