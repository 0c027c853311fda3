// Products with packed weights, compiled once per instruction-set level: see linear_cpu_kernels.h for the layouts.
#include "linear_cpu_kernels.h"

#include "linear_cpu_vec.h"
#if CHUNKSERVE_ISA_LEVEL == 4
#include "amx_cpu.h"
#endif

namespace chunkserve::CHUNKSERVE_ISA {
namespace {

constexpr int kVectors = kLinearPanel / kWidth;  // of one panel

// Blocks of K; one, empty, for K = 0, so that there is a sum.
constexpr long blocks_of(long k) { return k > 0 ? (k + kLinearBlockK - 1) / kLinearBlockK : 1; }

// Tile heights. Accumulators must fit the registers beside a few operands, with one to spare for GCC 12, and there must
// be enough of them to hide the latency of a multiply-add (8 on current x86): few rows take two panels at once.
#if CHUNKSERVE_ISA_LEVEL >= 2
constexpr int kMaxRowsF32 = 12;
#if CHUNKSERVE_ISA_LEVEL == 4
constexpr int kMaxRowsBf16 = 2 * kAmxRows;
#else
constexpr int kMaxRowsBf16 = 12;
#endif
constexpr int kMaxRowsWide = 12;
#elif CHUNKSERVE_ISA_LEVEL == 1
constexpr int kMaxRowsF32 = 6;
constexpr int kMaxRowsBf16 = 5;
constexpr int kMaxRowsWide = 2;
#else
constexpr int kMaxRowsF32 = 2;
constexpr int kMaxRowsBf16 = 2;
constexpr int kMaxRowsWide = 0;
#endif

// How one pair of neighbours in K is multiplied: kSteps operands per column vector, each from weight word and x.
//
// In fp32, one neighbour after the other.
struct ByFloats {
  using X = float;
  static constexpr int kSteps = 2;
  static CHUNKSERVE_INLINE Vec x(const float* row, long pair, int step) { return Level::set(row[2 * pair + step]); }
  static CHUNKSERVE_INLINE void multiply_add(Vec x, Vec w, Vec& acc) { fma_into(acc, x, w); }
};

struct F32 : ByFloats {
  static constexpr int kMaxRows = kMaxRowsF32;
  static constexpr int kPairBytes = kLinearPanel * 8;
  static constexpr bool kReload = false;
  static CHUNKSERVE_INLINE Vec weight(const char* pair, int vector, int step) {
    return Level::load(reinterpret_cast<const float*>(pair) + step * kLinearPanel + vector * kWidth);
  }
};

#if CHUNKSERVE_ISA_LEVEL < 3
struct Bf16Widened : ByFloats {
  static constexpr int kMaxRows = kMaxRowsBf16;
  static constexpr int kPairBytes = kLinearPanel * 4;
  static constexpr bool kReload = true;
  static CHUNKSERVE_INLINE Vec weight(const char* pair, int vector, int step) {
    const VecU32 word = (VecU32)Level::load_bits(pair + vector * kWidth * 4);
    return (Vec)(step == 0 ? word << 16 : word & 0xffff0000u);
  }
};
#endif

struct Int8Widened : ByFloats {
  static constexpr int kMaxRows = kMaxRowsF32;
  static constexpr int kPairBytes = kLinearPanel * 2;
  static constexpr bool kReload = false;
  static CHUNKSERVE_INLINE Vec weight(const char* pair, int vector, int step) {
    return load_i8(pair + step * kLinearPanel + vector * kWidth);
  }
};

#if CHUNKSERVE_ISA_LEVEL == 3
struct Bf16Dot {
  using X = Bf16;
  static constexpr int kMaxRows = kMaxRowsBf16;
  static constexpr int kSteps = 1;
  static constexpr int kPairBytes = kLinearPanel * 4;
  static constexpr bool kReload = false;
  static CHUNKSERVE_INLINE Vec weight(const char* pair, int vector, int) {
    return (Vec)Level::load_bits(pair + vector * kWidth * 4);
  }
  static CHUNKSERVE_INLINE Vec x(const Bf16* row, long pair, int) {
    return Level::set(*reinterpret_cast<const float*>(row + 2 * pair));
  }
  static CHUNKSERVE_INLINE void multiply_add(Vec x, Vec w, Vec& acc) {
    acc = (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)w);
  }
};
#endif

// What a tile fetches for the work after it: of each panel, `step` bytes more with each pair.
struct Ahead {
  const char* weight;
  long step;
};

// acc [Rows, Panels * 16] += x [Rows, kLinearBlockK] times the first num_pairs pairs of the panels.
template <class Math, int Rows, int Panels>
void multiply_tile(const void* packed_x, const char* weight, long panel_bytes, long num_pairs, bool first, Ahead ahead,
                   float* acc_out) {
  constexpr int kColumns = Panels * kVectors;
  const auto* x = static_cast<const typename Math::X*>(packed_x);
  Vec acc[Rows][kColumns];
  CHUNKSERVE_UNROLL for (int r = 0; r < Rows; ++r) {
    CHUNKSERVE_UNROLL for (int c = 0; c < kColumns; ++c) {
      acc[r][c] = first ? Vec{} : load(acc_out + (r * kColumns + c) * kWidth);
    }
  }
  for (long pair = 0; pair < num_pairs; ++pair) {
    CHUNKSERVE_UNROLL for (int p = 0; p < Panels; ++p) {
      CHUNKSERVE_UNROLL for (int line = 0; line < Math::kPairBytes; line += 64) {
        __builtin_prefetch(ahead.weight + p * panel_bytes + line);
      }
    }
    CHUNKSERVE_UNROLL for (int step = 0; step < Math::kSteps; ++step) {
      // Loading the words anew for the second step is cheaper than the registers to keep them.
      if (Math::kReload && step == 1) asm("" : "+r"(weight));
      if constexpr (Rows < kColumns) {
        Vec xs[Rows];
        CHUNKSERVE_UNROLL for (int r = 0; r < Rows; ++r) xs[r] = Math::x(x + r * kLinearBlockK, pair, step);
        CHUNKSERVE_UNROLL for (int c = 0; c < kColumns; ++c) {
          const Vec w = Math::weight(weight + c / kVectors * panel_bytes, c % kVectors, step);
          CHUNKSERVE_UNROLL for (int r = 0; r < Rows; ++r) Math::multiply_add(xs[r], w, acc[r][c]);
        }
      } else {
        Vec ws[kColumns];
        CHUNKSERVE_UNROLL for (int c = 0; c < kColumns; ++c) {
          ws[c] = Math::weight(weight + c / kVectors * panel_bytes, c % kVectors, step);
        }
        CHUNKSERVE_UNROLL for (int r = 0; r < Rows; ++r) {
          asm volatile("" ::: "memory");  // a broadcast stays beside its use: GCC runs out of registers otherwise
          const Vec xr = Math::x(x + r * kLinearBlockK, pair, step);
          CHUNKSERVE_UNROLL for (int c = 0; c < kColumns; ++c) Math::multiply_add(xr, ws[c], acc[r][c]);
        }
      }
    }
    weight += Math::kPairBytes;
    ahead.weight += ahead.step;
  }
  CHUNKSERVE_UNROLL for (int r = 0; r < Rows; ++r) {
    CHUNKSERVE_UNROLL for (int c = 0; c < kColumns; ++c) store(acc_out + (r * kColumns + c) * kWidth, acc[r][c]);
  }
}

using Tile = void (*)(const void*, const char*, long, long, bool, Ahead, float*);

template <class Math, int Panels, int MaxRows>
struct Tiles {
  Tile of_rows[MaxRows + 1] = {};
  constexpr Tiles() { fill<1>(); }

