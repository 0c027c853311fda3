// Products of few rows with a tile of the pool: c[R][N] = rescale[r] * c + a[R][depth] b[depth][N]; the old c is not read
// where `rescale` is null. Include only from ISA sources (isa.h).
#pragma once

#include "attention_cpu.h"
#include "simd.h"
#if CHUNKSERVE_ISA_LEVEL == 4
#include "amx_cpu.h"
#endif

namespace chunkserve::CHUNKSERVE_ISA {
namespace {

CHUNKSERVE_INLINE int min_int(int a, int b) { return a < b ? a : b; }
CHUNKSERVE_INLINE int max_int(int a, int b) { return a > b ? a : b; }

// Memory that the next block of keys lies in. The products ask for it line by line while they compute: private chunks
// are read once, and a burst of requests before or after would leave the memory idle in between.
struct Prefetch {
  const char* at;
  int bytes;

  CHUNKSERVE_INLINE Prefetch part(int index, int parts) const {
    return {at + static_cast<std::int64_t>(bytes) * index / parts, bytes / parts};
  }
};

// Lines to ask for per step: as many as are read where rows are few, one where they are many and share the asking.
template <int W, int R, int NV>
constexpr int prefetches() {
  constexpr int kRead = W * NV * 4 / 64;
  return kRead < 1 ? 1 : R <= 3 ? kRead : kRead > 2 ? 2 : 1;
}

// Into the second level of the cache. Where AVX-512 multiplies many rows, into the first, which is faster there; few rows
// lose by it (kernels/README.md).
template <int R>
CHUNKSERVE_INLINE void prefetch_line(const char* p) {
  __builtin_prefetch(p, 0, R > 3 && CHUNKSERVE_ISA_LEVEL >= 2 ? 3 : 2);
}

template <int W, int R, int NV>
CHUNKSERVE_INLINE void prefetch_lines(const char* p) {
#pragma GCC unroll 4
  for (int i = 0; i < prefetches<W, R, NV>(); ++i) prefetch_line<R>(p + i * 64);
}

// Operands of a product: A as floats, B as `Tile` stores it.
template <class Tile>
struct FloatProduct {
  using A = float;
  using B = typename Tile::Element;
  static constexpr int kRows = kTileRows;
  static constexpr bool kPairs = false;
  static constexpr int kStep = Tile::kStep;
  // What a tile's values are short of, besides the scale of its chunk; 0 for none of both.
  static constexpr float kFactor = [] {
    if constexpr (requires { Tile::kFactor; }) return Tile::kFactor;
    return 0.0f;
  }();

  template <int W, int R, int NV, int LDA>
  static CHUNKSERVE_INLINE void multiply(const A* a, const B* b, int ldb, int depth, Prefetch next,
                                         typename Simd<W>::F (&acc)[R][NV]) {
    const int steps = depth / kStep;
    const int stride = (next.bytes + steps) / max_int(steps, 1);
    for (int s = 0; s < steps; ++s) {
      prefetch_lines<W, R, NV>(next.at + s * stride);
      step<W, R, NV, LDA, kStep>(a + s * kStep, b + s * ldb, acc);
    }
    // An odd number of tokens: the other half of the pair was never written and may be NaN.
    if constexpr (kStep == 2) {
      if (depth & 1) step<W, R, NV, LDA, 1>(a + steps * kStep, b + steps * ldb, acc);
    }
  }

  template <int W, int R, int NV, int LDA, int J>
  static CHUNKSERVE_INLINE void step(const A* a, const B* b, typename Simd<W>::F (&acc)[R][NV]) {
#pragma GCC unroll 2
    for (int j = 0; j < J; ++j) {
      typename Simd<W>::F bv[NV];
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) bv[v] = Tile::template load<W>(b + v * W * kStep, j);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const typename Simd<W>::F av = Simd<W>::set(a[r * LDA + j]);
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) acc[r][v] += av * bv[v];
      }
    }
  }
};

#if CHUNKSERVE_ISA_LEVEL >= 3
// Both operands as pairs of bf16, products and sums in fp32.
struct PairProduct {
  using A = std::int32_t;  // a pair
  using B = std::uint16_t;
  static constexpr int kRows = kTileRows;
  static constexpr bool kPairs = true;
  static constexpr int kStep = 2;
  static constexpr float kFactor = 0.0f;
};

