// Two-phase partition attention on CUDA: K1 segment, K2 merge, K3 append. Compiled once per head dim and dtypes by
// cuda_module.py (NVRTC or nvcc), and by g++ with a shim of the hardware for the tests (TPP_HOST).
//
// A *unit* of K1 is a row tile of one item under one KV head. Rows are (query token, head of the group) pairs, 16 to a
// warp. A *team* of 1, 2 or 4 warps shares the K and V tiles of a unit; the warps of a block form as many teams as fit.
// A row's arithmetic is the same in every team size and tile, so that results do not depend on who shares an item.
//
// T is the type of queries and products, KV that of the pool: T, or E4m3, whose tiles are widened to T in shared memory.
// Scales of chunks multiply logits and weights, so that widening is exact.
#ifdef TPP_HOST
#include <cuda_host_shim.h>
#else
#include "tpp_device.cuh"
#endif
#include "tpp_products.cuh"

// The same fields, in this order, as Params in cuda_tpp.py. Strides count elements.
struct Params {
  const int* plan;     // Header, then the arrays it points to
  const void* q;       // [T, H, D]; K3: k and v of [T, G, D] are `q` and `v_new`
  const void* v_new;
  void* k_pool;        // [S, G, C, D] of KV
  void* v_pool;
  void* out;           // [T, H, D]
  float* partial_out;  // [P, H, D], normalised
  float* partial_lse_log2;    // [P, H]
  const float* alibi_slopes;  // [H] or null
  const float* sinks;         // [H] or null
  float* k_scale;             // [S, G] of an E4m3 pool
  float* v_scale;
  i64 q_token_stride;
  i64 q_head_stride;
  i64 v_token_stride;
  i64 v_head_stride;
  float scale;
  float softcap;  // 0: none
  int window;     // 0: none
  int num_heads;
  int num_kv_heads;
  int chunk_size;
};
static_assert(sizeof(Params) == 16 * 8 + 6 * 4, "Params in cuda_tpp.py has the same size");

// What a plan looks like on the device; device_plan in cuda_tpp.py. `at_*` are offsets from the header, in ints.
struct Header {
  int num_rows;
  int num_tiles[3];  // of teams of 4, 2 and 1 warps
  int at_tiles;      // [tiles][2]: item, first row; largest teams first
  int at_row_pos;
  int at_write_slot;
  int at_write_offset;
  int at_row_partial_indptr;
  int at_row_partials;
  int at_item_q_begin;
  int at_item_q_end;
  int at_item_kv_begin;
  int at_item_kv_len;
  int at_item_partial;
  int at_item_chunk_indptr;
  int at_chunk_slots;
};

