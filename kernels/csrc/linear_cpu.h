// Products with packed weights, as other native code calls them: split over the threads.
#pragma once

#include <optional>
#include <tuple>

#include "dtype.h"
#include "tensor.h"

namespace chunkserve {

// A weight [n, k] as pack_linear lays it out: fp32, bf16, or int8 with a scale per column; its owner keeps it alive.
struct PackedWeight {
  const void* packed;
  DType dtype;
  const float* scale;  // [n], of int8, else null
  const float* bias;   // [n] or null
  long n;
  long k;
};

// The packed weight, its scale and its bias.
using WeightArg = std::tuple<TensorArg, std::optional<TensorArg>, std::optional<TensorArg>>;

// Throws std::invalid_argument unless the tensors are those of a weight [n, k].
PackedWeight packed_weight(const WeightArg& arg, long n, long k);

// out [rows, n] = x [rows, k] W^T + bias, contiguous.
void multiply(const PackedWeight& weight, const void* x, DType x_dtype, long rows, void* out, DType out_dtype);

}  // namespace chunkserve
