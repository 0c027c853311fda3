#include "isa.h"

#include <atomic>
#include <stdexcept>

#if defined(CHUNKSERVE_X86) && defined(__linux__) && !defined(CHUNKSERVE_EMULATE_AVX512)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace chunkserve {
namespace {

#if defined(CHUNKSERVE_X86)
// Linux gives a process the tile registers when it asks for them; a CPU or a kernel without them says no.
bool has_amx_bf16() {
#if defined(CHUNKSERVE_EMULATE_AVX512)
  return true;
#elif defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(edx & kBf16) || !(edx & kTile)) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

bool supported(Isa isa) {
#if defined(CHUNKSERVE_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#if defined(CHUNKSERVE_EMULATE_AVX512)
  const bool avx512 = avx2, bf16 = avx2;
#else
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
#endif
  switch (isa) {
    case Isa::portable:
      return true;
    case Isa::avx2:
      return avx2;
    case Isa::avx512:
      return avx512;
    case Isa::avx512_bf16:
      return bf16;
    case Isa::amx_bf16: {
      static const bool amx = has_amx_bf16();
      return bf16 && amx;
    }
  }
#endif
  return isa == Isa::portable;
}

std::atomic<Isa>& current() {
  static std::atomic<Isa> isa{supported_isas().back()};
  return isa;
}

}  // namespace

const char* isa_name(Isa isa) {
  constexpr const char* kNames[kNumIsas] = {"portable", "avx2", "avx512", "avx512_bf16", "amx_bf16"};
  return kNames[static_cast<int>(isa)];
}

std::vector<Isa> supported_isas() {
  std::vector<Isa> out;
  for (int i = 0; i < kNumIsas; ++i) {
    if (supported(static_cast<Isa>(i))) out.push_back(static_cast<Isa>(i));
  }
  return out;
}

Isa current_isa() { return current().load(std::memory_order_relaxed); }

void set_isa(const std::string& name) {
  std::string names;
  for (const Isa isa : supported_isas()) {
    if (name == isa_name(isa)) {
      current().store(isa, std::memory_order_relaxed);
      return;
    }
    names += names.empty() ? "" : ", ";
    names += isa_name(isa);
  }
  throw std::invalid_argument("instruction set '" + name + "' is not one that this CPU can run: " + names);
}

}  // namespace chunkserve
