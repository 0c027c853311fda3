// The tasks of two-phase partition attention, compiled once per instruction set. Derivations: kernels/README.md.
#include "attention_cpu.h"
#include "gemm_cpu.h"
#include "simd.h"

namespace chunkserve::CHUNKSERVE_ISA {
namespace {

using V = Simd<kWidth>;

constexpr float kInf = __builtin_inff();
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

CHUNKSERVE_INLINE float max_float(float a, float b) { return a > b ? a : b; }
CHUNKSERVE_INLINE int round_up(int n, int to) { return (n + to - 1) / to * to; }

float exp2_scalar(float x) { return Simd<4>::exp2(Simd<4>::set(x))[0]; }

// ---------------------------------------------------------------------------------------------------------------
// Rows in and out.

void read_row(DType dtype, const void* base, std::int64_t offset, int n, float* out) {
  if (dtype == DType::f32) {
    const float* p = static_cast<const float*>(base) + offset;
    for (int i = 0; i < n; ++i) out[i] = p[i];
    return;
  }
  const std::uint16_t* p = static_cast<const std::uint16_t*>(base) + offset;
  if (dtype == DType::bf16) {
    for (int i = 0; i < n; ++i) out[i] = from_bf16(p[i]);
  } else {
    for (int i = 0; i < n; ++i) out[i] = from_f16(p[i]);
  }
}

// Rounded to bf16, with zeros up to a multiple of 32.
void read_row_bf16(DType dtype, const void* base, std::int64_t offset, int n, std::uint16_t* out) {
  if (dtype == DType::bf16) {
    __builtin_memcpy(out, static_cast<const std::uint16_t*>(base) + offset, static_cast<unsigned long>(n) * 2);
  } else {
    float row[kMaxHeadDim];
    read_row(dtype, base, offset, n, row);
    for (int i = 0; i < n; ++i) out[i] = to_bf16(row[i]);
  }
  for (int i = n; i % 32; ++i) out[i] = 0;
}

void write_row(DType dtype, void* base, std::int64_t offset, int n, const float* in, float factor) {
  if (dtype == DType::f32) {
    float* p = static_cast<float*>(base) + offset;
    for (int i = 0; i < n; ++i) p[i] = in[i] * factor;
    return;
  }
  std::uint16_t* p = static_cast<std::uint16_t*>(base) + offset;
  if (dtype == DType::bf16) {
    for (int i = 0; i < n; ++i) p[i] = to_bf16(in[i] * factor);
  } else {
    for (int i = 0; i < n; ++i) p[i] = to_f16(in[i] * factor);
  }
}

// What a head's sink leaves of the weights of a row: exp(lse) / (exp(lse) + exp(sink)).
float sink_share(const AttentionCall& call, int head, float lse) {
  if (!call.sinks) return 1.0f;
  const float x = (call.sinks[head] - lse) * kLog2e;
  if (x <= 0.0f) return 1.0f / (1.0f + exp2_scalar(x));
  const float e = exp2_scalar(-x);
  return e / (1.0f + e);
}

// ---------------------------------------------------------------------------------------------------------------
// One task.

// Keys of one panel of one chunk that lie in the current block.
struct Piece {
  const char* k_tile;
  const char* v_tile;
  int token;   // in the chunk
  int column;  // in the block
  int length;
  std::int64_t scale_at;
  const Piece* next;  // one of the next block, of this task or the next one, to prefetch
};
constexpr int kMaxPieces = kBlockTokens / 16;

// Rows of a task that are multiplied at once, and the keys [first, end) of the current block that any of them sees.
struct RowGroup {
  int begin;
  int count;
  int first;
  int end;
};

CHUNKSERVE_INLINE RowGroup row_group(const AttentionScratch& scratch, int rows, int groups, int index, int block,
                                     int block_keys) {
  const int begin = rows * index / groups, end = rows * (index + 1) / groups;
  int first = scratch.row_first[begin], last = scratch.row_keys[begin];
  for (int r = begin + 1; r < end; ++r) {
    first = min_int(first, scratch.row_first[r]);
    last = max_int(last, scratch.row_keys[r]);
  }
  return {begin, end - begin, max_int(first - block, 0), min_int(last - block, block_keys)};
}

// Soft-cap and ALiBi, and then the change to base 2; `distance` is that of the first key from the row.
CHUNKSERVE_INLINE void transform_logits(const AttentionCall& call, float* s, int padded, int head, int distance) {
  const float slope = call.alibi_slopes ? call.alibi_slopes[head] : 0.0f;
  typename V::F step;
  for (int i = 0; i < kWidth; ++i) step[i] = static_cast<float>(i);
  for (int i = 0; i < padded; i += kWidth) {
    typename V::F x = V::load(s + i) * call.scale;
    if (call.softcap > 0.0f) x = V::tanh(x / call.softcap) * call.softcap;
    x += (step + static_cast<float>(distance + i)) * slope;
    V::store(s + i, x * kLog2e);
  }
}

// Turns the logits of rows [begin, end) into weights against their running maxima; keys that a row does not see get 0.
// Three passes over few rows: the rows of a pass are independent of each other and hide each other's latency.
template <bool kPairs>
CHUNKSERVE_INLINE void softmax_rows(AttentionScratch& scratch, int begin, int end, const int* first, const int* last,
                                    int padded, float scale_log2) {
  float shift[kMaxTileRows];
  typename V::F sums[kMaxTileRows];
  for (int r = begin; r < end; ++r) {
    float* s = scratch.s + r * kStrideS;
    for (int i = 0; i < first[r - begin]; ++i) s[i] = -kInf;
    for (int i = last[r - begin]; i < padded; ++i) s[i] = -kInf;
    typename V::F m = V::load(s);
    for (int i = kWidth; i < padded; i += kWidth) m = V::max(m, V::load(s + i));
    const float old_max = scratch.row_max[r];
    const float new_max = max_float(old_max, V::horizontal_max(m));
    // A row that has seen no key yet keeps its maximum of -inf; any finite shift gives it zeros.
    shift[r - begin] = new_max == -kInf ? 0.0f : new_max * scale_log2;
    scratch.rescale[r] = new_max == old_max ? 1.0f : exp2_scalar(old_max * scale_log2 - shift[r - begin]);
    scratch.row_max[r] = new_max;
  }
  for (int r = begin; r < end; ++r) {
    float* s = scratch.s + r * kStrideS;
    const float row_shift = shift[r - begin];
    typename V::F sum = V::set(0.0f);
    for (int i = 0; i < padded; i += kWidth) {
      const typename V::F p = V::exp2(V::load(s + i) * scale_log2 - row_shift);
#if CHUNKSERVE_ISA_LEVEL >= 3
      if constexpr (kPairs) {
        const __m256i half = (__m256i)_mm512_cvtneps_pbh((__m512)p);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<std::uint16_t*>(s) + i), half);
        // The sum is over what is multiplied, so that the weights still add up to one.
        sum += (typename V::F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
        continue;
      }
#endif
      V::store(s + i, p);
      sum += p;
    }
    // Tiles take weights in twos of 16.
    if constexpr (kPairs) __builtin_memset(reinterpret_cast<std::uint16_t*>(s) + padded, 0, 32);
    sums[r - begin] = sum;
  }
  for (int r = begin; r < end; ++r) {
    scratch.row_sum[r] = scratch.row_sum[r] * scratch.rescale[r] + V::horizontal_sum(sums[r - begin]);
  }
}

template <class Product>
struct Attention {
  using A = typename Product::A;
  using B = typename Product::B;
  static constexpr int kStep = Product::kStep;
  static constexpr bool kPairs = Product::kPairs;
  static_assert(Product::kRows <= kMaxTileRows && kBlockRows % Product::kRows == 0);

