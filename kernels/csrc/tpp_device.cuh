// What tpp.cu asks of the hardware, as PTX. tests/kernels/cuda_host/cuda_host_shim.h has the same names in plain C++.
// Includes nothing, so that NVRTC needs no headers.
#pragma once

using i64 = long long;
using u32 = unsigned int;
using u16 = unsigned short;

#define TPP_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

// 16-bit floats are storage only; arithmetic is in fp32 and in the tensor cores.
struct Half {
  u16 bits;
};
struct Bfloat {
  u16 bits;
};

// What a pool of fp8 holds; its values are these times the scale of their chunk and KV head.
struct E4m3 {
  unsigned char bits;
};

__device__ inline float float_of(u32 bits) { return __int_as_float(static_cast<int>(bits)); }
__device__ inline u32 bits_of(float x) { return static_cast<u32>(__float_as_int(x)); }
__device__ inline float minus_infinity() { return float_of(0xff800000u); }

__device__ inline float to_float(Half, u16 bits) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
  return out;
}
__device__ inline float to_float(Bfloat, u16 bits) { return float_of(static_cast<u32>(bits) << 16); }

// Two floats, rounded to nearest even; `low` in the lower half.
__device__ inline u32 pack2(Half, float low, float high) {
  u32 out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
__device__ inline u32 pack2(Bfloat, float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

__device__ inline float exp2_fast(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}
__device__ inline float log2_fast(float x) {
  float out;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

template <class X>
__device__ inline X shuffle(X x, int lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}
template <class X>
__device__ inline X shuffle_xor(X x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}

// A barrier of `warps` neighbouring warps; `team` numbers the groups of that size within the block.
__device__ inline void team_sync(int team, int warps) {
  if (warps == 1) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(warps * 32) : "memory");
  }
}

__device__ inline u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory, later; zeros when not `valid` (the source is then not read).
__device__ inline void copy_async16(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's groups are under way.
template <int kPending>
__device__ inline void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit values; lane 8 m + r holds the address of row r of matrix m.
__device__ inline void load_matrix4(u32 (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ inline void load_matrix4_transposed(u32 (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}

// c [16, 8] += a [16, 16] b [16, 8].
__device__ inline void mma(Half, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void mma(Bfloat, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