namespace tpp {

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

// Logits of the sink and the keys, both in base 2, become weights of a normalised output.
__device__ inline float sink_weight(float lse_log2, float sink_log2) {
  const float top = lse_log2 > sink_log2 ? lse_log2 : sink_log2;
  if (lse_log2 == minus_infinity()) return 0.0f;
  const float keys = exp2_fast(lse_log2 - top);
  return keys / (keys + exp2_fast(sink_log2 - top));
}

// kSharedLimit: bytes of shared memory that a block may have.
template <class T, class KV, int D, int kSharedLimit>
struct Segment {
  static_assert(D % 16 == 0 && D <= 256, "head dim");
  static constexpr bool kWidens = !kSame<T, KV>;
  // Keys per step of the online softmax; two steps of four teams fit the 163 KiB of sm_80.
  static constexpr int kKeys = sizeof(T) == 2 ? (D <= 128 ? 32 : 16) : (D <= 64 ? 16 : 8);
  // Chunks are multiples of 16 tokens, so that many keys lie side by side.
  static constexpr int kRun = kKeys < 16 ? kKeys : 16;
  using Product = Products<T, D, kKeys>;
  static constexpr int kStride = Product::kStride;
  static constexpr int kVector = 16 / sizeof(KV);
  static constexpr int kStageStride = kWidens ? D : kStride;
  static constexpr int kStageElements = 2 * kKeys * kStageStride;
  // The tile that a stage is widened to, and scales: [stages][runs][K, V].
  static constexpr int kTileBytes = kWidens ? 2 * kKeys * kStride * static_cast<int>(sizeof(T)) : 0;
  static constexpr int kScaleBytes = kWidens ? 64 : 0;
  __device__ static constexpr int shared_bytes(int warps, int stages) {
    return warps * (stages * kStageElements * static_cast<int>(sizeof(KV)) + kTileBytes + kScaleBytes +
                    Product::kQueryBytes);
  }
  static constexpr int kWarps = shared_bytes(4, 2) <= kSharedLimit ? 4 : 2;
  static constexpr int kThreads = kWarps * kLanes;
  // Blocks whose registers a multiprocessor has room for; more would spill.
  static constexpr int kBlocks = D <= 80 ? 3 : 1;
  // A third stage where a second block would not fit the multiprocessor anyway.
  static constexpr int kStages =
      2 * shared_bytes(kWarps, 2) > kSharedLimit && shared_bytes(kWarps, 3) <= kSharedLimit ? 3 : 2;
  static constexpr int kRingBytes = kStages * kStageElements * static_cast<int>(sizeof(KV));
  static constexpr int kTeamBytes = kRingBytes + kTileBytes + kScaleBytes;
  static_assert(kStages * (kKeys / kRun) * 8 <= 64, "scales");
  static constexpr int kSharedBytes = shared_bytes(kWarps, kStages);
  static_assert(kSharedBytes <= kSharedLimit, "a block does not fit shared memory");

  __device__ static void run(const Params& p) {
    TPP_DYNAMIC_SHARED(shared);
    const Header& header = *reinterpret_cast<const Header*>(p.plan);
    const int warp = static_cast<int>(threadIdx.x) / kLanes;
    const int* tiles = p.plan + header.at_tiles;
    const int grid = static_cast<int>(gridDim.x);
    int turn = static_cast<int>(blockIdx.x);  // this block's place in the round that hands out units
#pragma unroll 1  // one copy of the code for all team sizes
    for (int level = 0; level < 3; ++level) {
      const int team_warps = 4 >> level;
      const int num_units = header.num_tiles[level] * p.num_kv_heads;
      if (team_warps <= kWarps) {
        const int teams = kWarps / team_warps;
        const int team = warp / team_warps;
        for (int unit = team * grid + turn; unit < num_units; unit += teams * grid) {
          const int* tile = tiles + unit / p.num_kv_heads * 2;
          run_unit(p, header, shared, tile[0], tile[1], unit % p.num_kv_heads, team, team_warps);
          team_sync(team, team_warps);  // the ring is free for the next unit
        }
        turn = (turn + grid - num_units % grid) % grid;
      }
      tiles += header.num_tiles[level] * 2;
    }
  }

 private:
  __device__ static void run_unit(const Params& p, const Header& header, unsigned char* shared, int item, int first_row,
                                  int kv_head, int team, int team_warps) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int warp = static_cast<int>(threadIdx.x) / kLanes;
    const int team_thread = static_cast<int>(threadIdx.x) % (team_warps * kLanes);
    const int* plan = p.plan;
    const int group = p.num_heads / p.num_kv_heads;
    const int q_begin = plan[header.at_item_q_begin + item];
    const int num_rows = (plan[header.at_item_q_end + item] - q_begin) * group;
    const int kv_begin = plan[header.at_item_kv_begin + item];
    const int kv_len = plan[header.at_item_kv_len + item];
    const int* slots = plan + header.at_chunk_slots + plan[header.at_item_chunk_indptr + item];

    // The tile's rows, and which keys any of them sees.
    const int* row_pos = plan + header.at_row_pos;
    const int end_row = min(first_row + team_warps * kWarpRows, num_rows);
    int low = 0x7fffffff;
    int high = -1;
    for (int t = first_row / group + lane; t <= (end_row - 1) / group; t += kLanes) {
      low = min(low, row_pos[q_begin + t]);
      high = max(high, row_pos[q_begin + t]);
    }
    for (int mask = 16; mask > 0; mask /= 2) {
      low = min(low, shuffle_xor(low, mask));
      high = max(high, shuffle_xor(high, mask));
    }
    const int first_key = p.window > 0 ? max(low - p.window + 1 - kv_begin, 0) : 0;
    const int end_key = min(kv_len, high - kv_begin + 1);
    const int first_step = first_key / kKeys;
    const int end_step = end_key > first_key ? (end_key + kKeys - 1) / kKeys : first_step;

