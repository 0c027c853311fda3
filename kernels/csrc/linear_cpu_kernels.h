// What the levels of linear_cpu_kernels.cpp offer to the code that splits up the work.
#pragma once

#include "dtype.h"

namespace chunkserve {

// Columns of one panel of packed weights, and K values of one block of packed activations.
inline constexpr int kLinearPanel = 16;
inline constexpr int kLinearBlockK = 256;
// Rows of one call of LinearKernels::multiply at most.
inline constexpr int kLinearMaxRows = 264;

// Y = X W^T + bias for up to kLinearMaxRows rows of X. Levels that multiply bf16 pairs round X to bf16 where W is bf16.
//
// Weights are packed into panels of kLinearPanel columns, K rounded up to even with zeros: fp32 and int8 [panel][K][16],
// bf16 [panel][K / 2][16][2], so that the 32-bit word of a column holds two neighbours in K. Sums over int8 are
// multiplied by the column's scale before the bias is added. Rows are cut into tiles of
// nearly equal height; `packed_x` is [tile][K block][row of the tile][kLinearBlockK], bf16 where pairs are multiplied,
// else fp32; bf16 ends with zeros up to a multiple of 32. Each output is one chain of multiply-adds in rising k, whatever
// the tile, so that a row's bits do not depend on the other rows.
struct LinearJob {
  const void* x;  // [num_rows, k]
  DType x_dtype;
  const void* weight;
  DType weight_dtype;
  const float* scale;  // [n], of int8, else null
  const float* bias;   // [n] or null
  void* out;           // [num_rows, n]
  DType out_dtype;
  long num_rows;
  long n;
  long k;
  char* packed_x;
};

struct LinearKernels {
  int max_tile_rows_f32;  // where weights are fp32 or int8
  int max_tile_rows_bf16;
  // Fills packed_x for tile `tile` of `num_tiles`.
  void (*pack_tile)(const LinearJob& job, int tile, int num_tiles);
  // Computes all rows of the columns of panels [first, last).
  void (*multiply)(const LinearJob& job, int num_tiles, long first, long last);
};

namespace portable {
extern const LinearKernels linear_kernels;
}
#if defined(CHUNKSERVE_X86)
namespace avx2 {
extern const LinearKernels linear_kernels;
}
namespace avx512 {
extern const LinearKernels linear_kernels;
}
namespace avx512_bf16 {
extern const LinearKernels linear_kernels;
}
namespace amx_bf16 {
extern const LinearKernels linear_kernels;
}
#endif

}  // namespace chunkserve
