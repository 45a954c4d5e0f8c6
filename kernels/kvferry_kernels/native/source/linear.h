// y = x W^T with W packed in panels.
//
// A panel holds PANEL rows of W (outputs) side by side: [in][PANEL], so that a product reads it once from end to end. The
// last panel is padded with zeros. Each output is added up in one order, whatever the number of rows: a row's result is the
// same bits alone and in any batch.
#pragma once

#include "team.h"

namespace kvf {

constexpr int PANEL = 2 * LANES;
constexpr int TILE_ROWS = KVF_TILE_ROWS;
constexpr int64_t BLOCK = 64;
constexpr int64_t LINE = 64 / sizeof(float);

KVF_INLINE int64_t panels(int64_t out) { return (out + PANEL - 1) / PANEL; }

inline void pack(const float* weight, int64_t out, int64_t in, float* packed) {
  for (int64_t first = 0; first < out; first += PANEL) {
    const int64_t columns = out - first < PANEL ? out - first : PANEL;
    float* panel = packed + first * in;
    for (int64_t k = 0; k < in; ++k) {
      for (int64_t column = 0; column < columns; ++column) panel[k * PANEL + column] = weight[(first + column) * in + k];
      for (int64_t column = columns; column < PANEL; ++column) panel[k * PANEL + column] = 0.0f;
    }
  }
}

// Row `index` of the weight.
inline void unpack_row(const float* packed, int64_t in, int64_t index, float* row) {
  const float* column = packed + index / PANEL * PANEL * in + index % PANEL;
  for (int64_t k = 0; k < in; ++k) row[k] = column[k * PANEL];
}

// What a panel's product reads ahead while it computes: `line` of the panel that the thread computes next.
struct Ahead {
  const float* next;  // null: nothing
  int64_t step;       // floats to go on by per input

  // Of a product whose rows are cut into `tiles`: tile `index` reads its share.
  static KVF_INLINE Ahead of(const float* next, int64_t in, int64_t tiles, int64_t index) {
    if (next == nullptr) return {nullptr, 0};
    return {next + index * (in * PANEL / tiles / LINE * LINE), PANEL / tiles};
  }
};

// Products of a tile's rows and a panel: `out` [ROWS][2].
//
// BLOCK inputs are added up at a time, and then the blocks: a single chain over thousands of inputs would lose a decimal
// digit to rounding.
template <int ROWS>
__attribute__((noinline)) void multiply_tile(const float* x, int64_t stride, const float* panel, int64_t in, Ahead ahead,
                                             Floats (*out)[2]) {
  for (int row = 0; row < ROWS; ++row) out[row][0] = out[row][1] = Floats{};
  const float* next = ahead.next;
  for (int64_t first = 0; first < in; first += BLOCK) {
    const int64_t last = first + BLOCK < in ? first + BLOCK : in;
    Floats sums[ROWS][2];
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row) sums[row][0] = sums[row][1] = Floats{};
    const auto step = [&](int64_t k) __attribute__((always_inline)) {
      const Floats left = load(panel + k * PANEL), right = load(panel + k * PANEL + LANES);
#pragma GCC unroll 12
      for (int row = 0; row < ROWS; ++row) {
        const Floats value = splat(x[row * stride + k]);
        sums[row][0] += value * left;
        sums[row][1] += value * right;
      }
    };
    if (next == nullptr) {
      for (int64_t k = first; k < last; ++k) step(k);
    } else {
      for (int64_t k = first; k < last; ++k, next += ahead.step) {
        __builtin_prefetch(next, 0, 2);
        if (ahead.step > LINE) __builtin_prefetch(next + LINE, 0, 2);
        step(k);
      }
    }
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row) {
      out[row][0] += sums[row][0];
      out[row][1] += sums[row][1];
    }
  }
}