struct Bf16Product : PairProduct {
  template <int W, int R, int NV, int LDA>
  static CHUNKSERVE_INLINE void multiply(const A* a, const B* b, int ldb, int depth, Prefetch next,
                                         typename Simd<W>::F (&acc)[R][NV]) {
    const int steps = depth / kStep;
    const int stride = (next.bytes + steps) / max_int(steps, 1);
    for (int s = 0; s < steps; ++s) {
      prefetch_lines<W, R, NV>(next.at + s * stride);
      step<W, R, NV, LDA>(a + s, b + s * ldb, -1, acc);
    }
    if (depth & 1) step<W, R, NV, LDA>(a + steps, b + steps * ldb, 0xffff, acc);
  }

  template <int W, int R, int NV, int LDA>
  static CHUNKSERVE_INLINE void step(const A* a, const B* b, std::int32_t mask, typename Simd<W>::F (&acc)[R][NV]) {
    typename Simd<W>::I bv[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) bv[v] = Simd<W>::load_bits(b + v * W * kStep) & mask;
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const typename Simd<W>::I av = typename Simd<W>::I{} + a[r * LDA];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[r][v] = dot<W>(acc[r][v], av, bv[v]);
    }
  }

  template <int W>
  static CHUNKSERVE_INLINE typename Simd<W>::F dot(typename Simd<W>::F acc, typename Simd<W>::I a,
                                                   typename Simd<W>::I b) {
    if constexpr (W == 16) {
      return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
    } else {
      return _mm256_dpbf16_ps(acc, (__m256bh)a, (__m256bh)b);
    }
  }
};
#endif

#if CHUNKSERVE_ISA_LEVEL == 4
// On AMX tiles, for head dims that are multiples of 16.
struct AmxProduct : PairProduct {
  static constexpr int kRows = kAmxRows;

  // c[rows][n] (+)= a[rows][depth] b[depth][n]; ldb counts elements as elsewhere, n is a multiple of 16 up to 64, and
  // a's rows are zero from `depth` up to a multiple of 32. What lies in b beyond `depth` is not looked at.
  static void multiply(const A* a, int lda, const B* b, int ldb, int depth, int n, float* c, int ldc, bool adds,
                       Prefetch next) {
    const int pairs = (depth + 1) / 2, tiles = n / kAmxRows;
    alignas(64) std::uint16_t rest[kAmxPairs * kPanel * 2];
// Registers are named by literals. F(sum, right): up to four sums of 16 columns, the right operands by turns.
#define CHUNKSERVE_EACH_TILE(F)  \
  do {                           \
    F(0, 6);                     \
    if (tiles > 1) F(1, 7);      \
    if (tiles > 2) F(2, 6);      \
    if (tiles > 3) F(3, 7);      \
  } while (0)
#define CHUNKSERVE_LOAD(T, RIGHT) _tile_loadd(T, c + T * kAmxRows, ldc * 4)
#define CHUNKSERVE_ZERO(T, RIGHT) _tile_zero(T)
#define CHUNKSERVE_STORE(T, RIGHT) _tile_stored(T, c + T * kAmxRows, ldc * 4)
#define CHUNKSERVE_MULTIPLY(T, RIGHT)                              \
  do {                                                             \
    _tile_loadd(RIGHT, right + T * kAmxRows * 2, stride);          \
    line = prefetch(line, part.at + part.bytes * (T + 1) / tiles); \
    _tile_dpbf16ps(T, 4, RIGHT);                                   \
  } while (0)
    if (adds) {
      CHUNKSERVE_EACH_TILE(CHUNKSERVE_LOAD);
    } else {
      CHUNKSERVE_EACH_TILE(CHUNKSERVE_ZERO);
    }
    const int steps = (pairs + kAmxPairs - 1) / kAmxPairs;
    for (int step = 0; step < steps; ++step) {
      const int first = step * kAmxPairs;
      const B* right = b + first * ldb;
      if (pairs - first < kAmxPairs || (depth & 1 && step == steps - 1)) {
        copy_pairs(right, ldb, depth - 2 * first, n, rest);
        right = rest;
      }
      const Prefetch part = next.part(step, steps);
      const char* line = part.at;
      const int stride = right == rest ? n * 4 : ldb * 2;
      _tile_loadd(4, a + first, lda * 4);
      CHUNKSERVE_EACH_TILE(CHUNKSERVE_MULTIPLY);
    }
    CHUNKSERVE_EACH_TILE(CHUNKSERVE_STORE);
#undef CHUNKSERVE_EACH_TILE
#undef CHUNKSERVE_LOAD
#undef CHUNKSERVE_ZERO
#undef CHUNKSERVE_STORE
#undef CHUNKSERVE_MULTIPLY
  }

