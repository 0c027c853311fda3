// The flat array of plan.py's AttentionPlan.
#pragma once

#include <cstdint>

namespace chunkserve {

inline constexpr std::int32_t kPlanMagic = 0x54505031;  // "TPP1"
inline constexpr std::int32_t kPlanVersion = 2;
inline constexpr std::int64_t kPlanHeader = 12;

}  // namespace chunkserve
