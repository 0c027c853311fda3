// Attention and its KV memory on CPUs, as other native code calls it: without Python, split over the threads.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "plan_view.h"

namespace chunkserve {

// K and V of one layer: tiles [slot][KV head], laid out as cpu_tpp.py says.
struct KVTiles {
  DType dtype;
  int num_kv_heads;
  int head_dim;
  std::int64_t num_slots;
  void* k;
  void* v;
  float* k_scale;  // [S, G] of fp8 tiles, else null
  float* v_scale;
};

// Rows [T, heads, D] whose last dimension is contiguous; strides count elements.
struct HeadRows {
  DType dtype;
  const void* data;
  std::int64_t token_stride;
  std::int64_t head_stride;
};

// What masks and scales a layer's logits; 0 and null for none.
struct Logits {
  float scale;
  int window;
  float softcap;
  const float* alibi_slopes;  // [H]
  const float* sinks;         // [H]
};

// Throws std::invalid_argument when the plan's rows are not `rows`, or it writes or reads outside of the pool.
void check_writes(const PlanView& plan, std::int64_t rows, std::int64_t num_slots);
void check_reads(const PlanView& plan, std::int64_t rows, std::int64_t num_slots);

// Writes new rows of K and V where the plan says, rounded to the tiles' type. The plan has been checked.
void append(const KVTiles& tiles, const HeadRows& k, const HeadRows& v, const PlanView& plan);

// out [T, H, D], contiguous, in the type of q. The plan has been checked.
void attend(const KVTiles& tiles, const HeadRows& q, int num_heads, const Logits& logits, void* out,
            const PlanView& plan);

// Copies the first rows of a chunk, scales left alone.
void copy_rows(const KVTiles& tiles, int chunk_size, std::int64_t src_slot, std::int64_t dst_slot, int num_rows);

// Writes a slot's K and V as they are stored to k and v, [C, G, D] contiguous.
void read_chunk(const KVTiles& tiles, int chunk_size, std::int64_t slot, void* k, void* v);

}  // namespace chunkserve
