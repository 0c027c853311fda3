#include "isa.h"

#include <atomic>
#include <stdexcept>

namespace chunkserve {
namespace {

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
  constexpr const char* kNames[kNumIsas] = {"portable", "avx2", "avx512", "avx512_bf16"};
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
