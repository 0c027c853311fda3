// The driver of two-phase partition attention on CPUs: checks, tasks, threads. Runs on any CPU.
#include "attention_cpu.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "isa.h"
#include "plan_format.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace chunkserve {
namespace {

using PlanArray = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

const AttentionKernels& kernels_in_force() {
#if defined(CHUNKSERVE_X86)
  switch (current_isa()) {
    case Isa::avx2:
      return avx2::attention_kernels;
    case Isa::avx512:
      return avx512::attention_kernels;
    case Isa::avx512_bf16:
      return avx512_bf16::attention_kernels;
    case Isa::portable:
      break;
  }
#endif
  return portable::attention_kernels;
}

std::size_t element_bytes(DType dtype) { return dtype == DType::f32 ? 4 : dtype == DType::f8_e4m3 ? 1 : 2; }

DType parse_dtype(const std::string& name) {
  if (name == "float32") return DType::f32;
  if (name == "bfloat16") return DType::bf16;
  if (name == "float16") return DType::f16;
  if (name == "float8_e4m3fn") return DType::f8_e4m3;
  throw std::invalid_argument("dtype '" + name + "' is none of float32, bfloat16, float16, float8_e4m3fn");
}

// The arrays of plan.py's AttentionPlan, in the order of its flat array.
struct PlanView {
  std::int32_t chunk_size, num_sequences, num_rows, num_items, num_chunks, num_partials;
  const std::int32_t *seq_q_indptr, *row_pos, *write_slot, *write_offset, *row_partial_indptr, *row_partials,
      *item_q_begin, *item_q_end, *item_kv_begin, *item_kv_len, *item_partial, *item_chunk_indptr, *chunk_slots;

  explicit PlanView(const PlanArray& data) {
    const std::int32_t* p = data.data();
    const std::int64_t size = static_cast<std::int64_t>(data.size());
    if (size < kPlanHeader || p[0] != kPlanMagic || p[1] != kPlanVersion) {
      throw std::invalid_argument("not a plan of version " + std::to_string(kPlanVersion));
    }
    chunk_size = p[2], num_sequences = p[3], num_rows = p[4], num_items = p[5], num_chunks = p[6], num_partials = p[7];
    const std::int32_t* const end = p + size;
    p += kPlanHeader;
    const auto take = [&](std::int64_t count) {
      if (count < 0 || count > end - p) throw std::invalid_argument("plan is shorter than its header says");
      const std::int32_t* const begin = p;
      p += count;
      return begin;
    };
    seq_q_indptr = take(std::int64_t{num_sequences} + 1);
    row_pos = take(num_rows);
    write_slot = take(num_rows);
    write_offset = take(num_rows);
    row_partial_indptr = take(std::int64_t{num_rows} + 1);
    row_partials = take(num_partials);
    item_q_begin = take(num_items);
    item_q_end = take(num_items);
    item_kv_begin = take(num_items);
    item_kv_len = take(num_items);
    item_partial = take(num_items);
    item_chunk_indptr = take(std::int64_t{num_items} + 1);
    chunk_slots = take(num_chunks);
  }