  const AttentionCall& call;
  const AttentionTask& task;
  AttentionScratch& scratch;
  const int d = call.head_dim;
  const int c = call.chunk_size;
  const int rows = task.row_end - task.row_begin;
  const int groups = (rows + Product::kRows - 1) / Product::kRows;
  const int q_begin = call.item_q_begin[task.item];
  const int kv_begin = call.item_kv_begin[task.item];
  const int kv_len = call.item_kv_len[task.item];
  // Soft-cap and ALiBi leave the logits scaled and in base 2.
  const bool transforms = call.softcap > 0.0f || call.alibi_slopes != nullptr;
  const float scale_log2 = transforms ? 1.0f : call.scale * kLog2e;

  Gemm<Product> gemm{};

  int token_of(int r) const { return q_begin + (task.row_begin + r) / call.group; }
  int head_of(int r) const { return task.kv_head * call.group + (task.row_begin + r) % call.group; }

  const AttentionTask* run(AttentionTasks tasks) {
    load_rows();
    int first = kv_len, last = 0;
    for (int r = 0; r < rows; ++r) {
      first = min_int(first, scratch.row_first[r]);
      last = max_int(last, scratch.row_keys[r]);
    }
    Piece pieces[2][kMaxPieces];
    int block = first / kBlockTokens * kBlockTokens;
    int count = cut_pieces(task, block, min_int(kBlockTokens, last - block), pieces[0]);
    const AttentionTask* next_task = block < last ? nullptr : tasks.take(tasks.context);
    for (int turn = 0; block < last; turn ^= 1, block += kBlockTokens) {
      const int next = block + kBlockTokens;
      int next_count = 0;
      if (next < last) {
        next_count = cut_pieces(task, next, min_int(kBlockTokens, last - next), pieces[turn ^ 1]);
      } else if ((next_task = tasks.take(tasks.context))) {
        next_count = first_pieces(*next_task, pieces[turn ^ 1]);
      }
      for (int i = 0; i < count; ++i) pieces[turn][i].next = i < next_count ? &pieces[turn ^ 1][i] : nullptr;
      run_block(block, min_int(kBlockTokens, last - block), pieces[turn], count);
      count = next_count;
    }
    store_rows();
    return next_task;
  }

