// Instruction sets that kernels are compiled for; one is chosen at run time.
//
// A kernel source is compiled once per level (see chunkserve_add_isa_source in CMakeLists.txt) with CHUNKSERVE_ISA set
// to the level's name and CHUNKSERVE_ISA_LEVEL to its number. Such a source must put everything into the namespace of
// its level and must not instantiate inline functions of the standard library: the linker would keep one copy of them
// for all levels, perhaps one that this CPU cannot run.
#pragma once

#include <string>
#include <vector>

namespace chunkserve {

// amx_bf16 is avx512_bf16 but for the products; sources without any have no such level.
enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3, amx_bf16 = 4 };
inline constexpr int kNumIsas = 5;

const char* isa_name(Isa isa);
// What this build has and this CPU can run, worst first.
std::vector<Isa> supported_isas();
// The level in force: the best supported one unless set_isa chose another.
Isa current_isa();
// Throws std::invalid_argument when the name is unknown or the CPU cannot run it.
void set_isa(const std::string& name);

}  // namespace chunkserve
