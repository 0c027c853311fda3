// Two-phase partition attention on CPUs: what the driver and the kernels of each instruction set share.
// Plain data only; see isa.h for why.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace chunkserve {

inline constexpr int kMaxHeadDim = 256;
// K tiles are cut into panels of this many tokens, V tiles into panels of this many values of the head dim.
inline constexpr int kPanel = 64;
// Keys whose logits are held at once.
inline constexpr int kBlockTokens = 64;
// Rows (query token, query head of the group) that one task holds; a multiple of those that products take at once.
inline constexpr int kBlockRows = 48;
inline constexpr int kTileRows = 6;
inline constexpr int kMaxTileRows = 16;

// Row strides of the scratch arrays are constants so that the inner loops address them by immediates.
inline constexpr int kStrideQ = kMaxHeadDim + 16;
inline constexpr int kStrideS = kBlockTokens + 16;
inline constexpr int kStrideO = kMaxHeadDim + 16;

// What one thread needs for one task.
struct alignas(64) AttentionScratch {
  float q[kBlockRows * kStrideQ];  // fp32, or pairs of bf16
  float s[kBlockRows * kStrideS];  // logits, then probabilities (fp32, or pairs of bf16)
  float o[kBlockRows * kStrideO];
  float row_max[kBlockRows];
  float row_sum[kBlockRows];
  float rescale[kBlockRows];
  // The row sees the item's keys [row_first, row_keys).
  std::int32_t row_first[kBlockRows];
  std::int32_t row_keys[kBlockRows];
};

// One call, as pointers and sizes; strides count elements.
struct AttentionCall {
  DType q_dtype;
  DType kv_dtype;
  std::int32_t num_heads;
  std::int32_t group;  // query heads per KV head
  std::int32_t head_dim;
  std::int32_t chunk_size;
  float scale;
  std::int32_t window;         // keys that a row sees; 0 for all
  float softcap;               // 0 for none
  const float* alibi_slopes;   // [H] or null
  const float* sinks;          // [H] or null

  const void* q;  // [T, H, D]
  std::int64_t q_token_stride;
  std::int64_t q_head_stride;
  void* out;  // [T, H, D], contiguous

  const char* k;  // tile (slot, kv head) at slot * slot_bytes + kv head * tile_bytes
  const char* v;
  const float* k_scale;  // [S, G] of fp8 tiles
  const float* v_scale;
  std::int64_t slot_bytes;
  std::int64_t tile_bytes;

  float* partial_out;  // [P, H, D], normalised
  float* partial_lse;  // [P, H], natural logarithm

  const std::int32_t* row_pos;
  const std::int32_t* row_partial_indptr;
  const std::int32_t* row_partials;
  const std::int32_t* item_q_begin;
  const std::int32_t* item_q_end;
  const std::int32_t* item_kv_begin;
  const std::int32_t* item_kv_len;
  const std::int32_t* item_partial;
  const std::int32_t* item_chunk_indptr;
  const std::int32_t* chunk_slots;
};

// Rows [row_begin, row_end) of one item under one KV head; row r is query token r / group of the item, head r % group.
struct AttentionTask {
  std::int32_t item;
  std::int32_t kv_head;
  std::int32_t row_begin;
  std::int32_t row_end;
};

// Where a thread gets its next task, null when there is none.
struct AttentionTasks {
  const AttentionTask* (*take)(void* context);
  void* context;
};

struct AttentionKernels {
  // Runs one task: writes the output, or one partial result per row. Takes and returns the next one, whose first keys
  // are fetched while the last ones of this task are multiplied.
  const AttentionTask* (*attend)(const AttentionCall& call, const AttentionTask& task, AttentionScratch& scratch,
                                 AttentionTasks tasks);
  // Merges the partial results of query token `row` into the output, in plan order.
  void (*merge)(const AttentionCall& call, std::int32_t row);
};

namespace portable {
extern const AttentionKernels attention_kernels;
}
#if defined(CHUNKSERVE_X86)
namespace avx2 {
extern const AttentionKernels attention_kernels;
}
namespace avx512 {
extern const AttentionKernels attention_kernels;
}
namespace avx512_bf16 {
extern const AttentionKernels attention_kernels;
}
namespace amx_bf16 {
extern const AttentionKernels attention_kernels;
}
#endif

}  // namespace chunkserve