    const int warp_row = first_row + warp % team_warps * kWarpRows;
    const bool has_rows = warp_row < num_rows;
    Row rows[2];
    for (int i = 0; i < 2; ++i) {
      const int r = warp_row + (lane >> 2) + i * 8;
      rows[i].valid = r < num_rows;
      const int inside = rows[i].valid ? r : 0;
      rows[i].token = q_begin + inside / group;
      rows[i].head = kv_head * group + inside % group;
      rows[i].pos = rows[i].valid ? row_pos[rows[i].token] : -1;
      rows[i].slope_log2 = p.alibi_slopes ? p.alibi_slopes[rows[i].head] * kLog2e : 0.0f;
    }

    unsigned char* team_memory = shared + team * team_warps * kTeamBytes;
    KV* ring = reinterpret_cast<KV*>(team_memory);
    T* tile = reinterpret_cast<T*>(team_memory + kRingBytes);
    float* scales = reinterpret_cast<float*>(team_memory + kRingBytes + kTileBytes);
    unsigned char* scratch = shared + kWarps * kTeamBytes + warp * Product::kQueryBytes;
    const int num_threads = team_warps * kLanes;
    Loader loader{p, slots, kv_head, first_key, kv_len, lane, team_thread, num_threads, -1, 0, 1.0f, 1.0f};

    Product product;
    product.load_q(static_cast<const T*>(p.q), p.q_token_stride, p.q_head_stride, rows, scratch, lane);
    float o[D / 8][4] = {};
    float top[2] = {minus_infinity(), minus_infinity()};
    float total[2] = {0.0f, 0.0f};  // of this thread's keys

