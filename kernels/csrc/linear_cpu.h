// Products with packed weights, as other native code calls them: split over the threads.
#pragma once

#include <optional>

#include "dtype.h"
#include "tensor.h"

namespace chunkserve {

// A weight [n, k] as pack_linear lays it out, fp32 or bf16; its owner keeps it alive.
struct PackedWeight {
  const void* packed;
  DType dtype;
  const float* bias;  // [n] or null
  long n;
  long k;
};

// Throws std::invalid_argument unless the tensors are a packed weight [n, k] and its bias.
PackedWeight packed_weight(const TensorArg& packed, const std::optional<TensorArg>& bias, long n, long k);

// out [rows, n] = x [rows, k] W^T + bias, contiguous.
void multiply(const PackedWeight& weight, const void* x, DType x_dtype, long rows, void* out, DType out_dtype);

}  // namespace chunkserve
