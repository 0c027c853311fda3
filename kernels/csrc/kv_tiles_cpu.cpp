// K and V in tiles on CPUs: rows in, rows out. Runs on any CPU.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "attention_cpu.h"
#include "attention_driver.h"
#include "thread_pool.h"

namespace chunkserve {
namespace {

// Where the row of a token lies in the tiles of one (slot, KV head); the layout is described in cpu_tpp.py.
struct TileLayout {
  int c, d, step;

  std::int64_t size() const { return std::int64_t{c} * d; }

  // Calls f(index in the K tile, dim) for the values of a token.
  template <class F>
  void each_k(int token, F f) const {
    const int in_panel = token % kPanel, panel_begin = token - in_panel, panel = std::min(kPanel, c - panel_begin);
    std::int64_t at = std::int64_t{panel_begin} * d + std::int64_t{in_panel} * step;
    for (int i = 0; i < d; i += step, at += std::int64_t{panel} * step) {
      for (int j = 0; j < step; ++j) f(at + j, i + j);
    }
  }

  // Lays a token's values [d] into the K tile.
  template <class T>
  void put_k(int token, const T* row, T* tile) const {
    const int in_panel = token % kPanel, panel_begin = token - in_panel, panel = std::min(kPanel, c - panel_begin);
    T* at = tile + std::int64_t{panel_begin} * d + std::int64_t{in_panel} * step;
    for (int i = 0; i < d; i += step, at += std::int64_t{panel} * step) std::memcpy(at, row + i, step * sizeof(T));
  }