    for (int stage = 0; stage < kStages - 1; ++stage) {
      if (first_step + stage < end_step) {
        loader.load(ring + stage * kStageElements, scales + stage * kStageScales, (first_step + stage) * kKeys);
      }
      copy_async_commit();
    }
    int stage = 0;
    for (int step = first_step; step < end_step; ++step) {
      copy_async_wait<kStages - 2>();
      team_sync(team, team_warps);  // all have this step's tiles, and are done with those of the step before
      const int ahead = step + kStages - 1;
      const int free_stage = stage == 0 ? kStages - 1 : stage - 1;
      if (ahead < end_step) {
        loader.load(ring + free_stage * kStageElements, scales + free_stage * kStageScales, ahead * kKeys);
      }
      copy_async_commit();
      const T* k_tile;
      if constexpr (kWidens) {
        widen(tile, ring + stage * kStageElements, team_thread, num_threads);
        team_sync(team, team_warps);  // a whole tile
        k_tile = tile;
      } else {
        k_tile = ring + stage * kStageElements;
      }
      if (has_rows) {
        float s[kKeys / 8][4] = {};
        product.logits(s, k_tile, lane);
        if constexpr (kWidens) scale_keys(s, scales + stage * kStageScales);
        const int begin = kv_begin + step * kKeys;
        const bool all_visible = step * kKeys + kKeys <= kv_len && begin + kKeys - 1 <= low &&
                                 (p.window == 0 || begin > high - p.window);
        finish_logits(p, s, rows, begin, kv_begin + kv_len, all_visible, lane);
        add_step(s, o, top, total);
        if constexpr (kWidens) scale_keys(s, scales + stage * kStageScales + 1);
        product.add_values(o, s, k_tile + kKeys * kStride, scratch, lane);
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    copy_async_wait<0>();
    if (has_rows) write(p, plan[header.at_item_partial + item], q_begin, rows, o, top, total, lane);
  }

  static constexpr int kStageScales = 2 * (kKeys / kRun);

  // Keys and values of a stage as T; two values at a time, as a 32-bit word for the 16-bit types.
  __device__ static void widen(T* tile, const KV* stage, int thread, int num_threads) {
    constexpr int kRowWords = D / 4;
    const u32* words = reinterpret_cast<const u32*>(stage);
    for (int i = thread; i < 2 * kKeys * kRowWords; i += num_threads) {
      const int row = i / kRowWords;
      T* to = tile + row * kStride + (i - row * kRowWords) * 4;
      const u32 word = words[i];
      Product::store2(to, e4m3_to_float(word & 0xffu), e4m3_to_float(word >> 8 & 0xffu));
      Product::store2(to + 2, e4m3_to_float(word >> 16 & 0xffu), e4m3_to_float(word >> 24));
    }
  }

  // Logits or weights, times every second one of these scales, by runs of keys.
  __device__ static void scale_keys(float (&s)[kKeys / 8][4], const float* scales) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      const float scale = scales[n * 8 / kRun * 2];
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] *= scale;
    }
  }

  // Copies the keys and values of one step, zeros for those before first_key and past kv_len, which may be NaN. Slots
  // and scales are read 32 at a time, one per lane.
  struct Loader {
    const Params& p;
    const int* slots;
    int kv_head;
    int first_key;
    int kv_len;
    int lane;
    int thread;
    int num_threads;
    int held_from;  // -1: none yet
    int held;
    float held_k_scale;
    float held_v_scale;

    __device__ void load(KV* stage, [[maybe_unused]] float* scales, int step_key) {
      const KV* k_pool = static_cast<const KV*>(p.k_pool);
      const KV* v_pool = static_cast<const KV*>(p.v_pool);
#pragma unroll
      for (int run = 0; run < kKeys; run += kRun) {
        const int key = step_key + run;
        const int chunk = key / p.chunk_size;
        const int num_chunks = (kv_len + p.chunk_size - 1) / p.chunk_size;
        if (held_from < 0 || chunk >= held_from + kLanes) {
          held_from = chunk;
          held = chunk + lane < num_chunks ? slots[chunk + lane] : 0;
          if constexpr (kWidens) {
            const i64 of_chunk = static_cast<i64>(held) * p.num_kv_heads + kv_head;
            held_k_scale = p.k_scale[of_chunk];
            held_v_scale = p.v_scale[of_chunk];
          }
        }
        const i64 slot = shuffle(held, (chunk - held_from) % kLanes);
        const i64 at = ((slot * p.num_kv_heads + kv_head) * p.chunk_size + key % p.chunk_size) * D;
        if constexpr (kWidens) {
          const float k_scale = shuffle(held_k_scale, (chunk - held_from) % kLanes);
          const float v_scale = shuffle(held_v_scale, (chunk - held_from) % kLanes);
          const bool seen = key < kv_len && key + kRun > first_key;  // or its chunk may hold no scale
          if (thread == 0) {
            scales[run / kRun * 2] = seen ? k_scale : 0.0f;
            scales[run / kRun * 2 + 1] = seen ? v_scale : 0.0f;
          }
        }
        constexpr int kRowVectors = D / kVector;
        for (int i = thread; i < kRun * kRowVectors; i += num_threads) {
          const int row = i / kRowVectors;
          const bool valid = key + row >= first_key && key + row < kv_len;
          const i64 from = valid ? at + i * kVector : 0;
          KV* to = stage + (run + row) * kStageStride + (i - row * kRowVectors) * kVector;
          copy_async16(to, k_pool + from, valid);
          copy_async16(to + kKeys * kStageStride, v_pool + from, valid);
        }
      }
    }
  };

  // Scale, soft-cap, ALiBi and masks; afterwards the logits are in base 2.
  __device__ static void finish_logits(const Params& p, float (&s)[kKeys / 8][4], const Row (&rows)[2], int begin,
                                       int end, bool all_visible, int lane) {
    const float scale_log2 = p.scale * kLog2e;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (p.softcap > 0.0f) {
          // tanh(x) = 1 - 2 / (exp(2 x) + 1)
          const float x = s[n][i] * p.scale / p.softcap;
          s[n][i] = p.softcap * kLog2e * (1.0f - 2.0f / (exp2_fast(2.0f * kLog2e * x) + 1.0f));
        } else {
          s[n][i] *= scale_log2;
        }
      }
    }
    if (all_visible && !p.alibi_slopes) return;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Row& row = rows[i >> 1];
        const int pos = begin + n * 8 + (lane & 3) * 2 + (i & 1);
        const bool visible = pos < end && pos <= row.pos && (p.window == 0 || pos > row.pos - p.window);
        s[n][i] = visible ? s[n][i] + row.slope_log2 * static_cast<float>(pos - row.pos) : minus_infinity();
      }
    }
  }

  // One step of the online softmax; s becomes the weights.
  __device__ static void add_step(float (&s)[kKeys / 8][4], float (&o)[D / 8][4], float (&top)[2], float (&total)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float step_top = top[r];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) step_top = fmaxf(step_top, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
      step_top = fmaxf(step_top, shuffle_xor(step_top, 1));
      step_top = fmaxf(step_top, shuffle_xor(step_top, 2));
      const float shift = step_top == minus_infinity() ? 0.0f : step_top;  // no key seen yet: all weights are 0
      const float rescale = exp2_fast(top[r] - shift);
      top[r] = step_top;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          s[n][2 * r + e] = exp2_fast(s[n][2 * r + e] - shift);
          sum += s[n][2 * r + e];
        }
      }
      total[r] = total[r] * rescale + sum;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        o[n][2 * r] *= rescale;
        o[n][2 * r + 1] *= rescale;
      }
    }
  }

  __device__ static void write(const Params& p, int item_partial, int q_begin, const Row (&rows)[2], float (&o)[D / 8][4],
                               const float (&top)[2], const float (&total)[2], int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = total[r] + shuffle_xor(total[r], 1);
      sum += shuffle_xor(sum, 2);
      const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
      const float lse_log2 = sum > 0.0f ? top[r] + log2_fast(sum) : minus_infinity();
      const Row& row = rows[r];
      if (!row.valid) continue;
      if (item_partial >= 0) {
        const i64 at = static_cast<i64>(item_partial + row.token - q_begin) * p.num_heads + row.head;
        if ((lane & 3) == 0) p.partial_lse_log2[at] = lse_log2;
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
          float* to = p.partial_out + at * D + n * 8 + (lane & 3) * 2;
          to[0] = o[n][2 * r] * inverse;
          to[1] = o[n][2 * r + 1] * inverse;
        }
      } else {
        const float weight = p.sinks ? sink_weight(lse_log2, p.sinks[row.head] * kLog2e) : 1.0f;
        const i64 at = (static_cast<i64>(row.token) * p.num_heads + row.head) * D;
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
          // Two roundings, as over K2: a row's bits must not depend on which of the two writes it.
          Product::store2(static_cast<T*>(p.out) + at + n * 8 + (lane & 3) * 2, o[n][2 * r] * inverse * weight,
                          o[n][2 * r + 1] * inverse * weight);
        }
      }
    }
  }
};

