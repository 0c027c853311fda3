// AVX-512 and AMX for CPUs without them: what sources of their levels call, lane by lane, as Intel's manual has it.
// CMakeLists.txt includes this before them with -DCHUNKSERVE_EMULATE_AVX512=ON, and gives them the flags of AVX2.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace avx512_host {

template <class T, int N>
struct Lanes {
  T at[N];
};

template <class T, int N, class Register>
inline Lanes<T, N> lanes(Register x) {
  static_assert(sizeof(Register) == sizeof(Lanes<T, N>));
  Lanes<T, N> out;
  std::memcpy(&out, &x, sizeof(out));
  return out;
}

template <class Register, class T, int N>
inline Register pack(const Lanes<T, N>& x) {
  static_assert(sizeof(Register) == sizeof(x));
  Register out;
  std::memcpy(&out, &x, sizeof(out));
  return out;
}

inline float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// Functions of the instructions are not inlined: unrolled loops full of them take minutes to compile.
#define AVX512_HOST __attribute__((noinline)) inline

// These instructions take denormals for zeros, and make none.
inline float no_denormal(float x) { return (bits_of(x) & 0x7f800000u) ? x : float_of(bits_of(x) & 0x80000000u); }
inline float from_bf16(std::uint16_t x) { return no_denormal(float_of(std::uint32_t{x} << 16)); }

template <int N, class Float, class Pairs>
AVX512_HOST Float dpbf16(Float acc, Pairs a, Pairs b) {
  auto sums = lanes<float, N>(acc);
  const auto x = lanes<std::uint16_t, 2 * N>(a), y = lanes<std::uint16_t, 2 * N>(b);
  for (int i = 0; i < N; ++i) {
    float sum = no_denormal(sums.at[i]);
    sum = no_denormal(__builtin_fmaf(from_bf16(x.at[2 * i + 1]), from_bf16(y.at[2 * i + 1]), sum));
    sums.at[i] = no_denormal(__builtin_fmaf(from_bf16(x.at[2 * i]), from_bf16(y.at[2 * i]), sum));
  }
  return pack<Float>(sums);
}

AVX512_HOST __m256bh cvtneps_pbh(__m512 from) {
  const auto x = lanes<float, 16>(from);
  Lanes<std::uint16_t, 16> out;
  for (int i = 0; i < 16; ++i) {
    const std::uint32_t bits = bits_of(no_denormal(x.at[i]));
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    out.at[i] = static_cast<std::uint16_t>((is_nan ? bits | 0x400000u : bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
  return pack<__m256bh>(out);
}

AVX512_HOST __m512 max_ps(__m512 a, __m512 b) {
  auto x = lanes<float, 16>(a);
  const auto y = lanes<float, 16>(b);
  for (int i = 0; i < 16; ++i) x.at[i] = x.at[i] > y.at[i] ? x.at[i] : y.at[i];
  return pack<__m512>(x);
}

AVX512_HOST __m512 cvtph_ps(__m256i from) {
  const auto x = lanes<std::uint16_t, 16>(from);
  Lanes<float, 16> out;
  for (int i = 0; i < 16; ++i) out.at[i] = _cvtsh_ss(x.at[i]);
  return pack<__m512>(out);
}

AVX512_HOST __m512i cvtepu16_epi32(__m256i from) {
  const auto x = lanes<std::uint16_t, 16>(from);
  Lanes<std::uint32_t, 16> out;
  for (int i = 0; i < 16; ++i) out.at[i] = x.at[i];
  return pack<__m512i>(out);
}

AVX512_HOST __m512i slli_epi32(__m512i from, int count) {
  auto x = lanes<std::uint32_t, 16>(from);
  for (int i = 0; i < 16; ++i) x.at[i] = count < 32 ? x.at[i] << count : 0;
  return pack<__m512i>(x);
}

// Tiles of AMX, of a thread: their sizes are what _tile_loadconfig said last, and outside of them they are zero.
struct Tile {
  int rows, row_bytes;
  unsigned char at[16][64];
};
inline thread_local Tile tiles[8];

inline void tile_loadconfig(const void* config) {
  const auto* bytes = static_cast<const unsigned char*>(config);
  for (int i = 0; i < 8; ++i) {
    tiles[i] = {};
    tiles[i].rows = bytes[48 + i];
    tiles[i].row_bytes = bytes[16 + 2 * i] + 256 * bytes[17 + 2 * i];
  }
}

inline void tile_release() { std::memset(tiles, 0, sizeof(tiles)); }
inline void tile_zero(int i) { std::memset(tiles[i].at, 0, sizeof(tiles[i].at)); }

inline void tile_loadd(int i, const void* base, long stride) {
  tile_zero(i);
  for (int r = 0; r < tiles[i].rows; ++r) {
    std::memcpy(tiles[i].at[r], static_cast<const char*>(base) + r * stride, tiles[i].row_bytes);
  }
}

inline void tile_stored(int i, void* base, long stride) {
  for (int r = 0; r < tiles[i].rows; ++r) {
    std::memcpy(static_cast<char*>(base) + r * stride, tiles[i].at[r], tiles[i].row_bytes);
  }
}

AVX512_HOST void tile_dpbf16ps(int sums, int a, int b) {
  Tile& c = tiles[sums];
  const auto element = [](const Tile& tile, int row, int i) {
    std::uint16_t bits;
    std::memcpy(&bits, tile.at[row] + 2 * i, 2);
    return from_bf16(bits);
  };
  for (int m = 0; m < c.rows; ++m) {
    for (int n = 0; n < c.row_bytes / 4; ++n) {
      float even = 0.0f, odd = 0.0f, sum;
      for (int k = 0; k < tiles[a].row_bytes / 4; ++k) {
        even = no_denormal(__builtin_fmaf(element(tiles[a], m, 2 * k), element(tiles[b], k, 2 * n), even));
        odd = no_denormal(__builtin_fmaf(element(tiles[a], m, 2 * k + 1), element(tiles[b], k, 2 * n + 1), odd));
      }
      std::memcpy(&sum, c.at[m] + 4 * n, 4);
      sum = no_denormal(no_denormal(sum) + no_denormal(even + odd));
      std::memcpy(c.at[m] + 4 * n, &sum, 4);
    }
  }
}

// What linear_cpu_vec.h has as an instruction of its own.
template <class Vec>
AVX512_HOST void fma_into(Vec& acc, Vec a, Vec b) {
  for (int i = 0; i < 16; ++i) acc[i] = __builtin_fmaf(a[i], b[i], acc[i]);
}

}  // namespace avx512_host

#define _mm256_dpbf16_ps avx512_host::dpbf16<8>
#define _mm512_dpbf16_ps avx512_host::dpbf16<16>
#define _mm512_cvtneps_pbh avx512_host::cvtneps_pbh
#define _mm512_max_ps avx512_host::max_ps
#define _mm512_cvtph_ps avx512_host::cvtph_ps
#define _mm512_cvtepu16_epi32 avx512_host::cvtepu16_epi32
// Macros in GCC's headers.
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig avx512_host::tile_loadconfig
#define _tile_release avx512_host::tile_release
#define _tile_zero avx512_host::tile_zero
#define _tile_loadd avx512_host::tile_loadd
#define _tile_stored avx512_host::tile_stored
#define _tile_dpbf16ps avx512_host::tile_dpbf16ps
#undef _mm512_slli_epi32
#define _mm512_slli_epi32 avx512_host::slli_epi32