  void load_rows() {
    for (int r = 0; r < rows; ++r) {
      const int token = token_of(r);
      const std::int64_t offset = token * call.q_token_stride + head_of(r) * call.q_head_stride;
      float* q = scratch.q + r * kStrideQ;
      if constexpr (kPairs) {
        read_row_bf16(call.q_dtype, call.q, offset, d, reinterpret_cast<std::uint16_t*>(q));
      } else {
        read_row(call.q_dtype, call.q, offset, d, q);
      }
      for (int i = 0; i < d; ++i) scratch.o[r * kStrideO + i] = 0.0f;
      scratch.row_max[r] = -kInf;
      scratch.row_sum[r] = 0.0f;
      const int end = call.row_pos[token] + 1 - kv_begin;
      scratch.row_keys[r] = max_int(0, min_int(kv_len, end));
      scratch.row_first[r] = call.window > 0 ? max_int(0, min_int(kv_len, end - call.window)) : 0;
    }
  }

  // Of the block that a task begins with, to be fetched; with a window, of that of its first row.
  int first_pieces(const AttentionTask& of, Piece* pieces) const {
    const int keys = call.item_kv_len[of.item];
    const int token = call.item_q_begin[of.item] + of.row_begin / call.group;
    const int hidden = call.window > 0 ? call.row_pos[token] + 1 - call.item_kv_begin[of.item] - call.window : 0;
    const int block = max_int(0, hidden) / kBlockTokens * kBlockTokens;
    return block < keys ? cut_pieces(of, block, min_int(kBlockTokens, keys - block), pieces) : 0;
  }

  int cut_pieces(const AttentionTask& of, int block, int block_keys, Piece* pieces) const {
    const std::int32_t* slots = call.chunk_slots + call.item_chunk_indptr[of.item];
    int count = 0;
    for (int key = block; key < block + block_keys;) {
      const int token = key % c, in_panel = token % kPanel;
      const int panel = min_int(kPanel, c - (token - in_panel));
      const int length = min_int(panel - in_panel, block + block_keys - key);
      const std::int64_t at = slots[key / c] * call.slot_bytes + of.kv_head * call.tile_bytes;
      const std::int64_t scale_at = std::int64_t{slots[key / c]} * (call.num_heads / call.group) + of.kv_head;
      pieces[count++] = {call.k + at, call.v + at, token, key - block, length, scale_at, nullptr};
      key += length;
    }
    return count;
  }