// K2: a warp merges the partial results of one (query token, head), in plan order.
template <class T, int D>
struct Merge {
  static constexpr int kThreads = 128;
  static constexpr int kPairs = (D / 2 + kLanes - 1) / kLanes;  // of values, per lane

  __device__ static void run(const Params& p) {
    const Header& header = *reinterpret_cast<const Header*>(p.plan);
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int warps = static_cast<int>(gridDim.x) * (kThreads / kLanes);
    const int first = static_cast<int>(blockIdx.x) * (kThreads / kLanes) + static_cast<int>(threadIdx.x) / kLanes;
    const i64 num_outputs = static_cast<i64>(header.num_rows) * p.num_heads;
    for (i64 i = first; i < num_outputs; i += warps) {
      const int token = static_cast<int>(i / p.num_heads);
      const int head = static_cast<int>(i % p.num_heads);
      const int begin = p.plan[header.at_row_partial_indptr + token];
      const int end = p.plan[header.at_row_partial_indptr + token + 1];
      if (begin < end) merge(p, p.plan + header.at_row_partials, begin, end, i, head, lane);
    }
  }

 private:
  __device__ static void merge(const Params& p, const int* row_partials, int begin, int end, i64 output, int head,
                               int lane) {
    float top = minus_infinity();
    for (int i = begin + lane; i < end; i += kLanes) {
      top = fmaxf(top, p.partial_lse_log2[static_cast<i64>(row_partials[i]) * p.num_heads + head]);
    }
    for (int mask = 16; mask > 0; mask /= 2) top = fmaxf(top, shuffle_xor(top, mask));
    const float shift = top == minus_infinity() ? 0.0f : top;

    float o[kPairs][2] = {};
    float total = 0.0f;
    for (int block = begin; block < end; block += kLanes) {
      const int mine = block + lane < end ? row_partials[block + lane] : 0;
      const float lse =
          block + lane < end ? p.partial_lse_log2[static_cast<i64>(mine) * p.num_heads + head] : minus_infinity();
      const float weight = exp2_fast(lse - shift);
      for (int j = 0; j < min(kLanes, end - block); ++j) {
        const float w = shuffle(weight, j);
        const i64 partial = shuffle(mine, j);
        if (w == 0.0f) continue;  // no keys: its values were never written, or do not count
        total += w;
        const float* from = p.partial_out + (partial * p.num_heads + head) * D;
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          const int d = (pair * kLanes + lane) * 2;
          if (d < D) {
            o[pair][0] += w * from[d];
            o[pair][1] += w * from[d + 1];
          }
        }
      }
    }
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
    const float lse_log2 = total > 0.0f ? shift + log2_fast(total) : minus_infinity();
    const float weight = p.sinks ? sink_weight(lse_log2, p.sinks[head] * kLog2e) : 1.0f;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const int d = (pair * kLanes + lane) * 2;
      if (d < D) {
        Products<T, D, 16>::store2(static_cast<T*>(p.out) + output * D + d, o[pair][0] * inverse * weight,
                                   o[pair][1] * inverse * weight);
      }
    }
  }
};