template <int ROWS = TILE_ROWS>
KVF_INLINE void multiply_rows(int64_t rows, const float* x, int64_t stride, const float* panel, int64_t in, Ahead ahead,
                              Floats (*out)[2]) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return multiply_rows<ROWS - 1>(rows, x, stride, panel, in, ahead, out);
  }
  multiply_tile<ROWS>(x, stride, panel, in, ahead, out);
}

// use(row, left, right) for all rows of x [rows, in]; tiles of like size, so that none is left with a single row.
template <class Use>
KVF_INLINE void multiply_panel(const float* x, int64_t rows, int64_t stride, const float* panel, int64_t in,
                               const float* next, Use use) {
  const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  int64_t first = 0;
  for (int64_t index = 0; index < tiles; ++index) {
    const int64_t last = rows * (index + 1) / tiles;
    Floats out[TILE_ROWS][2];
    multiply_rows(last - first, x + first * stride, stride, panel, in, Ahead::of(next, in, tiles, index), out);
    for (int64_t row = first; row < last; ++row) use(row, out[row - first][0], out[row - first][1]);
    first = last;
  }
}

KVF_INLINE void put(float* to, Floats left, Floats right, int64_t columns) {
  if (columns >= PANEL) {
    store(to, left);
    store(to + LANES, right);
  } else {
    float both[PANEL];
    store(both, left);
    store(both + LANES, right);
    std::memcpy(to, both, sizeof(float) * columns);
  }
}

KVF_INLINE void add(float* to, Floats left, Floats right, int64_t columns) {
  if (columns >= PANEL) {
    store(to, load(to) + left);
    store(to + LANES, load(to + LANES) + right);
  } else {
    float both[PANEL];
    store(both, left);
    store(both + LANES, right);
    for (int64_t column = 0; column < columns; ++column) to[column] += both[column];
  }
}

// body(panel, next panel or null) for each panel, shared among the team. Ends with a barrier.
template <class Body>
KVF_INLINE void each_panel(Member& member, const float* packed, int64_t in, int64_t count, Body body) {
  int64_t index = member.claim();
  while (index < count) {
    const int64_t following = member.claim();
    body(index, following < count ? packed + following * in * PANEL : nullptr);
    index = following;
  }
  member.barrier();
}

// out [rows, columns] = x [rows, in] W^T, or added to it.
template <bool ADD>
inline void linear(Member& member, const float* x, int64_t rows, int64_t in, const float* packed, int64_t columns,
                   float* out) {
  each_panel(member, packed, in, panels(columns), [&](int64_t index, const float* next) {
    const int64_t first = index * PANEL;
    multiply_panel(x, rows, in, packed + first * in, in, next, [&](int64_t row, Floats left, Floats right) {
      float* to = out + row * columns + first;
      if constexpr (ADD) add(to, left, right, columns - first);
      else put(to, left, right, columns - first);
    });
  });
}

KVF_INLINE Floats silu(Floats x) { return x / (splat(1.0f) + exp(-x)); }

// out [rows, columns] = silu(x gate^T) * (x up^T).
inline void gated_linear(Member& member, const float* x, int64_t rows, int64_t in, const float* gate, const float* up,
                         int64_t columns, float* out) {
  each_panel(member, gate, in, panels(columns), [&](int64_t index, const float* next) {
    const int64_t first = index * PANEL;
    multiply_panel(x, rows, in, gate + first * in, in, up + first * in, [&](int64_t row, Floats left, Floats right) {
      put(out + row * columns + first, silu(left), silu(right), columns - first);
    });
    multiply_panel(x, rows, in, up + first * in, in, next, [&](int64_t row, Floats left, Floats right) {
      float* to = out + row * columns + first;
      const int64_t width = columns - first;
      if (width >= PANEL) {
        put(to, load(to) * left, load(to + LANES) * right, width);
      } else {
        float gates[PANEL] = {};
        std::memcpy(gates, to, sizeof(float) * width);
        put(to, load(gates) * left, load(gates + LANES) * right, width);
      }
    });
  });
}

}  // namespace kvf
