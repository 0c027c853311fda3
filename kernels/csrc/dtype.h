// Element types of tensors that kernels read and write.
#pragma once

namespace chunkserve {

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2, f8_e4m3 = 3 };

}  // namespace chunkserve