// K3: rows of k and v to their places in the pool. Source rows are aligned to 16 bytes.
template <class T, class KV, int D>
struct Append {
  static constexpr int kThreads = 128;

  __device__ static void run(const Params& p) {
    if constexpr (kSame<T, KV>) {
      copy(p);
    } else {
      narrow(p);
    }
  }

 private:
  __device__ static void copy(const Params& p) {
    struct alignas(16) Vector {
      u32 words[4];
    };
    const Header& header = *reinterpret_cast<const Header*>(p.plan);
    constexpr int kVector = 16 / sizeof(T);
    constexpr int kRowVectors = D / kVector;
    const i64 num_vectors = static_cast<i64>(header.num_rows) * p.num_kv_heads * kRowVectors;
    const i64 first = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    for (i64 i = first; i < num_vectors; i += static_cast<i64>(gridDim.x) * kThreads) {
      const int column = static_cast<int>(i % kRowVectors) * kVector;
      const int head = static_cast<int>(i / kRowVectors % p.num_kv_heads);
      const int token = static_cast<int>(i / kRowVectors / p.num_kv_heads);
      const i64 slot = p.plan[header.at_write_slot + token];
      if (slot < 0) continue;
      const int offset = p.plan[header.at_write_offset + token];
      const i64 to = ((slot * p.num_kv_heads + head) * p.chunk_size + offset) * D + column;
      const T* k = static_cast<const T*>(p.q) + token * p.q_token_stride + head * p.q_head_stride + column;
      const T* v = static_cast<const T*>(p.v_new) + token * p.v_token_stride + head * p.v_head_stride + column;
      *reinterpret_cast<Vector*>(static_cast<T*>(p.k_pool) + to) = *reinterpret_cast<const Vector*>(k);
      *reinterpret_cast<Vector*>(static_cast<T*>(p.v_pool) + to) = *reinterpret_cast<const Vector*>(v);
    }
  }