 private:
  template <int Rows>
  constexpr void fill() {
    if constexpr (Rows <= MaxRows) {
      of_rows[Rows] = &multiply_tile<Math, Rows, Panels>;
      fill<Rows + 1>();
    }
  }
};

template <class Math>
constexpr Tiles<Math, 1, Math::kMaxRows> kNarrow{};
template <class Math>
constexpr Tiles<Math, 2, kMaxRowsWide> kWide{};

template <class Out>
void finish(const LinearJob& job, const float* acc, long stride, long first_column) {
  const long columns = job.n - first_column < stride ? job.n - first_column : stride;
  for (long r = 0; r < job.num_rows; ++r) {
    Out* out = static_cast<Out*>(job.out) + r * job.n + first_column;
    const float* row = acc + r * stride;
    const float* scale = job.scale ? job.scale + first_column : nullptr;
    const float* bias = job.bias ? job.bias + first_column : nullptr;
    for_vectors(columns, [&](auto load_at, auto store_at) {
      Vec y = load_at(row);
      if (scale) y *= load_at(scale);
      if (bias) y += load_at(bias);
      store_at(out, y);
    });
  }
}

void finish_any(const LinearJob& job, const float* acc, long stride, long first_column) {
  if (job.out_dtype == DType::f32) {
    finish<float>(job, acc, stride, first_column);
  } else {
    finish<Bf16>(job, acc, stride, first_column);
  }
}

template <class Math>
void multiply(const LinearJob& job, int num_tiles, long first, long last) {
  alignas(64) float acc[kLinearMaxRows * 2 * kLinearPanel];
  constexpr long kBlockBytes = kLinearBlockK / 2 * Math::kPairBytes;
  constexpr long kStreamBytes = 1024;
  const long panel_bytes = (job.k + 1) / 2 * Math::kPairBytes;
  const long num_blocks = blocks_of(job.k);
  const long tallest = (job.num_rows + num_tiles - 1) / num_tiles;
  const auto* x = static_cast<const typename Math::X*>(static_cast<const void*>(job.packed_x));
  for (long panel = first; panel < last;) {
    const int panels = tallest <= kMaxRowsWide && last - panel >= 2 ? 2 : 1;
    const Tile* tiles = panels == 2 ? kWide<Math>.of_rows : kNarrow<Math>.of_rows;
    const char* weight = static_cast<const char*>(job.weight) + panel * panel_bytes;
    const long stride = panels * kLinearPanel;
    for (long block = 0; block < num_blocks; ++block) {
      const long rest = job.k - block * kLinearBlockK;
      const long pairs = ((rest < kLinearBlockK ? rest : kLinearBlockK) + 1) / 2;
      const char* block_weight = weight + block * kBlockBytes;
      const char* next_weight = block + 1 < num_blocks ? block_weight + kBlockBytes : weight + panels * panel_bytes;
      for (int tile = 0; tile < num_tiles; ++tile) {
        const long row = tile * job.num_rows / num_tiles;
        const long rows = (tile + 1) * job.num_rows / num_tiles - row;
        // One tile streams the weights; several share the fetching of the next block.
        const long step = (Math::kPairBytes + num_tiles - 1) / num_tiles;
        const Ahead ahead{num_tiles == 1 ? block_weight + kStreamBytes : next_weight + tile * pairs * step, step};
        tiles[rows](x + (row * num_blocks + block * rows) * kLinearBlockK, block_weight, panel_bytes, pairs, block == 0,
                    ahead, acc + row * stride);
      }
    }
    finish_any(job, acc, stride, panel * kLinearPanel);
    panel += panels;
  }
}

#if CHUNKSERVE_ISA_LEVEL == 4
// A panel's 16 pairs of K are a tile as they lie there, and so are 16 rows of 32 values of x.
constexpr long kTileBytes = kAmxPairs * 64;

// sums [rows, Panels * 16] = x [rows, K] times panels. With Tall there are more than 16 rows, and at most two panels.
template <bool Tall, int Panels>
void multiply_tiles(const Bf16* x, long x_block, const char* weight, long panel_bytes, long num_pairs,
                    const char* last_pairs, float* sums, long stride) {
  static_assert(Panels <= (Tall ? 2 : 4));
  constexpr long kRowBytes = kLinearBlockK * sizeof(Bf16);
  constexpr long kPairsPerBlock = kLinearBlockK / 2;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long pair = 0; pair < num_pairs; pair += kAmxPairs) {
    const Bf16* at = x + pair / kPairsPerBlock * x_block + pair % kPairsPerBlock * 2;
    const bool whole = pair + kAmxPairs <= num_pairs;
    const char* w = whole ? weight + pair * kLinearPanel * 4 : last_pairs;
    const long step = whole ? panel_bytes : kTileBytes;
    _tile_loadd(4, at, kRowBytes);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Panels > 1) {
      _tile_loadd(7, w + step, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (Tall) {
      _tile_loadd(5, at + kAmxRows * kLinearBlockK, kRowBytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (Panels > 1) _tile_dpbf16ps(3, 5, 7);
    }
    if constexpr (Panels > 2) {
      _tile_loadd(6, w + 2 * step, 64);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (Panels > 3) {
      _tile_loadd(7, w + 3 * step, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, sums, stride * 4);
  if constexpr (Panels > 1) _tile_stored(1, sums + kLinearPanel, stride * 4);
  if constexpr (Tall) _tile_stored(2, sums + kAmxRows * stride, stride * 4);
  if constexpr (Tall && Panels > 1) _tile_stored(3, sums + kAmxRows * stride + kLinearPanel, stride * 4);
  if constexpr (Panels > 2) _tile_stored(2, sums + 2 * kLinearPanel, stride * 4);
  if constexpr (Panels > 3) _tile_stored(3, sums + 3 * kLinearPanel, stride * 4);
}

void multiply_bf16(const LinearJob& job, int num_tiles, long first, long last) {
  alignas(64) float acc[kLinearMaxRows * 2 * kLinearPanel];
  alignas(64) char last_pairs[4 * kTileBytes];
  using Tiles = decltype(&multiply_tiles<false, 1>);
  constexpr Tiles kFlat[] = {nullptr, &multiply_tiles<false, 1>, &multiply_tiles<false, 2>, &multiply_tiles<false, 3>,
                             &multiply_tiles<false, 4>};
  constexpr Tiles kTall[] = {nullptr, &multiply_tiles<true, 1>, &multiply_tiles<true, 2>};
  const long num_pairs = (job.k + 1) / 2, panel_bytes = num_pairs * kLinearPanel * 4;
  const long num_blocks = blocks_of(job.k);
  const long tallest = (job.num_rows + num_tiles - 1) / num_tiles;
  const long rest_bytes = num_pairs % kAmxPairs * kLinearPanel * 4;
  const auto* x = static_cast<const Bf16*>(static_cast<const void*>(job.packed_x));
  AmxTiles registers;
  for (long panel = first; panel < last;) {
    const long most = tallest > kAmxRows ? 2 : 4;
    const long panels = last - panel < most ? last - panel : most;
    const char* weight = static_cast<const char*>(job.weight) + panel * panel_bytes;
    const long stride = panels * kLinearPanel;
    if (rest_bytes) {
      __builtin_memset(last_pairs, 0, sizeof(last_pairs));
      for (long p = 0; p < panels; ++p) {
        __builtin_memcpy(last_pairs + p * kTileBytes, weight + (p + 1) * panel_bytes - rest_bytes,
                         static_cast<unsigned long>(rest_bytes));
      }
    }
    for (int tile = 0; tile < num_tiles; ++tile) {
      const long row = tile * job.num_rows / num_tiles;
      const long rows = (tile + 1) * job.num_rows / num_tiles - row;
      const int upper = static_cast<int>(rows < kAmxRows ? rows : kAmxRows);
      registers.configure(upper, rows > kAmxRows ? static_cast<int>(rows) - kAmxRows : upper);
      (rows > kAmxRows ? kTall : kFlat)[panels](x + row * num_blocks * kLinearBlockK, rows * kLinearBlockK, weight,
                                                panel_bytes, num_pairs, last_pairs, acc + row * stride, stride);
    }
    finish_any(job, acc, stride, panel * kLinearPanel);
    panel += panels;
  }
}
#endif

template <class In, class Out>
void pack_rows(const LinearJob& job, int tile, int num_tiles) {
  const long first = tile * job.num_rows / num_tiles;
  const long rows = (tile + 1) * job.num_rows / num_tiles - first;
  const long num_blocks = blocks_of(job.k);
  for (long block = 0; block < num_blocks; ++block) {
    const long rest = job.k - block * kLinearBlockK;
    const long count = rest < kLinearBlockK ? rest : kLinearBlockK;
    for (long r = 0; r < rows; ++r) {
      const In* in = static_cast<const In*>(job.x) + (first + r) * job.k + block * kLinearBlockK;
      Out* out = static_cast<Out*>(static_cast<void*>(job.packed_x)) +
                 (first * num_blocks + block * rows + r) * kLinearBlockK;
      if constexpr (sizeof(In) == sizeof(Out)) {
        __builtin_memcpy(out, in, static_cast<unsigned long>(count) * sizeof(In));
      } else {
        for_vectors(count, [&](auto load_at, auto store_at) { store_at(out, load_at(in)); });
      }
      constexpr long kMultiple = sizeof(Out) == sizeof(Bf16) ? 32 : 2;
      for (long i = count; i % kMultiple; ++i) out[i] = Out{};
    }
  }
}

void pack_tile(const LinearJob& job, int tile, int num_tiles) {
  const bool narrow = CHUNKSERVE_ISA_LEVEL >= 3 && job.weight_dtype == DType::bf16;
  if (job.x_dtype == DType::f32) {
    narrow ? pack_rows<float, Bf16>(job, tile, num_tiles) : pack_rows<float, float>(job, tile, num_tiles);
  } else {
    narrow ? pack_rows<Bf16, Bf16>(job, tile, num_tiles) : pack_rows<Bf16, float>(job, tile, num_tiles);
  }
}

void multiply_any(const LinearJob& job, int num_tiles, long first, long last) {
  if (job.weight_dtype == DType::f32) return multiply<F32>(job, num_tiles, first, last);
  if (job.weight_dtype == DType::i8) return multiply<Int8Widened>(job, num_tiles, first, last);
#if CHUNKSERVE_ISA_LEVEL == 4
  multiply_bf16(job, num_tiles, first, last);
#elif CHUNKSERVE_ISA_LEVEL == 3
  multiply<Bf16Dot>(job, num_tiles, first, last);
#else
  multiply<Bf16Widened>(job, num_tiles, first, last);
#endif
}

}  // namespace

const LinearKernels linear_kernels{kMaxRowsF32, kMaxRowsBf16, &pack_tile, &multiply_any};

}  // namespace chunkserve::CHUNKSERVE_ISA