  // What would make a kernel leave its arrays; plan.py's validate() checks the rest.
  void check(std::int64_t num_slots) const {
    std::int32_t low = 0, high = -1;
    for (std::int32_t i = 0; i < num_chunks; ++i) {
      low = std::min(low, chunk_slots[i]);
      high = std::max(high, chunk_slots[i]);
    }
    if (low < 0 || high >= num_slots) {
      throw std::invalid_argument("plan names slots " + std::to_string(low) + " to " + std::to_string(high) +
                                  ", the pool has " + std::to_string(num_slots));
    }
    for (std::int32_t i = 0; i < num_items; ++i) {
      const std::int32_t rows = item_q_end[i] - item_q_begin[i];
      const std::int64_t room =
          std::int64_t{item_chunk_indptr[i + 1] - item_chunk_indptr[i]} * chunk_size;
      if (item_q_begin[i] < 0 || rows <= 0 || item_q_end[i] > num_rows || item_chunk_indptr[i] < 0 ||
          item_chunk_indptr[i + 1] > num_chunks || item_kv_len[i] > room ||
          (item_partial[i] >= 0 && item_partial[i] > num_partials - rows)) {
        throw std::invalid_argument("item " + std::to_string(i) + " of the plan leaves its arrays");
      }
    }
  }
};

AttentionScratch& scratch_of(int thread) {
  // Each element is touched by one thread of the pool alone.
  static std::vector<std::unique_ptr<AttentionScratch>> scratches(1024);
  auto& scratch = scratches.at(static_cast<std::size_t>(thread));
  if (!scratch) scratch = std::make_unique<AttentionScratch>();
  return *scratch;
}

void attend(const std::string& q_dtype, const std::string& kv_dtype, int num_heads, int num_kv_heads, int head_dim,
            std::int64_t num_slots, std::uintptr_t q, std::int64_t q_rows, std::int64_t q_token_stride,
            std::int64_t q_head_stride, std::uintptr_t k, std::uintptr_t v, std::uintptr_t k_scale,
            std::uintptr_t v_scale, std::uintptr_t out, float scale, int window, float softcap,
            std::uintptr_t alibi_slopes, std::uintptr_t sinks, const PlanArray& plan_data) {
  const PlanView plan(plan_data);
  if (plan.num_rows != q_rows) {
    throw std::invalid_argument("q has " + std::to_string(q_rows) + " rows, the plan " + std::to_string(plan.num_rows));
  }
  plan.check(num_slots);

  AttentionCall call{};
  call.q_dtype = parse_dtype(q_dtype);
  call.kv_dtype = parse_dtype(kv_dtype);
  call.num_heads = num_heads;
  call.group = num_heads / num_kv_heads;
  call.head_dim = head_dim;
  call.chunk_size = plan.chunk_size;
  call.scale = scale;
  call.window = window;
  call.softcap = softcap;
  call.alibi_slopes = reinterpret_cast<const float*>(alibi_slopes);
  call.sinks = reinterpret_cast<const float*>(sinks);
  call.q = reinterpret_cast<const void*>(q);
  call.q_token_stride = q_token_stride;
  call.q_head_stride = q_head_stride;
  call.out = reinterpret_cast<void*>(out);
  call.k = reinterpret_cast<const char*>(k);
  call.v = reinterpret_cast<const char*>(v);
  call.k_scale = reinterpret_cast<const float*>(k_scale);
  call.v_scale = reinterpret_cast<const float*>(v_scale);
  call.tile_bytes = static_cast<std::int64_t>(element_bytes(call.kv_dtype)) * plan.chunk_size * head_dim;
  call.slot_bytes = call.tile_bytes * num_kv_heads;
  call.row_pos = plan.row_pos;
  call.row_partial_indptr = plan.row_partial_indptr;
  call.row_partials = plan.row_partials;
  call.item_q_begin = plan.item_q_begin;
  call.item_q_end = plan.item_q_end;
  call.item_kv_begin = plan.item_kv_begin;
  call.item_kv_len = plan.item_kv_len;
  call.item_partial = plan.item_partial;
  call.item_chunk_indptr = plan.item_chunk_indptr;
  call.chunk_slots = plan.chunk_slots;

  nb::gil_scoped_release release;
  // Workspaces belong to the calling thread and only grow. (A lambda would see the running thread's own.)
  struct Workspace {
    std::vector<float> partials;
    std::vector<AttentionTask> tasks;
    std::vector<std::int32_t> merged_rows;
  };
  thread_local Workspace own_workspace;
  Workspace& w = own_workspace;
  const std::size_t partial_rows = static_cast<std::size_t>(plan.num_partials) * num_heads;
  if (w.partials.size() < partial_rows * (head_dim + 1)) w.partials.resize(partial_rows * (head_dim + 1));
  call.partial_out = w.partials.data();
  call.partial_lse = w.partials.data() + partial_rows * head_dim;

  w.tasks.clear();
  for (std::int32_t item = 0; item < plan.num_items; ++item) {
    const std::int32_t rows = (plan.item_q_end[item] - plan.item_q_begin[item]) * call.group;
    const std::int32_t blocks = (rows + kBlockRows - 1) / kBlockRows;
    for (std::int32_t head = 0; head < num_kv_heads; ++head) {
      // The last rows of a prompt see the most keys, so they come first.
      for (std::int32_t block = blocks - 1; block >= 0; --block) {
        w.tasks.push_back({item, head, static_cast<std::int32_t>(std::int64_t{rows} * block / blocks),
                         static_cast<std::int32_t>(std::int64_t{rows} * (block + 1) / blocks)});
      }
    }
  }
  const AttentionKernels& kernels = kernels_in_force();
  parallel_for(static_cast<int>(w.tasks.size()),
               [&](int task, int thread) { kernels.attend(call, w.tasks[task], scratch_of(thread)); });

  w.merged_rows.clear();
  for (std::int32_t row = 0; row < plan.num_rows; ++row) {
    if (plan.row_partial_indptr[row + 1] > plan.row_partial_indptr[row]) w.merged_rows.push_back(row);
  }
  parallel_for(static_cast<int>(w.merged_rows.size()), [&](int i, int) { kernels.merge(call, w.merged_rows[i]); });
}

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

// One of k and v on its way into fp8 tiles.
struct NewRows {
  DType dtype;
  const void* data;
  std::int64_t token_stride, head_stride;
  float* scales;  // [S, G]