  // To e4m3, a warp for each (token, KV head). The scale is that of the chunk's first token, which is a row of this step
  // or has stored it.
  __device__ static void narrow(const Params& p) {
    const Header& header = *reinterpret_cast<const Header*>(p.plan);
    const int* write_slot = p.plan + header.at_write_slot;
    const int* write_offset = p.plan + header.at_write_offset;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int warps = static_cast<int>(gridDim.x) * (kThreads / kLanes);
    const int first_warp = static_cast<int>(blockIdx.x) * (kThreads / kLanes) + static_cast<int>(threadIdx.x) / kLanes;
    const i64 num_tasks = static_cast<i64>(header.num_rows) * p.num_kv_heads;
    for (i64 task = first_warp; task < num_tasks; task += warps) {
      const int head = static_cast<int>(task % p.num_kv_heads);
      const int token = static_cast<int>(task / p.num_kv_heads);
      const i64 slot = write_slot[token];
      if (slot < 0) continue;
      const int offset = write_offset[token];
      const int opener = token - offset;
      const bool is_here = opener >= 0 && write_slot[opener] == slot && write_offset[opener] == 0;
      const i64 of_chunk = slot * p.num_kv_heads + head;
      const i64 to = (of_chunk * p.chunk_size + offset) * D;
      const T* k = static_cast<const T*>(p.q) + head * p.q_head_stride;
      const T* v = static_cast<const T*>(p.v_new) + head * p.v_head_stride;
      narrow_row(k + token * p.q_token_stride, k + opener * p.q_token_stride, is_here, offset == 0, p.k_scale + of_chunk,
                 static_cast<unsigned char*>(p.k_pool) + to, lane);
      narrow_row(v + token * p.v_token_stride, v + opener * p.v_token_stride, is_here, offset == 0, p.v_scale + of_chunk,
                 static_cast<unsigned char*>(p.v_pool) + to, lane);
    }
  }

  __device__ static void narrow_row(const T* row, const T* opener, bool is_here, bool opens, float* scale_at,
                                    unsigned char* to, int lane) {
    float scale;
    if (is_here) {
      float top = 0.0f;
      for (int d = lane; d < D; d += kLanes) top = fmaxf(top, fabsf(value_of(opener[d])));
      for (int mask = 16; mask > 0; mask /= 2) top = fmaxf(top, shuffle_xor(top, mask));
      scale = first_token_scale(top);
    } else {
      scale = *scale_at;
    }
    if (opens && lane == 0) *scale_at = scale;
    for (int d = lane * 4; d < D; d += kLanes * 4) {
      u32 word = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) word |= float_to_e4m3(value_of(row[d + i]) / scale) << 8 * i;
      *reinterpret_cast<u32*>(to + d) = word;
    }
  }
};

}  // namespace tpp

#ifndef TPP_HOST
// TPP_VALUE, TPP_KV_VALUE, TPP_HEAD_DIM and TPP_SHARED_LIMIT come from the command line.
using Value = TPP_VALUE;
using KvValue = TPP_KV_VALUE;
using SegmentKernel = tpp::Segment<Value, KvValue, TPP_HEAD_DIM, TPP_SHARED_LIMIT>;

// Read by the host: threads per block and bytes of dynamic shared memory of tpp_segment.
extern "C" __device__ const int tpp_segment_shape[2] = {SegmentKernel::kThreads, SegmentKernel::kSharedBytes};

extern "C" __global__ void
    __launch_bounds__(SegmentKernel::kThreads, SegmentKernel::kBlocks) tpp_segment(const __grid_constant__ Params p) {
  SegmentKernel::run(p);
}
extern "C" __global__ void __launch_bounds__(128) tpp_merge(const __grid_constant__ Params p) {
  tpp::Merge<Value, TPP_HEAD_DIM>::run(p);
}
extern "C" __global__ void __launch_bounds__(128) tpp_append(const __grid_constant__ Params p) {
  tpp::Append<Value, KvValue, TPP_HEAD_DIM>::run(p);
}
#endif
