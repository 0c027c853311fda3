// build_plan of plan.py in C++: the same arrays, number by number. The Python twin, plan_builder.py, is its oracle.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "plan_format.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace chunkserve {
namespace {

using Plan = nb::ndarray<std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Path = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Lengths = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using i64 = std::int64_t;

struct Item {
  i64 seq;  // a sequence whose path holds the chunks
  i64 q_begin, q_end, kv_begin, kv_len;
};

struct Builder {
  std::vector<Path> paths;
  std::vector<i64> lens, q_lens, present;
  i64 c;
  bool share;
  i64 min_saved_tokens, num_workers, heads_per_worker_item, min_split_tokens, fixed_split_tokens;  // fixed: 0 for none
  i64 spare_chunks;

  i64 num_sequences = 0, num_rows = 0;
  std::vector<i64> q_indptr;
  std::vector<Item> items;

  void check() {
    num_sequences = static_cast<i64>(paths.size());
    if (lens.size() != paths.size() || q_lens.size() != paths.size() || present.size() != paths.size()) {
      throw std::invalid_argument("paths, kv_lens, q_lens and kv_present have " + std::to_string(paths.size()) + ", " +
                                  std::to_string(lens.size()) + ", " + std::to_string(q_lens.size()) + " and " +
                                  std::to_string(present.size()) + " sequences");
    }
    q_indptr.assign(1, 0);
    for (i64 i = 0; i < num_sequences; ++i) {
      const i64 chunks = static_cast<i64>(paths[i].size());
      if (q_lens[i] < 1 || q_lens[i] > lens[i] || lens[i] > chunks * c) {
        throw std::invalid_argument("sequence " + std::to_string(i) + " has " + std::to_string(q_lens[i]) +
                                    " new tokens, " + std::to_string(lens[i]) + " keys and " + std::to_string(chunks) +
                                    " chunks of " + std::to_string(c));
      }
      q_indptr.push_back(q_indptr.back() + q_lens[i]);
    }
    num_rows = q_indptr.back();
  }

  // Leading full chunks that sequences i and i + 1 have in common.
  i64 shared_chunks(i64 i) const {
    const std::int32_t *a = paths[i].data(), *b = paths[i + 1].data();
    const i64 depth = std::min(lens[i], lens[i + 1]) / c;
    const i64 common = std::mismatch(a, a + depth, b).first - a;
    const i64 multiple = fixed_split_tokens > 0 ? std::max<i64>(fixed_split_tokens / c, 1) : 1;
    return common / multiple * multiple;
  }

  void cut_segments() {
    struct Range {
      i64 begin, end, start;
    };
    std::vector<i64> shared(std::max<i64>(num_sequences - 1, 0), 0);
    if (share) {
      for (i64 i = 0; i + 1 < num_sequences; ++i) shared[i] = shared_chunks(i);
    }
    std::vector<Range> stack;
    if (num_sequences > 0) stack.push_back({0, num_sequences, 0});
    while (!stack.empty()) {
      auto [begin, end, start] = stack.back();
      stack.pop_back();
      if (end - begin == 1) {
        add_segment(begin, end, start * c, lens[begin]);
        continue;
      }
      const i64 depth = *std::min_element(shared.begin() + begin, shared.begin() + end - 1);
      if ((depth - start) * c * (end - begin - 1) >= std::max<i64>(min_saved_tokens, 1)) {
        add_segment(begin, end, start * c, depth * c);
        start = depth;
      }
      i64 low = begin;
      for (i64 i = begin; i < end - 1; ++i) {
        if (shared[i] == depth) {
          stack.push_back({low, i + 1, start});
          low = i + 1;
        }
      }
      stack.push_back({low, end, start});
    }
  }

  // A sequence that ends with a shared chunk has nothing of its own left.
  void add_segment(i64 begin, i64 end, i64 kv_begin, i64 kv_end) {
    if (kv_end > kv_begin) items.push_back({begin, q_indptr[begin], q_indptr[end], kv_begin, kv_end - kv_begin});
  }