  float at(int row, int head, int dim) const {
    return to_float(dtype, data, row * token_stride + head * head_stride + dim);
  }

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

// Calls f(row, head) on all threads for the rows that are written.
template <class F>
void each_written_row(const PlanView& plan, int num_kv_heads, F f) {
  constexpr int kRowsPerTask = 32;
  const int row_blocks = (plan.num_rows + kRowsPerTask - 1) / kRowsPerTask;
  parallel_for(row_blocks * num_kv_heads, [&](int task, int) {
    const int head = task % num_kv_heads, first = task / num_kv_heads * kRowsPerTask;
    for (int row = first; row < std::min(first + kRowsPerTask, plan.num_rows); ++row) {
      if (plan.write_slot[row] >= 0) f(row, head);
    }
  });
}

// `new_dtype` is that of k and v; other than the tiles' for fp8 tiles alone.
void append(const std::string& dtype, const std::string& new_dtype, int num_kv_heads, int head_dim,
            std::int64_t num_slots, std::uintptr_t k, std::int64_t k_token_stride, std::int64_t k_head_stride,
            std::uintptr_t v, std::int64_t v_token_stride, std::int64_t v_head_stride, std::int64_t rows,
            std::uintptr_t k_tiles, std::uintptr_t v_tiles, std::uintptr_t k_scale, std::uintptr_t v_scale,
            const PlanArray& plan_data) {
  const PlanView plan(plan_data);
  check_writes(plan, rows, num_slots);
  const DType kv_dtype = parse_dtype(dtype), from = parse_dtype(new_dtype);
  const NewRows new_k{from, reinterpret_cast<const void*>(k), k_token_stride, k_head_stride,
                      reinterpret_cast<float*>(k_scale)};
  const NewRows new_v{from, reinterpret_cast<const void*>(v), v_token_stride, v_head_stride,
                      reinterpret_cast<float*>(v_scale)};
  nb::gil_scoped_release release;
  with_layout(kv_dtype, plan.chunk_size, head_dim, [&]<class T>(T, TileLayout layout) {
    each_written_row(plan, num_kv_heads, [&](int row, int head) {
      const std::int64_t tile = (std::int64_t{plan.write_slot[row]} * num_kv_heads + head) * layout.size();
      const std::int32_t offset = plan.write_offset[row];
      T* const k_tile = reinterpret_cast<T*>(k_tiles) + tile;
      T* const v_tile = reinterpret_cast<T*>(v_tiles) + tile;
      if constexpr (std::is_same_v<T, std::uint8_t>) {
        const float k_factor = 1.0f / new_k.scale_of(plan, row, head, num_kv_heads, head_dim);
        const float v_factor = 1.0f / new_v.scale_of(plan, row, head, num_kv_heads, head_dim);
        layout.each_k(offset, [&](std::int64_t at, int dim) {
          k_tile[at] = to_e4m3(new_k.at(row, head, dim) * k_factor);
        });
        layout.each_v(offset, [&](std::int64_t at, int dim) {
          v_tile[at] = to_e4m3(new_v.at(row, head, dim) * v_factor);
        });
      } else {
        const T* const k_row = reinterpret_cast<const T*>(k) + row * k_token_stride + head * k_head_stride;
        const T* const v_row = reinterpret_cast<const T*>(v) + row * v_token_stride + head * v_head_stride;
        layout.each_k(offset, [&](std::int64_t at, int dim) { k_tile[at] = k_row[dim]; });
        layout.each_v(offset, [&](std::int64_t at, int dim) { v_tile[at] = v_row[dim]; });
      }
    });
  });
}

void copy_rows(const std::string& dtype, int num_kv_heads, int head_dim, int chunk_size, std::uintptr_t k_tiles,
               std::uintptr_t v_tiles, std::int64_t src_slot, std::int64_t dst_slot, int num_rows) {
  with_layout(parse_dtype(dtype), chunk_size, head_dim, [&]<class T>(T, TileLayout layout) {
    for (int head = 0; head < num_kv_heads; ++head) {
      const std::int64_t from = (src_slot * num_kv_heads + head) * layout.size();
      const std::int64_t to = (dst_slot * num_kv_heads + head) * layout.size();
      T* const k = reinterpret_cast<T*>(k_tiles);
      T* const v = reinterpret_cast<T*>(v_tiles);
      for (int token = 0; token < num_rows; ++token) {
        layout.each_k(token, [&](std::int64_t at, int) { k[to + at] = k[from + at]; });
        layout.each_v(token, [&](std::int64_t at, int) { v[to + at] = v[from + at]; });
      }
    }
  });
}

// Writes the slot's K and V to k and v, [C, G, D] contiguous.
void read_chunk(const std::string& dtype, int num_kv_heads, int head_dim, int chunk_size, std::uintptr_t k_tiles,
                std::uintptr_t v_tiles, std::int64_t slot, std::uintptr_t k, std::uintptr_t v) {
  with_layout(parse_dtype(dtype), chunk_size, head_dim, [&]<class T>(T, TileLayout layout) {
    for (int head = 0; head < num_kv_heads; ++head) {
      const std::int64_t tile = (slot * num_kv_heads + head) * layout.size();
      for (int token = 0; token < chunk_size; ++token) {
        const std::int64_t row = (std::int64_t{token} * num_kv_heads + head) * head_dim;
        layout.each_k(token, [&](std::int64_t at, int dim) {
          reinterpret_cast<T*>(k)[row + dim] = reinterpret_cast<const T*>(k_tiles)[tile + at];
        });
        layout.each_v(token, [&](std::int64_t at, int dim) {
          reinterpret_cast<T*>(v)[row + dim] = reinterpret_cast<const T*>(v_tiles)[tile + at];
        });
      }
    }
  });
}

// Asks for large pages behind [address, address + bytes): private chunks are read once and cost a miss per page.
void advise_large_pages(std::uintptr_t address, std::int64_t bytes) {
#if defined(__linux__)
  constexpr std::uintptr_t kLargePage = std::uintptr_t{2} << 20;
  const std::uintptr_t begin = (address + kLargePage - 1) / kLargePage * kLargePage;
  const std::uintptr_t end = (address + static_cast<std::uintptr_t>(bytes)) / kLargePage * kLargePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)address, (void)bytes;
#endif
}

}  // namespace

