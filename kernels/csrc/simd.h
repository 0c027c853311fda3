// Vectors of the level that this source is compiled for, on GCC's vector extensions; include only from ISA sources.
#pragma once

#include <cstdint>

#if CHUNKSERVE_ISA_LEVEL >= 1
#include <immintrin.h>
#endif

namespace chunkserve::CHUNKSERVE_ISA {
namespace {

#if CHUNKSERVE_ISA_LEVEL >= 2
constexpr int kWidth = 16;
constexpr int kNumRegisters = 32;
#elif CHUNKSERVE_ISA_LEVEL == 1
constexpr int kWidth = 8;
constexpr int kNumRegisters = 16;
#else
constexpr int kWidth = 4;
constexpr int kNumRegisters = 16;
#endif

#define CHUNKSERVE_INLINE inline __attribute__((always_inline))

// GCC drops vector_size with a dependent size beside other attributes, hence no template.
template <int W>
struct VectorTypes;
#define CHUNKSERVE_VECTOR_TYPES(W)                                                     \
  template <>                                                                          \
  struct VectorTypes<W> {                                                              \
    typedef float F __attribute__((vector_size(W * 4)));                               \
    typedef std::int32_t I __attribute__((vector_size(W * 4)));                        \
    typedef float UnalignedF __attribute__((vector_size(W * 4), aligned(4)));          \
    typedef std::int32_t UnalignedI __attribute__((vector_size(W * 4), aligned(4)));   \
  }
CHUNKSERVE_VECTOR_TYPES(4);
CHUNKSERVE_VECTOR_TYPES(8);
CHUNKSERVE_VECTOR_TYPES(16);
#undef CHUNKSERVE_VECTOR_TYPES

// W floats, and what goes with them. Built with -fno-strict-aliasing.
template <int W>
struct Simd {
  using F = typename VectorTypes<W>::F;
  using I = typename VectorTypes<W>::I;
  using UnalignedF = typename VectorTypes<W>::UnalignedF;
  using UnalignedI = typename VectorTypes<W>::UnalignedI;

  static CHUNKSERVE_INLINE F load(const float* p) { return *reinterpret_cast<const UnalignedF*>(p); }
  static CHUNKSERVE_INLINE I load_bits(const void* p) { return *static_cast<const UnalignedI*>(p); }
  static CHUNKSERVE_INLINE void store(float* p, F x) { *reinterpret_cast<UnalignedF*>(p) = x; }
  static CHUNKSERVE_INLINE F set(float x) { return x - F{}; }  // an exact broadcast: x - 0 is x
  // b where either is NaN. GCC makes a compare and a blend of the expression.
  static CHUNKSERVE_INLINE F max(F a, F b) {
#if CHUNKSERVE_ISA_LEVEL >= 1
    if constexpr (W == 4) return (F)_mm_max_ps((__m128)a, (__m128)b);
    if constexpr (W == 8) return (F)_mm256_max_ps((__m256)a, (__m256)b);
#endif
#if CHUNKSERVE_ISA_LEVEL >= 2
    if constexpr (W == 16) return (F)_mm512_max_ps((__m512)a, (__m512)b);
#endif
    return a > b ? a : b;
  }

  // Lane i of the result is lane i ^ Half of x.
  template <int Half>
  static CHUNKSERVE_INLINE F swap_halves(F x) {
    I at;
    for (int i = 0; i < W; ++i) at[i] = i ^ Half;
    return __builtin_shuffle(x, at);
  }
  static CHUNKSERVE_INLINE float horizontal_max(F x) {
    if constexpr (W >= 16) x = max(x, swap_halves<8>(x));
    if constexpr (W >= 8) x = max(x, swap_halves<4>(x));
    x = max(x, swap_halves<2>(x));
    return max(x, swap_halves<1>(x))[0];
  }
  static CHUNKSERVE_INLINE float horizontal_sum(F x) {
    if constexpr (W >= 16) x += swap_halves<8>(x);
    if constexpr (W >= 8) x += swap_halves<4>(x);
    x += swap_halves<2>(x);
    return (x + swap_halves<1>(x))[0];
  }

  // 2^x for x <= 0; 0 below -126, where float would turn denormal. Relative error 1e-7.
  static CHUNKSERVE_INLINE F exp2(F x) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const I in_range = x >= -126.0f;
    const F near = max(x, set(-126.0f));
    const F shifted = near + kRound;
    const F f = near - (shifted - kRound);  // [-0.5, 0.5]
    F p = set(1.326472708e-3f);
    p = p * f + 9.671512862e-3f;
    p = p * f + 5.550733746e-2f;
    p = p * f + 2.402224208e-1f;
    p = p * f + 6.931469776e-1f;
    p = p * f + 1.0f;
    const I bits = reinterpret_cast<I>(p) + (reinterpret_cast<I>(shifted) << 23);
    return reinterpret_cast<F>(bits & in_range);
  }

