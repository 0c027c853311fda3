// What the levels of probe_cpu_kernels.cpp offer: loops that do nothing but reach a limit of the machine.
#pragma once

namespace chunkserve {

struct ProbeKernels {
  // Reads `bytes`, a multiple of 1024; the result only keeps the loads alive.
  float (*read)(const char* data, long bytes);
  // `rounds` times kProbeChains independent vector multiply-adds, or 4 products of tiles; `bf16_pairs` where the level
  // has them, else fp32.
  float (*multiply)(long rounds, bool bf16_pairs);
  long multiply_flops_per_round;
  long bf16_pair_flops_per_round;  // 0: the level has none
};

inline constexpr int kProbeChains = 12;

namespace portable {
extern const ProbeKernels probe_kernels;
}
#if defined(CHUNKSERVE_X86)
namespace avx2 {
extern const ProbeKernels probe_kernels;
}
namespace avx512 {
extern const ProbeKernels probe_kernels;
}
namespace avx512_bf16 {
extern const ProbeKernels probe_kernels;
}
namespace amx_bf16 {
extern const ProbeKernels probe_kernels;
}
#endif

}  // namespace chunkserve