void register_attention(nb::module_& m) {
  m.def("attend", &attend, "q_dtype"_a, "kv_dtype"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "num_slots"_a,
        "q"_a, "q_rows"_a, "q_token_stride"_a, "q_head_stride"_a, "k"_a, "v"_a, "k_scale"_a, "v_scale"_a, "out"_a,
        "scale"_a, "window"_a, "softcap"_a, "alibi_slopes"_a, "sinks"_a, "plan"_a);
  m.def("append", &append, "dtype"_a, "new_dtype"_a, "num_kv_heads"_a, "head_dim"_a, "num_slots"_a, "k"_a,
        "k_token_stride"_a, "k_head_stride"_a, "v"_a, "v_token_stride"_a, "v_head_stride"_a, "rows"_a, "k_tiles"_a,
        "v_tiles"_a, "k_scale"_a, "v_scale"_a, "plan"_a);
  m.def("copy_rows", &copy_rows, "dtype"_a, "num_kv_heads"_a, "head_dim"_a, "chunk_size"_a, "k_tiles"_a, "v_tiles"_a,
        "src_slot"_a, "dst_slot"_a, "num_rows"_a);
  m.def("read_chunk", &read_chunk, "dtype"_a, "num_kv_heads"_a, "head_dim"_a, "chunk_size"_a, "k_tiles"_a, "v_tiles"_a,
        "slot"_a, "k"_a, "v"_a);
  m.def("advise_large_pages", &advise_large_pages, "address"_a, "bytes"_a);
}

}  // namespace chunkserve
