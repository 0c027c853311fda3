// Loops that reach the limits of the machine, compiled once per instruction-set level.
#include "probe_cpu_kernels.h"

#include "linear_cpu_vec.h"
#if CHUNKSERVE_ISA_LEVEL == 4
#include "amx_cpu.h"
#endif

namespace chunkserve::CHUNKSERVE_ISA {
namespace {

float read(const char* data, long bytes) {
  constexpr int kStreams = 8;
  VecU32 sums[kStreams] = {};
  for (long i = 0; i < bytes; i += kStreams * static_cast<long>(sizeof(Vec))) {
    CHUNKSERVE_UNROLL for (int s = 0; s < kStreams; ++s) {
      sums[s] ^= (VecU32)Level::load_bits(data + i + s * static_cast<long>(sizeof(Vec)));
    }
  }
  CHUNKSERVE_UNROLL for (int s = 1; s < kStreams; ++s) sums[0] ^= sums[s];
  return static_cast<float>(sums[0][0]);
}

float multiply(long rounds, [[maybe_unused]] bool bf16_pairs) {
  Vec sums[kProbeChains];
  CHUNKSERVE_UNROLL for (int c = 0; c < kProbeChains; ++c) sums[c] = Level::set(static_cast<float>(c));
  const Vec a = Level::set(0.75f), b = Level::set(0.25f);
#if CHUNKSERVE_ISA_LEVEL == 4
  if (bf16_pairs) {
    alignas(64) float tile_sums[kAmxRows * 16];
    AmxTiles tiles;
    tiles.configure(kAmxRows, kAmxRows);
    for (long i = 0; i < rounds; ++i) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, tile_sums, 64);
    return tile_sums[0];
  }
#elif CHUNKSERVE_ISA_LEVEL == 3
  if (bf16_pairs) {
    for (long i = 0; i < rounds; ++i) {
      CHUNKSERVE_UNROLL for (int c = 0; c < kProbeChains; ++c) {
        sums[c] = (Vec)_mm512_dpbf16_ps((__m512)sums[c], (__m512bh)a, (__m512bh)b);
      }
    }
    CHUNKSERVE_UNROLL for (int c = 1; c < kProbeChains; ++c) sums[0] += sums[c];
    return sums[0][0];
  }
#endif
  for (long i = 0; i < rounds; ++i) {
    CHUNKSERVE_UNROLL for (int c = 0; c < kProbeChains; ++c) fma_into(sums[c], a, b);
  }
  CHUNKSERVE_UNROLL for (int c = 1; c < kProbeChains; ++c) sums[0] += sums[c];
  return sums[0][0];
}

}  // namespace

constexpr long kPairFlops = CHUNKSERVE_ISA_LEVEL == 4   ? 4 * 16 * 16 * 32 * 2
                            : CHUNKSERVE_ISA_LEVEL == 3 ? kProbeChains * kWidth * 4
                                                        : 0;

const ProbeKernels probe_kernels{&read, &multiply, kProbeChains * kWidth * 2, kPairFlops};

}  // namespace chunkserve::CHUNKSERVE_ISA