  i64 piece_tokens() const {
    if (fixed_split_tokens > 0) return fixed_split_tokens;
    i64 total = 0;
    for (const Item& s : items) total += s.kv_len;
    const auto divide_up = [](i64 a, i64 b) { return (a + b - 1) / b; };
    if (num_workers == 1) return divide_up(std::max<i64>(total, 1), c) * c;
    // Two pieces per worker level out what the largest one leaves.
    const i64 wanted = std::max<i64>(divide_up(2 * num_workers, std::max<i64>(heads_per_worker_item, 1)), 1);
    return divide_up(std::max(divide_up(total, wanted), min_split_tokens), c) * c;
  }

  // Cuts at absolute multiples; many query tokens are parallel enough without a cut.
  void split_segments() {
    const i64 tokens = piece_tokens();
    std::vector<Item> pieces;
    for (const Item& s : items) {
      const bool whole = fixed_split_tokens == 0 && (s.q_end - s.q_begin > 64 || s.kv_len <= tokens);
      const i64 end = s.kv_begin + s.kv_len;
      for (i64 low = s.kv_begin; low < end;) {
        const i64 high = whole ? end : std::min(end, (low / tokens + 1) * tokens);
        pieces.push_back({s.seq, s.q_begin, s.q_end, low, high - low});
        low = high;
      }
    }
    // Longest first.
    std::sort(pieces.begin(), pieces.end(), [](const Item& a, const Item& b) {
      const i64 work_a = (a.q_end - a.q_begin) * a.kv_len, work_b = (b.q_end - b.q_begin) * b.kv_len;
      if (work_a != work_b) return work_a > work_b;
      return a.q_begin != b.q_begin ? a.q_begin < b.q_begin : a.kv_begin < b.kv_begin;
    });
    items = std::move(pieces);
  }

  // Places for chunks to come: where one row alone reads the last keys of a sequence, and all sequences decode.
  i64 spare_of(const Item& item) const {
    const bool tail = item.q_end - item.q_begin == 1 && item.kv_begin + item.kv_len == lens[item.seq];
    return tail && num_rows == num_sequences ? spare_chunks : 0;
  }