  void run_block(int block, int block_keys, const Piece* pieces, int count) {
    for (int g = 0; g < groups; ++g) {
      const RowGroup group = row_group(scratch, rows, groups, g, block, block_keys);
      if (group.first >= group.end) continue;
      for (int i = 0; i < count; ++i) {
        if (outside(pieces[i], group)) continue;
        multiply_keys(pieces[i], group, g);
      }
      const int padded = round_up(group.end, 16);
      int first[kMaxTileRows], last[kMaxTileRows];
      for (int r = group.begin; r < group.begin + group.count; ++r) {
        if (transforms) {
          const int distance = kv_begin + block - call.row_pos[token_of(r)];
          transform_logits(call, scratch.s + r * kStrideS, padded, head_of(r), distance);
        }
        last[r - group.begin] = max_int(0, min_int(group.end, scratch.row_keys[r] - block));
        first[r - group.begin] = max_int(0, min_int(last[r - group.begin], scratch.row_first[r] - block));
      }
      softmax_rows<kPairs>(scratch, group.begin, group.begin + group.count, first, last, padded, scale_log2);
    }
    for (int g = 0; g < groups; ++g) {
      const RowGroup group = row_group(scratch, rows, groups, g, block, block_keys);
      if (group.first >= group.end) continue;
      constexpr float kOnes[kTileRows] = {1, 1, 1, 1, 1, 1};
      const float* rescale = scratch.rescale + group.begin;
      if constexpr (!Gemm<Product>::kRescales) rescale_rows(group);
      for (int i = 0; i < count; ++i) {
        if (outside(pieces[i], group)) continue;
        multiply_values(pieces[i], group, g, rescale);
        rescale = kOnes;
      }
    }
  }

  // Chunks that no row of the group sees are not read: with a window they may be gone from the pool.
  static bool outside(const Piece& piece, const RowGroup& group) {
    return piece.column >= group.end || piece.column + piece.length <= group.first;
  }

  // The tile's values of `token` and what follows it in the panel of keys, or in panel `col` of values.
  const B* keys_at(const Piece& piece) const {
    const int in_panel = piece.token % kPanel;
    return reinterpret_cast<const B*>(piece.k_tile) + (piece.token - in_panel) * d + in_panel * kStep;
  }
  const B* values_at(const Piece& piece, int col) const {
    return reinterpret_cast<const B*>(piece.v_tile) + col * c + piece.token * min_int(kPanel, d - col);
  }
  // Columns of the piece, times the scale that its tile lacks.
  void scale_columns(const Piece& piece, const RowGroup& group, int n, const float* scales) const {
    const float factor = scales[piece.scale_at] * Product::kFactor;
    for (int r = group.begin; r < group.begin + group.count; ++r) {
      float* const s = scratch.s + r * kStrideS + piece.column;
      for (int i = 0; i < n; ++i) s[i] *= factor;
    }
  }
  static Prefetch ahead(const B* at, int count) {
    return {reinterpret_cast<const char*>(at), count * static_cast<int>(sizeof(B))};
  }

  // S[rows][keys of the piece] = Q K
  void multiply_keys(const Piece& piece, const RowGroup& group, int g) {
    const int panel = min_int(kPanel, c - (piece.token - piece.token % kPanel));
    const int n = round_up(min_int(piece.length, group.end - piece.column), 16);
    const A* q = reinterpret_cast<const A*>(scratch.q + group.begin * kStrideQ);
    const B* k = keys_at(piece);
    const Prefetch next = piece.next ? ahead(keys_at(*piece.next), piece.next->length * d) : ahead(k, 0);
    float* s = scratch.s + group.begin * kStrideS + piece.column;
    gemm.template multiply<kStrideQ>(group.count, q, k, panel * kStep, d, n, s, kStrideS, nullptr, next.part(g, groups));
    if constexpr (Product::kFactor != 0.0f) scale_columns(piece, group, n, call.k_scale);
  }

  // O[rows] = rescale * O + P V
  void multiply_values(const Piece& piece, const RowGroup& group, int g, const float* rescale) {
    const int length = min_int(piece.length, group.end - piece.column);
    if constexpr (Product::kFactor != 0.0f) scale_columns(piece, group, length, call.v_scale);
    const A* p = reinterpret_cast<const A*>(scratch.s + group.begin * kStrideS) + piece.column / (kPairs ? 2 : 1);
    for (int col = 0; col < d; col += kPanel) {
      const int panel = min_int(kPanel, d - col);
      const B* v = values_at(piece, col);
      const Prefetch next = piece.next ? ahead(values_at(*piece.next, col), piece.next->length * panel) : ahead(v, 0);
      float* o = scratch.o + group.begin * kStrideO + col;
      gemm.template multiply<kStrideS>(group.count, p, v, panel * kStep, length, panel, o, kStrideO, rescale,
                                       next.part(g, groups));
    }
  }

