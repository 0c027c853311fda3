// A plan as kernels read it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "plan_format.h"

namespace chunkserve {

// The arrays of plan.py's AttentionPlan, in the order of its flat array.
struct PlanView {
  std::int32_t chunk_size, num_sequences, num_rows, num_items, num_chunks, num_partials;
  const std::int32_t *seq_q_indptr, *row_pos, *write_slot, *write_offset, *row_partial_indptr, *row_partials,
      *item_q_begin, *item_q_end, *item_kv_begin, *item_kv_len, *item_partial, *item_chunk_indptr, *chunk_slots;

  PlanView(const std::int32_t* p, std::int64_t size) {
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

}  // namespace chunkserve