 private:
  static CHUNKSERVE_INLINE const char* prefetch(const char* line, const char* end) {
    for (; line < end; line += 64) prefetch_line<kRows>(line);
    return line;
  }

  // The last pairs of b, `depth` values of each of n columns, filled up with zeros.
  static void copy_pairs(const B* b, int ldb, int depth, int n, std::uint16_t* out) {
    for (int pair = 0; pair < kAmxPairs; ++pair) {
      std::uint16_t* row = out + pair * n * 2;
      if (2 * pair + 1 < depth) {
        __builtin_memcpy(row, b + pair * ldb, static_cast<unsigned long>(n) * 4);
        continue;
      }
      for (int i = 0; i < n; ++i) {
        row[2 * i] = 2 * pair < depth ? b[pair * ldb + 2 * i] : std::uint16_t{0};
        row[2 * i + 1] = 0;
      }
    }
  }
};

// What AmxProduct computes, bit by bit, on vectors, which read a few rows' keys from memory faster than tiles do. With
// denormals as zeros, as tiles have them (see DenormalsAreZero).
struct AmxOrderProduct : PairProduct {
  template <int W, int R, int NV, int LDA>
  static CHUNKSERVE_INLINE void multiply(const A* a, const B* b, int ldb, int depth, Prefetch next,
                                         typename Simd<W>::F (&acc)[R][NV]) {
    using F = typename Simd<W>::F;
    const int pairs = depth / 2;
    const int stride = (next.bytes + pairs) / max_int(pairs, 1);
    for (int first = 0; first < depth; first += 2 * kAmxPairs) {
      F even[R][NV] = {}, odd[R][NV] = {};
      const int last = min_int(first / 2 + kAmxPairs, pairs);
      for (int s = first / 2; s < last; ++s) {
        prefetch_lines<W, R, NV>(next.at + s * stride);
        add<W, R, NV, LDA, 0>(a + s, b + s * ldb, even);
        add<W, R, NV, LDA, 1>(a + s, b + s * ldb, odd);
      }
      // The other half of a last pair was never written and may be NaN.
      if (2 * last < depth && last < first / 2 + kAmxPairs) add<W, R, NV, LDA, 0>(a + last, b + last * ldb, even);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) acc[r][v] += even[r][v] + odd[r][v];
      }
    }
  }

  template <int W, int R, int NV, int LDA, int Half>
  static CHUNKSERVE_INLINE void add(const A* a, const B* b, typename Simd<W>::F (&sums)[R][NV]) {
    using F = typename Simd<W>::F;
    F bv[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) bv[v] = TileBf16::load<W>(b + v * W * kStep, Half);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const auto bits = static_cast<std::uint32_t>(a[r * LDA]);
      const F av = Simd<W>::set(bits_to_float(Half == 0 ? bits << 16 : bits & 0xffff0000u));
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sums[r][v] += av * bv[v];
    }
  }
};

// For as long as it lives, in this thread.
class DenormalsAreZero {
 public:
  DenormalsAreZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  DenormalsAreZero(const DenormalsAreZero&) = delete;
  ~DenormalsAreZero() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};
#endif

template <class Product, int R, int W, int NV, int LDA>
CHUNKSERVE_INLINE void tile(const typename Product::A* a, const typename Product::B* b, int ldb, int depth, float* c,
                            int ldc, const float* rescale, Prefetch next) {
  using S = Simd<W>;
  typename S::F acc[R][NV];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      acc[r][v] = rescale ? S::load(c + r * ldc + v * W) * rescale[r] : S::set(0.0f);
    }
  }
  Product::template multiply<W, R, NV, LDA>(a, b, ldb, depth, next, acc);
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) S::store(c + r * ldc + v * W, acc[r][v]);
  }
}