  // Calls f(index in the V tile, dim) for the values of a token.
  template <class F>
  void each_v(int token, F f) const {
    for (int begin = 0; begin < d; begin += kPanel) {
      const int panel = std::min(kPanel, d - begin);
      const std::int64_t at =
          std::int64_t{begin} * c + std::int64_t{token / step} * panel * step + token % step;
      for (int i = 0; i < panel; ++i) f(at + std::int64_t{i} * step, begin + i);
    }
  }
};

// Calls f(T, layout) with the type that holds an element of the dtype.
template <class F>
void with_layout(DType dtype, int chunk_size, int head_dim, F&& f) {
  if (dtype == DType::f32) {
    f(float{}, TileLayout{chunk_size, head_dim, 1});
  } else if (dtype == DType::f8_e4m3) {
    f(std::uint8_t{}, TileLayout{chunk_size, head_dim, 1});
  } else {
    f(std::uint16_t{}, TileLayout{chunk_size, head_dim, dtype == DType::bf16 ? 2 : 1});
  }
}

float to_float(DType dtype, const void* base, std::int64_t at) {
  if (dtype == DType::f32) return static_cast<const float*>(base)[at];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(base)[at];
  if (dtype == DType::f16) return static_cast<float>(std::bit_cast<_Float16>(bits));
  return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

// To nearest even; what is larger than 448 becomes 448.
std::uint8_t to_e4m3(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x), sign = bits >> 24 & 0x80;
  const float size = std::min(std::bit_cast<float>(bits & 0x7fffffff), 448.0f);
  if (x != x) return 0x7f;
  // Below 2^-6 values are multiples of 2^-9; adding 1.5 * 2^23 leaves the nearest integer in the low bits.
  if (size < 0.015625f) {
    return static_cast<std::uint8_t>(sign | (std::bit_cast<std::uint32_t>(size * 512.0f + 12582912.0f) & 0xf));
  }
  const std::uint32_t wide = std::bit_cast<std::uint32_t>(size);
  return static_cast<std::uint8_t>(sign | (((wide + 0x7ffff + (wide >> 20 & 1)) >> 20) - (120 << 3)));
}

// To nearest even; NaN stays NaN.
std::uint16_t to_half(DType dtype, float x) {
  if (dtype == DType::f16) return std::bit_cast<std::uint16_t>(static_cast<_Float16>(x));
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  if (x != x) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// One of k and v on its way into tiles.
struct NewRows : HeadRows {
  float* scales;  // [S, G] of fp8 tiles

  std::int64_t begin(int row, int head) const { return row * token_stride + head * head_stride; }
  float at(int row, int head, int dim) const { return to_float(dtype, data, begin(row, head) + dim); }

  // The power of two that brings the largest value of a chunk's first token to [2, 4), in the middle of what e4m3 can
  // say, so that the other tokens of the chunk have room to both sides.
  float new_scale(int row, int head, int head_dim) const {
    float top = 0.0f;
    for (int i = 0; i < head_dim; ++i) top = std::max(top, std::fabs(at(row, head, i)));
    const int exponent = top == 0.0f ? 127 : static_cast<int>(std::bit_cast<std::uint32_t>(top) >> 23);
    return std::bit_cast<float>(static_cast<std::uint32_t>(std::clamp(exponent - 1, 27, 227)) << 23);
  }

  // The scale of a row's chunk. Rows that come with their chunk's first token derive it again rather than wait for it.
  float scale_of(const PlanView& plan, int row, int head, int num_kv_heads, int head_dim) const {
    const std::int32_t slot = plan.write_slot[row], first = row - plan.write_offset[row];
    float& stored = scales[std::int64_t{slot} * num_kv_heads + head];
    if (first < 0 || plan.write_slot[first] != slot || plan.write_offset[first] != 0) return stored;
    const float scale = new_scale(first, head, head_dim);
    if (first == row) stored = scale;
    return scale;
  }
};

// Calls write(row, head) for the rows that are written, on all threads where there are enough to wake them for, and
// before it ask(row, head) for one that is to be written a little later.
template <class Ask, class Write>
void each_written_row(const PlanView& plan, int num_kv_heads, Ask ask, Write write) {
  constexpr int kPerTask = 32, kAhead = 2;
  const int count = plan.num_rows * num_kv_heads;
  parallel_for((count + kPerTask - 1) / kPerTask, [&](int task, int) {
    const int first = task * kPerTask, end = std::min(first + kPerTask, count);
    const auto at = [&](int index, auto f) {
      if (index < end && plan.write_slot[index / num_kv_heads] >= 0) f(index / num_kv_heads, index % num_kv_heads);
    };
    for (int index = first; index < first + kAhead; ++index) at(index, ask);
    for (int index = first; index < end; ++index) {
      at(index + kAhead, ask);
      at(index, write);
    }
  });
}

}  // namespace

void check_writes(const PlanView& plan, std::int64_t rows, std::int64_t num_slots) {
  if (plan.num_rows != rows) {
    throw std::invalid_argument("k has " + std::to_string(rows) + " rows, the plan " + std::to_string(plan.num_rows));
  }
  for (std::int32_t row = 0; row < plan.num_rows; ++row) {
    if (plan.write_slot[row] >= num_slots || plan.write_offset[row] >= plan.chunk_size ||
        (plan.write_slot[row] >= 0 && plan.write_offset[row] < 0)) {
      throw std::invalid_argument("row " + std::to_string(row) + " of the plan writes to slot " +
                                  std::to_string(plan.write_slot[row]) + ", offset " +
                                  std::to_string(plan.write_offset[row]) + "; the pool has " +
                                  std::to_string(num_slots) + " slots of " + std::to_string(plan.chunk_size));
    }
  }
}

void append(const KVTiles& tiles, const HeadRows& k, const HeadRows& v, const PlanView& plan) {
  const NewRows new_k{k, tiles.k_scale}, new_v{v, tiles.v_scale};
  const int num_kv_heads = tiles.num_kv_heads, head_dim = tiles.head_dim;
  with_layout(tiles.dtype, plan.chunk_size, head_dim, [&]<class T>(T, TileLayout layout) {
    const auto tile_of = [&](void* base, int row, int head) {
      return static_cast<T*>(base) + (std::int64_t{plan.write_slot[row]} * num_kv_heads + head) * layout.size();
    };
    // A token's keys lie in as many cache lines as there are pairs of values, and none is here yet.
    const auto ask = [&](int row, int head) {
      const T* const k_tile = tile_of(tiles.k, row, head);
      layout.each_k(plan.write_offset[row], [&](std::int64_t at, int) { __builtin_prefetch(k_tile + at, 1); });
    };
    each_written_row(plan, num_kv_heads, ask, [&](int row, int head) {
      const std::int32_t offset = plan.write_offset[row];
      T* const k_tile = tile_of(tiles.k, row, head);
      T* const v_tile = tile_of(tiles.v, row, head);
      const auto write = [&](auto convert_k, auto convert_v) {
        T k_row[kMaxHeadDim];
        for (int i = 0; i < head_dim; ++i) k_row[i] = convert_k(i);
        layout.put_k(offset, k_row, k_tile);
        layout.each_v(offset, [&](std::int64_t at, int dim) { v_tile[at] = convert_v(dim); });
      };
      if constexpr (std::is_same_v<T, std::uint8_t>) {
        const float k_factor = 1.0f / new_k.scale_of(plan, row, head, num_kv_heads, head_dim);
        const float v_factor = 1.0f / new_v.scale_of(plan, row, head, num_kv_heads, head_dim);
        write([&](int dim) { return to_e4m3(new_k.at(row, head, dim) * k_factor); },
              [&](int dim) { return to_e4m3(new_v.at(row, head, dim) * v_factor); });
      } else if (k.dtype == tiles.dtype) {
        const T* const k_row = static_cast<const T*>(k.data) + new_k.begin(row, head);
        const T* const v_row = static_cast<const T*>(v.data) + new_v.begin(row, head);
        write([&](int dim) { return k_row[dim]; }, [&](int dim) { return v_row[dim]; });
      } else if constexpr (std::is_same_v<T, std::uint16_t>) {
        write([&](int dim) { return to_half(tiles.dtype, new_k.at(row, head, dim)); },
              [&](int dim) { return to_half(tiles.dtype, new_v.at(row, head, dim)); });
      } else {
        write([&](int dim) { return new_k.at(row, head, dim); }, [&](int dim) { return new_v.at(row, head, dim); });
      }
    });
  });
}

void copy_rows(const KVTiles& tiles, int chunk_size, std::int64_t src_slot, std::int64_t dst_slot, int num_rows) {
  with_layout(tiles.dtype, chunk_size, tiles.head_dim, [&]<class T>(T, TileLayout layout) {
    for (int head = 0; head < tiles.num_kv_heads; ++head) {
      const std::int64_t from = (src_slot * tiles.num_kv_heads + head) * layout.size();
      const std::int64_t to = (dst_slot * tiles.num_kv_heads + head) * layout.size();
      T* const k = static_cast<T*>(tiles.k);
      T* const v = static_cast<T*>(tiles.v);
      for (int token = 0; token < num_rows; ++token) {
        layout.each_k(token, [&](std::int64_t at, int) { k[to + at] = k[from + at]; });
        layout.each_v(token, [&](std::int64_t at, int) { v[to + at] = v[from + at]; });
      }
    }
  });
}

void read_chunk(const KVTiles& tiles, int chunk_size, std::int64_t slot, void* k, void* v) {
  with_layout(tiles.dtype, chunk_size, tiles.head_dim, [&]<class T>(T, TileLayout layout) {
    for (int head = 0; head < tiles.num_kv_heads; ++head) {
      const std::int64_t tile = (slot * tiles.num_kv_heads + head) * layout.size();
      for (int token = 0; token < chunk_size; ++token) {
        const std::int64_t row = (std::int64_t{token} * tiles.num_kv_heads + head) * tiles.head_dim;
        layout.each_k(token, [&](std::int64_t at, int dim) {
          static_cast<T*>(k)[row + dim] = static_cast<const T*>(tiles.k)[tile + at];
        });
        layout.each_v(token, [&](std::int64_t at, int dim) {
          static_cast<T*>(v)[row + dim] = static_cast<const T*>(tiles.v)[tile + at];
        });
      }
    }
  });
}

}  // namespace chunkserve