  std::vector<std::int32_t> write() const {
    const i64 num_items = static_cast<i64>(items.size());
    std::vector<i64> items_per_row(num_rows, 0), item_partial(num_items, -1), partial_indptr(num_rows + 1, 0);
    for (const Item& item : items) {
      for (i64 row = item.q_begin; row < item.q_end; ++row) ++items_per_row[row];
    }
    i64 num_partials = 0, num_chunks = 0;
    for (i64 k = 0; k < num_items; ++k) {
      const Item& item = items[k];
      num_chunks += (item.kv_len + c - 1) / c + spare_of(item);
      const auto first = items_per_row.begin();
      if (std::any_of(first + item.q_begin, first + item.q_end, [](i64 n) { return n > 1; })) {
        item_partial[k] = num_partials;
        num_partials += item.q_end - item.q_begin;
        for (i64 row = item.q_begin; row < item.q_end; ++row) ++partial_indptr[row + 1];
      }
    }
    std::partial_sum(partial_indptr.begin(), partial_indptr.end(), partial_indptr.begin());
    const i64 limit = INT32_MAX;
    if (num_partials > limit || num_chunks > limit || num_rows > limit) {
      throw std::invalid_argument("plan of " + std::to_string(num_partials) + " partial results and " +
                                  std::to_string(num_chunks) + " chunks does not fit 32-bit numbers");
    }

    const i64 sizes = kPlanHeader + (num_sequences + 1) + 3 * num_rows + (num_rows + 1) + num_partials +
                      5 * num_items + (num_items + 1) + num_chunks + num_sequences;
    std::vector<std::int32_t> data(sizes, 0);
    const i64 header[] = {kPlanMagic,  kPlanVersion, c,            num_sequences,     num_rows,
                          num_items,   num_chunks,   num_partials, fixed_split_tokens};
    std::copy(std::begin(header), std::end(header), data.begin());
    std::int32_t* p = data.data() + kPlanHeader;
    const auto take = [&p](i64 count) {
      std::int32_t* const begin = p;
      p += count;
      return begin;
    };
    std::copy(q_indptr.begin(), q_indptr.end(), take(num_sequences + 1));
    std::int32_t* const row_pos = take(num_rows);
    std::int32_t* const write_slot = take(num_rows);
    std::int32_t* const write_offset = take(num_rows);
    write_rows(row_pos, write_slot, write_offset);
    std::copy(partial_indptr.begin(), partial_indptr.end(), take(num_rows + 1));

    std::int32_t* const row_partials = take(num_partials);
    std::vector<i64> by_position(num_items), cursor(partial_indptr.begin(), partial_indptr.end() - 1);
    std::iota(by_position.begin(), by_position.end(), 0);
    std::stable_sort(by_position.begin(), by_position.end(),
                     [this](i64 a, i64 b) { return items[a].kv_begin < items[b].kv_begin; });
    for (const i64 k : by_position) {
      if (item_partial[k] < 0) continue;
      for (i64 row = items[k].q_begin; row < items[k].q_end; ++row) {
        row_partials[cursor[row]++] = static_cast<std::int32_t>(item_partial[k] + row - items[k].q_begin);
      }
    }

    for (const i64 Item::*field : {&Item::q_begin, &Item::q_end, &Item::kv_begin, &Item::kv_len}) {
      std::transform(items.begin(), items.end(), take(num_items), [field](const Item& item) { return item.*field; });
    }
    std::copy(item_partial.begin(), item_partial.end(), take(num_items));
    std::int32_t* const chunk_indptr = take(num_items + 1);
    std::int32_t* const chunk_slots = take(num_chunks);
    std::int32_t* const tail_items = take(num_sequences);
    i64 chunk = 0;
    for (i64 k = 0; k < num_items; ++k) {
      const Item& item = items[k];
      const i64 count = (item.kv_len + c - 1) / c;
      std::copy_n(paths[item.seq].data() + item.kv_begin / c, count, chunk_slots + chunk);
      chunk += count;
      const i64 spare = spare_of(item);
      std::fill_n(chunk_slots + chunk, spare, chunk_slots[chunk - 1]);
      chunk += spare;
      chunk_indptr[k + 1] = static_cast<std::int32_t>(chunk);
      const auto first = std::upper_bound(q_indptr.begin(), q_indptr.end(), item.q_begin) - q_indptr.begin() - 1;
      for (i64 i = first; i < num_sequences && q_indptr[i] < item.q_end; ++i) {
        if (item.kv_begin + item.kv_len == lens[i]) tail_items[i] = static_cast<std::int32_t>(k);
      }
    }
    return data;
  }

