// Attention and its KV memory for cpu_tpp.py: checks of the plan, and addresses.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "attention_driver.h"
#include "plan_array.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace chunkserve {

DType parse_dtype(const std::string& name) {
  if (name == "float32") return DType::f32;
  if (name == "bfloat16") return DType::bf16;
  if (name == "float16") return DType::f16;
  if (name == "float8_e4m3fn") return DType::f8_e4m3;
  throw std::invalid_argument("dtype '" + name + "' is none of float32, bfloat16, float16, float8_e4m3fn");
}

namespace {

template <class T = void>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void attend_py(const std::string& q_dtype, const std::string& kv_dtype, int num_heads, int num_kv_heads, int head_dim,
               std::int64_t num_slots, std::uintptr_t q, std::int64_t q_rows, std::int64_t q_token_stride,
               std::int64_t q_head_stride, std::uintptr_t k, std::uintptr_t v, std::uintptr_t k_scale,
               std::uintptr_t v_scale, std::uintptr_t out, float scale, int window, float softcap,
               std::uintptr_t alibi_slopes, std::uintptr_t sinks, const PlanArray& plan_data) {
  const PlanView plan = view_of(plan_data);
  check_reads(plan, q_rows, num_slots);
  const KVTiles tiles{parse_dtype(kv_dtype), num_kv_heads,       head_dim,          num_slots,
                      at(k),                 at(v),              at<float>(k_scale), at<float>(v_scale)};
  const HeadRows queries{parse_dtype(q_dtype), at(q), q_token_stride, q_head_stride};
  const Logits logits{scale, window, softcap, at<float>(alibi_slopes), at<float>(sinks)};
  nb::gil_scoped_release release;
  attend(tiles, queries, num_heads, logits, at(out), plan);
}

void append_py(const std::string& dtype, const std::string& new_dtype, int num_kv_heads, int head_dim,
               std::int64_t num_slots, std::uintptr_t k, std::int64_t k_token_stride, std::int64_t k_head_stride,
               std::uintptr_t v, std::int64_t v_token_stride, std::int64_t v_head_stride, std::int64_t rows,
               std::uintptr_t k_tiles, std::uintptr_t v_tiles, std::uintptr_t k_scale, std::uintptr_t v_scale,
               const PlanArray& plan_data) {
  const PlanView plan = view_of(plan_data);
  check_writes(plan, rows, num_slots);
  const KVTiles tiles{parse_dtype(dtype), num_kv_heads, head_dim,           num_slots,
                      at(k_tiles),        at(v_tiles),  at<float>(k_scale), at<float>(v_scale)};
  const DType from = parse_dtype(new_dtype);
  nb::gil_scoped_release release;
  append(tiles, {from, at(k), k_token_stride, k_head_stride}, {from, at(v), v_token_stride, v_head_stride}, plan);
}

void copy_rows_py(const std::string& dtype, int num_kv_heads, int head_dim, int chunk_size, std::uintptr_t k_tiles,
                  std::uintptr_t v_tiles, std::int64_t src_slot, std::int64_t dst_slot, int num_rows) {
  const KVTiles tiles{parse_dtype(dtype), num_kv_heads, head_dim, 0, at(k_tiles), at(v_tiles), nullptr, nullptr};
  copy_rows(tiles, chunk_size, src_slot, dst_slot, num_rows);
}

void read_chunk_py(const std::string& dtype, int num_kv_heads, int head_dim, int chunk_size, std::uintptr_t k_tiles,
                   std::uintptr_t v_tiles, std::int64_t slot, std::uintptr_t k, std::uintptr_t v) {
  const KVTiles tiles{parse_dtype(dtype), num_kv_heads, head_dim, 0, at(k_tiles), at(v_tiles), nullptr, nullptr};
  read_chunk(tiles, chunk_size, slot, at(k), at(v));
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
  m.def("attend", &attend_py, "q_dtype"_a, "kv_dtype"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "num_slots"_a,
        "q"_a, "q_rows"_a, "q_token_stride"_a, "q_head_stride"_a, "k"_a, "v"_a, "k_scale"_a, "v_scale"_a, "out"_a,
        "scale"_a, "window"_a, "softcap"_a, "alibi_slopes"_a, "sinks"_a, "plan"_a);
  m.def("append", &append_py, "dtype"_a, "new_dtype"_a, "num_kv_heads"_a, "head_dim"_a, "num_slots"_a, "k"_a,
        "k_token_stride"_a, "k_head_stride"_a, "v"_a, "v_token_stride"_a, "v_head_stride"_a, "rows"_a, "k_tiles"_a,
        "v_tiles"_a, "k_scale"_a, "v_scale"_a, "plan"_a);
  m.def("copy_rows", &copy_rows_py, "dtype"_a, "num_kv_heads"_a, "head_dim"_a, "chunk_size"_a, "k_tiles"_a,
        "v_tiles"_a, "src_slot"_a, "dst_slot"_a, "num_rows"_a);
  m.def("read_chunk", &read_chunk_py, "dtype"_a, "num_kv_heads"_a, "head_dim"_a, "chunk_size"_a, "k_tiles"_a,
        "v_tiles"_a, "slot"_a, "k"_a, "v"_a);
  m.def("advise_large_pages", &advise_large_pages, "address"_a, "bytes"_a);
}

}  // namespace chunkserve
