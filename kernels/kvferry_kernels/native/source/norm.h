// Root mean square normalization of one row.
#pragma once

#include "vectors.h"

namespace kvf {

// out = x / sqrt(mean(x^2) + eps) * weight. `out` may be `x`.
inline void rms_norm(const float* x, const float* weight, int64_t width, float eps, float* out) {
  Floats squares{};
  int64_t at = 0;
  for (; at + LANES <= width; at += LANES) squares += load(x + at) * load(x + at);
  const int rest = static_cast<int>(width - at);
  const Floats tail = load_some(x + at, rest);
  squares += tail * tail;
  const Floats scale = splat(1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + eps));
  for (at = 0; at + LANES <= width; at += LANES) store(out + at, scale * load(x + at) * load(weight + at));
  store_some(out + at, scale * tail * load_some(weight + at, rest), rest);
}

}  // namespace kvf
