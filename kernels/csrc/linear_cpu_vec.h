// What simd.h lacks for products and row-wise work: bf16 vectors, fused multiply-add, loops with a remainder. Include
// only from ISA sources.
#pragma once

#include "simd.h"

namespace chunkserve::CHUNKSERVE_ISA {
namespace {

#define CHUNKSERVE_UNROLL _Pragma("GCC unroll 64")

using Level = Simd<kWidth>;
using Vec = Level::F;
typedef std::uint32_t VecU32 __attribute__((vector_size(kWidth * 4)));
typedef std::uint16_t VecU16 __attribute__((vector_size(kWidth * 2)));

struct Bf16 {
  std::uint16_t bits;
};

// acc += a * b, rounded once where the level has FMA. Written out because every path must give the same bits, and
// because GCC 12 gives the sum another register now and then, and spills in the tile loops.
CHUNKSERVE_INLINE void fma_into(Vec& acc, Vec a, Vec b) {
#if CHUNKSERVE_ISA_LEVEL >= 2 && defined(CHUNKSERVE_EMULATE_AVX512)
  avx512_host::fma_into(acc, a, b);
#elif CHUNKSERVE_ISA_LEVEL >= 1
  asm("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
#else
  acc += a * b;
#endif
}

CHUNKSERVE_INLINE Vec load(const float* p) { return Level::load(p); }
CHUNKSERVE_INLINE Vec load(const Bf16* p) {
  VecU16 bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return (Vec)(__builtin_convertvector(bits, VecU32) << 16);
}

// Spelled out where it can be: GCC 12 converts a vector of bytes one by one. With a mask of all lanes, since it warns of
// what _mm512_cvtepi8_epi32 leaves undefined.
CHUNKSERVE_INLINE Vec load_i8(const char* p) {
#if CHUNKSERVE_ISA_LEVEL >= 2 && !defined(CHUNKSERVE_EMULATE_AVX512)
  const __m512i x = _mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return __builtin_convertvector((Level::I)x, Vec);
#elif CHUNKSERVE_ISA_LEVEL == 1
  const __m256i x = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return __builtin_convertvector((Level::I)x, Vec);
#else
  Vec x;
  for (int i = 0; i < kWidth; ++i) x[i] = static_cast<signed char>(p[i]);
  return x;
#endif
}

CHUNKSERVE_INLINE void store(float* p, Vec v) { Level::store(p, v); }
// Rounds to nearest even; a NaN stays one.
CHUNKSERVE_INLINE void store(Bf16* p, Vec v) {
  const VecU32 bits = (VecU32)v;
  const VecU32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const VecU32 quiet = (bits >> 16) | 0x40u;
  const VecU16 out = __builtin_convertvector(v == v ? rounded : quiet, VecU16);
  __builtin_memcpy(p, &out, sizeof(out));
}

// Calls f(load, store) over [0, n) a vector at a time: load(p) and store(p, v) act on p[i...], in the last call on what
// is left of n, the rest reading as zero.
template <class F>
CHUNKSERVE_INLINE void for_vectors(long n, F&& f) {
  long i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    f([i](const auto* p) { return load(p + i); }, [i](auto* p, Vec v) { store(p + i, v); });
  }
  if (i == n) return;
  const auto rest = static_cast<unsigned long>(n - i);
  f(
      [i, rest]<class T>(const T* p) {
        T part[kWidth] = {};
        __builtin_memcpy(part, p + i, rest * sizeof(T));
        return load(part);
      },
      [i, rest]<class T>(T* p, Vec v) {
        T part[kWidth];
        store(part, v);
        __builtin_memcpy(p + i, part, rest * sizeof(T));
      });
}

}  // namespace
}  // namespace chunkserve::CHUNKSERVE_ISA
