// Element types of tensors that kernels read and write.
#pragma once

namespace chunkserve {

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2, f8_e4m3 = 3, i8 = 4 };

constexpr int element_bytes(DType dtype) {
  return dtype == DType::f32 ? 4 : dtype == DType::bf16 || dtype == DType::f16 ? 2 : 1;
}

}  // namespace chunkserve
