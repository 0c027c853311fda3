// What the levels of rowwise_cpu_kernels.cpp offer to the code that splits up the work.
#pragma once

#include "dtype.h"

namespace chunkserve {

// Element-wise work on rows [first, last) of contiguous matrices; arithmetic in fp32, one rounding to the output.
struct RmsNormJob {
  void* x;               // [rows, size]; x += residual first, where there is one
  const void* residual;  // [rows, size], dtype of x, or null
  DType x_dtype;
  const float* weight;  // [size]
  float eps;
  void* out;  // [rows, size], may be x
  DType out_dtype;
  long size;
};

struct RopeJob {
  const void* qkv;  // [rows, (num_heads + 2 num_kv_heads) * head_dim]
  DType in_dtype;
  const float* cos;  // [rows, head_dim / 2]
  const float* sin;
  void* q;  // [rows, num_heads, head_dim]
  void* k;  // [rows, num_kv_heads, head_dim]
  void* v;
  DType out_dtype;
  long num_heads;
  long num_kv_heads;
  long head_dim;
};

struct SiluMulJob {
  const void* gate_up;  // [rows, 2 size]: gate, then up
  DType in_dtype;
  void* out;  // [rows, size]
  DType out_dtype;
  long size;
};

// All rows, split over the threads.
void by_rows(const RmsNormJob& job, long rows);
void by_rows(const RopeJob& job, long rows);
void by_rows(const SiluMulJob& job, long rows);

struct RowwiseKernels {
  void (*rms_norm)(const RmsNormJob& job, long first, long last);
  void (*rope_qkv)(const RopeJob& job, long first, long last);
  void (*silu_mul)(const SiluMulJob& job, long first, long last);
};

namespace portable {
extern const RowwiseKernels rowwise_kernels;
}
#if defined(CHUNKSERVE_X86)
namespace avx2 {
extern const RowwiseKernels rowwise_kernels;
}
namespace avx512 {
extern const RowwiseKernels rowwise_kernels;
}
namespace avx512_bf16 {
extern const RowwiseKernels rowwise_kernels;
}
#endif

}  // namespace chunkserve