  // Position of each query token, and where its K and V go.
  void write_rows(std::int32_t* row_pos, std::int32_t* write_slot, std::int32_t* write_offset) const {
    for (i64 i = 0; i < num_sequences; ++i) {
      for (i64 row = q_indptr[i]; row < q_indptr[i + 1]; ++row) {
        const i64 position = lens[i] - (q_indptr[i + 1] - row);
        const bool writes = position >= present[i];
        row_pos[row] = static_cast<std::int32_t>(position);
        write_slot[row] = writes ? paths[i].data()[position / c] : -1;
        write_offset[row] = writes ? static_cast<std::int32_t>(position % c) : -1;
      }
    }
  }
};

std::vector<i64> to_vector(const Lengths& x) { return {x.data(), x.data() + x.size()}; }

nb::ndarray<nb::numpy, std::int32_t, nb::ndim<1>> build_plan(const nb::list& paths, const Lengths& kv_lens,
                                                             const Lengths& q_lens, const Lengths& kv_present,
                                                             i64 chunk_size, bool share, i64 min_saved_tokens,
                                                             i64 num_workers, i64 heads_per_worker_item,
                                                             i64 min_split_tokens, i64 fixed_split_tokens,
                                                             i64 spare_chunks) {
  Builder builder{};
  builder.paths.reserve(paths.size());
  for (const nb::handle path : paths) builder.paths.push_back(nb::cast<Path>(path));
  builder.lens = to_vector(kv_lens), builder.q_lens = to_vector(q_lens), builder.present = to_vector(kv_present);
  builder.c = chunk_size, builder.share = share, builder.min_saved_tokens = min_saved_tokens;
  builder.num_workers = num_workers, builder.heads_per_worker_item = heads_per_worker_item;
  builder.min_split_tokens = min_split_tokens, builder.fixed_split_tokens = fixed_split_tokens;
  builder.spare_chunks = spare_chunks;
  builder.check();
  builder.cut_segments();
  builder.split_segments();
  auto* const data = new std::vector<std::int32_t>(builder.write());
  const nb::capsule owner(data, [](void* p) noexcept { delete static_cast<std::vector<std::int32_t>*>(p); });
  return {data->data(), {data->size()}, owner};
}

// AttentionPlan.grow of plan.py: all of it is checked before any of it is changed.
bool grow_plan(const Plan& data, const std::vector<i64>& sequences, const std::vector<std::int32_t>& slots) {
  std::int32_t* p = data.data();
  const std::int32_t c = p[2], num_sequences = p[3], num_rows = p[4], num_items = p[5], num_partials = p[7];
  const std::int32_t num_chunks = p[6], fixed_split_tokens = p[8];
  std::int32_t& added_chunks = p[9];
  if (num_rows != num_sequences) return false;
  p += kPlanHeader;
  const auto take = [&p](i64 count) {
    std::int32_t* const begin = p;
    p += count;
    return begin;
  };
  take(num_sequences + 1);
  std::int32_t* const row_pos = take(num_rows);
  std::int32_t* const write_slot = take(num_rows);
  std::int32_t* const write_offset = take(num_rows);
  take(num_rows + 1 + num_partials);
  const std::int32_t* const item_q_begin = take(num_items);
  const std::int32_t* const item_q_end = take(num_items);
  const std::int32_t* const item_kv_begin = take(num_items);
  std::int32_t* const item_kv_len = take(num_items);
  take(num_items);
  const std::int32_t* const chunk_indptr = take(num_items + 1);
  std::int32_t* const chunk_slots = take(num_chunks);
  const std::int32_t* const tail_items = take(num_sequences);

  i64 full = 0;
  for (i64 i = 0; i < num_rows; ++i) {
    if (write_offset[i] < 0) return false;
    full += write_offset[i] == c - 1;
  }
  if (full != static_cast<i64>(sequences.size()) || slots.size() != sequences.size()) return false;
  for (const i64 i : sequences) {
    if (i < 0 || i >= num_rows || write_offset[i] != c - 1) return false;
    const std::int32_t item = tail_items[i], room = (chunk_indptr[item + 1] - chunk_indptr[item]) * c;
    const bool at_cut = fixed_split_tokens > 0 && (item_kv_begin[item] + item_kv_len[item]) % fixed_split_tokens == 0;
    if (item_q_end[item] - item_q_begin[item] != 1 || item_kv_len[item] >= room || at_cut) return false;
  }

  for (std::size_t n = 0; n < sequences.size(); ++n) {
    const i64 i = sequences[n];
    const std::int32_t item = tail_items[i];
    chunk_slots[chunk_indptr[item] + item_kv_len[item] / c] = slots[n];
    write_slot[i] = slots[n];
    write_offset[i] = -1;
  }
  for (i64 i = 0; i < num_rows; ++i) {
    ++row_pos[i];
    ++write_offset[i];
    ++item_kv_len[tail_items[i]];
  }
  added_chunks += static_cast<std::int32_t>(sequences.size());
  return true;
}

}  // namespace

void register_plan(nb::module_& m) {
  m.def("build_plan", &build_plan, "paths"_a, "kv_lens"_a, "q_lens"_a, "kv_present"_a, "chunk_size"_a, "share"_a,
        "min_saved_tokens"_a, "num_workers"_a, "heads_per_worker_item"_a, "min_split_tokens"_a,
        "fixed_split_tokens"_a, "spare_chunks"_a);
  m.def("grow_plan", &grow_plan, "data"_a, "sequences"_a, "slots"_a);
}

}  // namespace chunkserve
