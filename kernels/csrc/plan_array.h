// A plan as an argument of bound functions, and the names of element types.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>

#include "dtype.h"
#include "plan_view.h"

namespace chunkserve {

using PlanArray =
    nanobind::ndarray<const std::int32_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

inline PlanView view_of(const PlanArray& plan) { return {plan.data(), static_cast<std::int64_t>(plan.size())}; }

// Of "float32", "bfloat16", "float16", "float8_e4m3fn"; throws std::invalid_argument for others.
DType parse_dtype(const std::string& name);

}  // namespace chunkserve