// Vectors of columns per tile: enough sums to hide the latency of a multiply-add, few enough for the registers.
constexpr int tile_vectors(int rows) {
  if (kNumRegisters == 32) return 4;
  return rows == 1 ? 8 : rows <= 3 ? 4 : 2;
}

template <class Product, int LDA>
using GemmRows = void (*)(const typename Product::A* a, const typename Product::B* b, int ldb, int depth, int n,
                          float* c, int ldc, const float* rescale, Prefetch next);

template <class Product, int LDA, int R>
__attribute__((noinline)) void gemm_rows(const typename Product::A* a, const typename Product::B* b, int ldb,
                                         int depth, int n, float* c, int ldc, const float* rescale,
                                         Prefetch next) {
  constexpr int W = kWidth;
  constexpr int kVectors = tile_vectors(R);
  constexpr int kStep = Product::kStep;
  int col = 0;
  // The last columns ask again for what the column before them asked for; rare, and hits the cache.
  const int parts = max_int(n / (W * kVectors), 1);
  for (; col + W * kVectors <= n; col += W * kVectors) {
    tile<Product, R, W, kVectors, LDA>(a, b + col * kStep, ldb, depth, c + col, ldc, rescale,
                                       next.part(col / (W * kVectors), parts));
  }
  if constexpr (kVectors > 2) {
    for (; col + W * 2 <= n; col += W * 2) {
      tile<Product, R, W, 2, LDA>(a, b + col * kStep, ldb, depth, c + col, ldc, rescale, next.part(0, parts));
    }
  }
  for (; col + W <= n; col += W) {
    tile<Product, R, W, 1, LDA>(a, b + col * kStep, ldb, depth, c + col, ldc, rescale, next.part(0, parts));
  }
  if constexpr (W == 16) {
    if (col < n) {
      tile<Product, R, 8, 1, LDA>(a, b + col * kStep, ldb, depth, c + col, ldc, rescale, next.part(0, parts));
    }
  }
}

template <class Product, int LDA>
constexpr GemmRows<Product, LDA> kGemmRows[kTileRows] = {
    gemm_rows<Product, LDA, 1>, gemm_rows<Product, LDA, 2>, gemm_rows<Product, LDA, 3>,
    gemm_rows<Product, LDA, 4>, gemm_rows<Product, LDA, 5>, gemm_rows<Product, LDA, 6>,
};

// Products of up to Product::kRows rows, as above; a is [rows][LDA].
template <class Product>
struct Gemm {
  // Whether a product multiplies the old c; else it is added to as it is, where `rescale` is not null.
  static constexpr bool kRescales = true;

  template <int LDA>
  CHUNKSERVE_INLINE void multiply(int rows, const typename Product::A* a, const typename Product::B* b, int ldb,
                                  int depth, int n, float* c, int ldc, const float* rescale, Prefetch next) {
    kGemmRows<Product, LDA>[rows - 1](a, b, ldb, depth, n, c, ldc, rescale, next);
  }
};

#if CHUNKSERVE_ISA_LEVEL == 4
template <>
struct Gemm<AmxProduct> {
  static constexpr bool kRescales = false;
  static constexpr int kFewRows = 3;
  AmxTiles registers{};
  DenormalsAreZero denormals{};

  template <int LDA>
  CHUNKSERVE_INLINE void multiply(int rows, const AmxProduct::A* a, const AmxProduct::B* b, int ldb, int depth, int n,
                                  float* c, int ldc, const float* rescale, Prefetch next) {
    if (rows <= kFewRows) {
      static constexpr float kOnes[kFewRows] = {1, 1, 1};
      return kGemmRows<AmxOrderProduct, LDA>[rows - 1](a, b, ldb, depth, n, c, ldc, rescale ? kOnes : nullptr, next);
    }
    registers.configure(rows, rows);
    AmxProduct::multiply(a, LDA, b, ldb, depth, n, c, ldc, rescale != nullptr, next);
  }
};
#endif

}  // namespace
}  // namespace chunkserve::CHUNKSERVE_ISA