  static CHUNKSERVE_INLINE F tanh(F x) {
    const F size = max(x, -x);
    const F e = exp2(size * -2.885390082f);  // e^(-2 |x|)
    const F large = (1.0f - e) / (1.0f + e);
    const F y = x * x;
    F p = set(-5.704977867e-3f);
    p = p * y + 2.063907900e-2f;
    p = p * y - 5.373971251e-2f;
    p = p * y + 1.333144217e-1f;
    p = p * y - 3.333328194e-1f;
    return size < 0.625f ? x + x * y * p : (x < 0.0f ? -large : large);
  }
};

CHUNKSERVE_INLINE float bits_to_float(std::uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

CHUNKSERVE_INLINE float from_bf16(std::uint16_t x) { return bits_to_float(static_cast<std::uint32_t>(x) << 16); }

// Rounds to nearest even; NaN stays NaN.
CHUNKSERVE_INLINE std::uint16_t to_bf16(float x) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if (x != x) return static_cast<std::uint16_t>((bits >> 16) | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

CHUNKSERVE_INLINE float from_f16(std::uint16_t x) {
  _Float16 h;
  __builtin_memcpy(&h, &x, 2);
  return static_cast<float>(h);
}

CHUNKSERVE_INLINE std::uint16_t to_f16(float x) {
  const _Float16 h = static_cast<_Float16>(x);
  std::uint16_t bits;
  __builtin_memcpy(&bits, &h, 2);
  return bits;
}

// How a tile stores its right operand: `kStep` consecutive values of the inner dimension lie side by side in a column.
struct TileF32 {
  using Element = float;
  static constexpr int kStep = 1;
  template <int W>
  static CHUNKSERVE_INLINE typename Simd<W>::F load(const float* p, int) {
    return Simd<W>::load(p);
  }
};

struct TileF16 {
  using Element = std::uint16_t;
  static constexpr int kStep = 1;
  template <int W>
  static CHUNKSERVE_INLINE typename Simd<W>::F load(const std::uint16_t* p, int) {
#if CHUNKSERVE_ISA_LEVEL >= 2
    if constexpr (W == 16) {
      return reinterpret_cast<typename Simd<W>::F>(
          _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
    }
#endif
#if CHUNKSERVE_ISA_LEVEL >= 1
    if constexpr (W == 8) {
      return reinterpret_cast<typename Simd<W>::F>(
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
    }
#endif
    typename Simd<W>::F x;
    for (int i = 0; i < W; ++i) x[i] = from_f16(p[i]);
    return x;
  }
};

// e4m3 without its scale: a byte whose exponent field is moved into that of f16 is the value divided by 256, denormals
// included. What e4m3 calls NaN comes out as 480.
struct TileF8 {
  using Element = std::uint8_t;
  static constexpr int kStep = 1;
  static constexpr float kFactor = 256.0f;
  template <int W>
  static CHUNKSERVE_INLINE typename Simd<W>::F load(const std::uint8_t* p, int) {
#if CHUNKSERVE_ISA_LEVEL >= 2
    if constexpr (W == 16) {
      const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
      const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8);
      const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7f)), 7);
      return reinterpret_cast<typename Simd<W>::F>(_mm512_cvtph_ps(_mm256_or_si256(sign, rest)));
    }
#endif
#if CHUNKSERVE_ISA_LEVEL >= 1
    if constexpr (W == 8) {
      const __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
      const __m128i sign = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x80)), 8);
      const __m128i rest = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x7f)), 7);
      return reinterpret_cast<typename Simd<W>::F>(_mm256_cvtph_ps(_mm_or_si128(sign, rest)));
    }
#endif
    typename Simd<W>::F x;
    for (int i = 0; i < W; ++i) {
      x[i] = from_f16(static_cast<std::uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7));
    }
    return x;
  }
};

struct TileBf16 {
  using Element = std::uint16_t;
  static constexpr int kStep = 2;
  template <int W>
  static CHUNKSERVE_INLINE typename Simd<W>::F load(const std::uint16_t* p, int j) {
    using I = typename Simd<W>::I;
    const I pair = Simd<W>::load_bits(p);
    const I bits = j == 0 ? pair << 16 : pair & static_cast<std::int32_t>(0xffff0000);
    return reinterpret_cast<typename Simd<W>::F>(bits);
  }
};

}  // namespace
}  // namespace chunkserve::CHUNKSERVE_ISA