  void rescale_rows(const RowGroup& group) {
    for (int r = group.begin; r < group.begin + group.count; ++r) {
      const float factor = scratch.rescale[r];
      if (factor == 1.0f) continue;
      float* o = scratch.o + r * kStrideO;
      for (int i = 0; i < d; i += kWidth) V::store(o + i, V::load(o + i) * factor);
    }
  }

  void store_rows() {
    const int partial = call.item_partial[task.item];
    for (int r = 0; r < rows; ++r) {
      const int token = token_of(r), head = head_of(r);
      const float sum = scratch.row_sum[r];
      const float* o = scratch.o + r * kStrideO;
      const float lse =
          sum > 0.0f ? scratch.row_max[r] * (transforms ? kLn2 : call.scale) + kLn2 * __builtin_log2f(sum) : -kInf;
      if (partial < 0) {
        const std::int64_t at = static_cast<std::int64_t>(token) * call.num_heads + head;
        write_row(call.q_dtype, call.out, at * d, d, o, sum > 0.0f ? sink_share(call, head, lse) / sum : 0.0f);
      } else {
        const std::int64_t at = static_cast<std::int64_t>(partial + token - q_begin) * call.num_heads + head;
        write_row(DType::f32, call.partial_out, at * d, d, o, sum > 0.0f ? 1.0f / sum : 0.0f);
        call.partial_lse[at] = lse;
      }
    }
  }
};

template <class Product>
const AttentionTask* attend_with(const AttentionCall& call, const AttentionTask& task, AttentionScratch& scratch,
                                 AttentionTasks tasks) {
  return Attention<Product>{call, task, scratch}.run(tasks);
}

const AttentionTask* attend(const AttentionCall& call, const AttentionTask& task, AttentionScratch& scratch,
                            AttentionTasks tasks) {
  switch (call.kv_dtype) {
    case DType::f32:
      return attend_with<FloatProduct<TileF32>>(call, task, scratch, tasks);
    case DType::f16:
      return attend_with<FloatProduct<TileF16>>(call, task, scratch, tasks);
    case DType::f8_e4m3:
      return attend_with<FloatProduct<TileF8>>(call, task, scratch, tasks);
    case DType::bf16:
#if CHUNKSERVE_ISA_LEVEL == 4
      if (call.head_dim % kAmxRows == 0) return attend_with<AmxProduct>(call, task, scratch, tasks);
#endif
#if CHUNKSERVE_ISA_LEVEL >= 3
      return attend_with<Bf16Product>(call, task, scratch, tasks);
#else
      return attend_with<FloatProduct<TileBf16>>(call, task, scratch, tasks);
#endif
    case DType::i8:
      break;  // of weights alone
  }
  __builtin_unreachable();
}

void merge(const AttentionCall& call, std::int32_t row) {
  const std::int32_t* partials = call.row_partials + call.row_partial_indptr[row];
  const int n = call.row_partial_indptr[row + 1] - call.row_partial_indptr[row];
  const int d = call.head_dim;
  float o[kMaxHeadDim];
  for (int head = 0; head < call.num_heads; ++head) {
    float top = -kInf;
    for (int i = 0; i < n; ++i) {
      top = max_float(top, call.partial_lse[static_cast<std::int64_t>(partials[i]) * call.num_heads + head]);
    }
    for (int j = 0; j < d; ++j) o[j] = 0.0f;
    float sum = 0.0f;
    for (int i = 0; i < n; ++i) {
      const std::int64_t at = static_cast<std::int64_t>(partials[i]) * call.num_heads + head;
      const float lse = call.partial_lse[at];
      if (lse == -kInf) continue;  // an empty partial; what its output holds is nobody's
      const float weight = exp2_scalar((lse - top) * kLog2e);
      const float* part = call.partial_out + at * d;
      for (int j = 0; j < d; ++j) o[j] += weight * part[j];
      sum += weight;
    }
    const float lse = top + kLn2 * __builtin_log2f(sum);
    write_row(call.q_dtype, call.out, (static_cast<std::int64_t>(row) * call.num_heads + head) * d, d, o,
              sum > 0.0f ? sink_share(call, head, lse) / sum : 0.0f);
  }
}

}  // namespace

const AttentionKernels attention_kernels = {attend, merge};

}  // namespace chunkserve::CHUNKSERVE_ISA
