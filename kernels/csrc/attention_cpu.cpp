// The driver of two-phase partition attention on CPUs: tasks and threads. Runs on any CPU.
#include "attention_cpu.h"

#include <memory>
#include <vector>

#include "attention_driver.h"
#include "isa.h"
#include "thread_pool.h"

namespace chunkserve {
namespace {

const AttentionKernels& kernels_in_force() {
#if defined(CHUNKSERVE_X86)
  switch (current_isa()) {
    case Isa::avx2:
      return avx2::attention_kernels;
    case Isa::avx512:
      return avx512::attention_kernels;
    case Isa::avx512_bf16:
      return avx512_bf16::attention_kernels;
    case Isa::amx_bf16:
      return amx_bf16::attention_kernels;
    case Isa::portable:
      break;
  }
#endif
  return portable::attention_kernels;
}

AttentionScratch& scratch_of(int thread) {
  // Each element is touched by one thread of the pool alone.
  static std::vector<std::unique_ptr<AttentionScratch>> scratches(1024);
  auto& scratch = scratches.at(static_cast<std::size_t>(thread));
  if (!scratch) scratch = std::make_unique<AttentionScratch>();
  return *scratch;
}

}  // namespace

void check_reads(const PlanView& plan, std::int64_t rows, std::int64_t num_slots) {
  if (plan.num_rows != rows) {
    throw std::invalid_argument("q has " + std::to_string(rows) + " rows, the plan " + std::to_string(plan.num_rows));
  }
  plan.check(num_slots);
}

void attend(const KVTiles& tiles, const HeadRows& q, int num_heads, const Logits& logits, void* out,
            const PlanView& plan) {
  const int num_kv_heads = tiles.num_kv_heads, head_dim = tiles.head_dim;
  AttentionCall call{};
  call.q_dtype = q.dtype;
  call.kv_dtype = tiles.dtype;
  call.num_heads = num_heads;
  call.group = num_heads / num_kv_heads;
  call.head_dim = head_dim;
  call.chunk_size = plan.chunk_size;
  call.scale = logits.scale;
  call.window = logits.window;
  call.softcap = logits.softcap;
  call.alibi_slopes = logits.alibi_slopes;
  call.sinks = logits.sinks;
  call.q = q.data;
  call.q_token_stride = q.token_stride;
  call.q_head_stride = q.head_stride;
  call.out = out;
  call.k = static_cast<const char*>(tiles.k);
  call.v = static_cast<const char*>(tiles.v);
  call.k_scale = tiles.k_scale;
  call.v_scale = tiles.v_scale;
  call.tile_bytes = static_cast<std::int64_t>(element_bytes(tiles.dtype)) * plan.chunk_size * head_dim;
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
  struct Hand {
    TaskCounter& counter;
    const AttentionTask* first;
  };
  parallel_take(static_cast<int>(w.tasks.size()), [&, first = w.tasks.data()](TaskCounter& counter, int thread) {
    Hand hand{counter, first};
    const AttentionTasks tasks{[](void* context) -> const AttentionTask* {
                                 const auto& [counter, first] = *static_cast<Hand*>(context);
                                 const int index = counter.take();
                                 return index < 0 ? nullptr : first + index;
                               },
                               &hand};
    AttentionScratch& scratch = scratch_of(thread);
    for (const AttentionTask* task = tasks.take(tasks.context); task;) {
      task = kernels.attend(call, *task, scratch, tasks);
    }
  });

  w.merged_rows.clear();
  for (std::int32_t row = 0; row < plan.num_rows; ++row) {
    if (plan.row_partial_indptr[row + 1] > plan.row_partial_indptr[row]) w.merged_rows.push_back(row);
  }
  parallel_for(static_cast<int>(w.merged_rows.size()), [&](int i, int) { kernels.merge(call, w.merged_rows[i]); });
}

}  // namespace chunkserve
