// RMSNorm, rotary embedding and SwiGLU by rows, compiled once per instruction-set level.
#include "rowwise_cpu_kernels.h"

#include "linear_cpu_vec.h"

namespace chunkserve::CHUNKSERVE_ISA {
namespace {

// Calls f.template operator()<In, Out>() for the element types behind two dtypes.
template <class F>
void with_types(DType in, DType out, F&& f) {
  if (in == DType::f32) {
    out == DType::f32 ? f.template operator()<float, float>() : f.template operator()<float, Bf16>();
  } else {
    out == DType::f32 ? f.template operator()<Bf16, float>() : f.template operator()<Bf16, Bf16>();
  }
}

template <class X, class Out>
void rms_norm_rows(const RmsNormJob& job, long first, long last) {
  for (long row = first; row < last; ++row) {
    X* x = static_cast<X*>(job.x) + row * job.size;
    if (job.residual) {
      const X* residual = static_cast<const X*>(job.residual) + row * job.size;
      for_vectors(job.size, [&](auto load_at, auto store_at) { store_at(x, load_at(x) + load_at(residual)); });
    }
    // Four chains hide the latency of the additions.
    Vec squares[4] = {};
    int chain = 0;
    for_vectors(job.size, [&](auto load_at, auto) {
      const Vec v = load_at(x);
      fma_into(squares[chain], v, v);
      chain = (chain + 1) % 4;
    });
    const float sum = Level::horizontal_sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    const Vec scale = Level::set(1.0f / __builtin_sqrtf(sum / static_cast<float>(job.size) + job.eps));
    Out* out = static_cast<Out*>(job.out) + row * job.size;
    const float* weight = job.weight;
    for_vectors(job.size, [&](auto load_at, auto store_at) { store_at(out, load_at(x) * scale * load_at(weight)); });
  }
}

void rms_norm(const RmsNormJob& job, long first, long last) {
  with_types(job.x_dtype, job.out_dtype, [&]<class X, class Out>() { rms_norm_rows<X, Out>(job, first, last); });
}

template <class In, class Out>
void rotate_heads(const In* in, const float* cos, const float* sin, long num_heads, long half, Out* out) {
  for (long head = 0; head < num_heads; ++head, in += 2 * half, out += 2 * half) {
    for_vectors(half, [&](auto load_at, auto store_at) {
      const Vec a = load_at(in), b = load_at(in + half), c = load_at(cos), s = load_at(sin);
      Vec first = -(b * s), second = a * s;
      fma_into(first, a, c);
      fma_into(second, b, c);
      store_at(out, first);
      store_at(out + half, second);
    });
  }
}

template <class In, class Out>
void rope_rows(const RopeJob& job, long first, long last) {
  const long half = job.head_dim / 2;
  const long q_size = job.num_heads * job.head_dim, kv_size = job.num_kv_heads * job.head_dim;
  for (long row = first; row < last; ++row) {
    const In* in = static_cast<const In*>(job.qkv) + row * (q_size + 2 * kv_size);
    const float *cos = job.cos + row * half, *sin = job.sin + row * half;
    rotate_heads(in, cos, sin, job.num_heads, half, static_cast<Out*>(job.q) + row * q_size);
    rotate_heads(in + q_size, cos, sin, job.num_kv_heads, half, static_cast<Out*>(job.k) + row * kv_size);
    const In* v_in = in + q_size + kv_size;
    Out* v = static_cast<Out*>(job.v) + row * kv_size;
    for_vectors(kv_size, [&](auto load_at, auto store_at) { store_at(v, load_at(v_in)); });
  }
}

void rope_qkv(const RopeJob& job, long first, long last) {
  with_types(job.in_dtype, job.out_dtype, [&]<class In, class Out>() { rope_rows<In, Out>(job, first, last); });
}

template <class In, class Out>
void silu_mul_rows(const SiluMulJob& job, long first, long last) {
  for (long row = first; row < last; ++row) {
    const In* gate = static_cast<const In*>(job.gate_up) + row * 2 * job.size;
    const In* up = gate + job.size;
    Out* out = static_cast<Out*>(job.out) + row * job.size;
    for_vectors(job.size, [&](auto load_at, auto store_at) {
      const Vec x = load_at(gate);
      // x / (1 + e^-x) with e^-|x|, which cannot overflow.
      constexpr float kLog2E = 1.44269504f;
      const Vec decay = Level::exp2((x < 0.0f ? x : -x) * kLog2E);
      const Vec silu = x * (x < 0.0f ? decay : Level::set(1.0f)) / (decay + 1.0f);
      store_at(out, silu * load_at(up));
    });
  }
}

void silu_mul(const SiluMulJob& job, long first, long last) {
  with_types(job.in_dtype, job.out_dtype, [&]<class In, class Out>() { silu_mul_rows<In, Out>(job, first, last); });
}

}  // namespace

const RowwiseKernels rowwise_kernels{&rms_norm, &rope_qkv, &silu_mul};

}  // namespace chunkserve::CHUNKSERVE_ISA
