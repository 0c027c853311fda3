// RMSNorm, rotary embedding and SwiGLU: checks of tensors, splitting over threads.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <optional>
#include <string>

#include "isa.h"
#include "rowwise_cpu_kernels.h"
#include "tensor.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace chunkserve {
namespace {

constexpr const RowwiseKernels* kLevels[kNumIsas] = {
    &portable::rowwise_kernels,
#if defined(CHUNKSERVE_X86)
    &avx2::rowwise_kernels,
    &avx512::rowwise_kernels,
    &avx512_bf16::rowwise_kernels,
    &avx512_bf16::rowwise_kernels,  // amx_bf16
#endif
};

const RowwiseKernels& kernels_in_force() { return *kLevels[static_cast<int>(current_isa())]; }

// A task must have this many elements to be worth another thread.
constexpr long kTaskElements = 16384;

template <class Job>
void for_rows(long rows, long row_elements, void (*kernel)(const Job&, long, long), const Job& job) {
  const long task_rows = std::max<long>(1, kTaskElements / std::max<long>(1, row_elements));
  parallel_for(static_cast<int>((rows + task_rows - 1) / task_rows), [&](int task, int) {
    kernel(job, task * task_rows, std::min(rows, (task + 1) * task_rows));
  });
}

}  // namespace

void by_rows(const RmsNormJob& job, long rows) { for_rows(rows, job.size, kernels_in_force().rms_norm, job); }

void by_rows(const RopeJob& job, long rows) {
  for_rows(rows, (job.num_heads + 2 * job.num_kv_heads) * job.head_dim, kernels_in_force().rope_qkv, job);
}

void by_rows(const SiluMulJob& job, long rows) { for_rows(rows, 2 * job.size, kernels_in_force().silu_mul, job); }

namespace {

// out = x / rms(x) * weight by rows of x [t, size]; with a residual, x += residual first.
void rms_norm(const TensorArg& x_arg, const std::optional<TensorArg>& residual_arg, const TensorArg& weight_arg,
              float eps, const TensorArg& out_arg) {
  const Tensor x("x", x_arg, 2);
  const Tensor weight("weight", weight_arg, 1);
  const Tensor out("out", out_arg, 2);
  weight.require_shape({x.shape[1]}, {&x});
  weight.require_dtype(DType::f32);
  out.require_shape({x.shape[0], x.shape[1]}, {&x});
  const void* residual = nullptr;
  if (residual_arg) {
    const Tensor added("residual", *residual_arg, 2);
    added.require_shape({x.shape[0], x.shape[1]}, {&x});
    added.require_dtype(x);
    residual = added.data;
  }
  const RmsNormJob job{.x = x.data,
                       .residual = residual,
                       .x_dtype = x.dtype,
                       .weight = weight.as<float>(),
                       .eps = eps,
                       .out = out.data,
                       .out_dtype = out.dtype,
                       .size = x.shape[1]};
  nb::gil_scoped_release release;
  by_rows(job, x.shape[0]);
}

// qkv [t, (h + 2g) d] -> q [t, h, d] and k [t, g, d] rotated by cos, sin [t, d / 2], v [t, g, d].
void rope_qkv(const TensorArg& qkv_arg, const TensorArg& cos_arg, const TensorArg& sin_arg, const TensorArg& q_arg,
              const TensorArg& k_arg, const TensorArg& v_arg) {
  const Tensor qkv("qkv", qkv_arg, 2);
  const Tensor cos("cos", cos_arg, 2), sin("sin", sin_arg, 2);
  const Tensor q("q", q_arg, 3), k("k", k_arg, 3), v("v", v_arg, 3);
  const long t = qkv.shape[0], h = q.shape[1], d = q.shape[2], g = k.shape[1];
  if (d % 2 != 0) throw std::invalid_argument("head_dim is " + std::to_string(d) + "; expected an even number");
  q.require_shape({t, h, d}, {&qkv});
  k.require_shape({t, g, d}, {&qkv, &q});
  v.require_shape({t, g, d}, {&q, &k});
  qkv.require_shape({t, (h + 2 * g) * d}, {&q, &k});
  cos.require_shape({t, d / 2}, {&qkv, &q});
  sin.require_shape({t, d / 2}, {&qkv, &q});
  cos.require_dtype(DType::f32);
  sin.require_dtype(DType::f32);
  k.require_dtype(q);
  v.require_dtype(q);
  const RopeJob job{.qkv = qkv.data,
                    .in_dtype = qkv.dtype,
                    .cos = cos.as<float>(),
                    .sin = sin.as<float>(),
                    .q = q.data,
                    .k = k.data,
                    .v = v.data,
                    .out_dtype = q.dtype,
                    .num_heads = h,
                    .num_kv_heads = g,
                    .head_dim = d};
  nb::gil_scoped_release release;
  by_rows(job, t);
}

// out [t, m] = silu(gate) * up, gate_up [t, 2 m].
void silu_mul(const TensorArg& gate_up_arg, const TensorArg& out_arg) {
  const Tensor gate_up("gate_up", gate_up_arg, 2);
  const Tensor out("out", out_arg, 2);
  gate_up.require_shape({out.shape[0], 2 * out.shape[1]}, {&out});
  const SiluMulJob job{.gate_up = gate_up.data,
                       .in_dtype = gate_up.dtype,
                       .out = out.data,
                       .out_dtype = out.dtype,
                       .size = out.shape[1]};
  nb::gil_scoped_release release;
  by_rows(job, out.shape[0]);
}

}  // namespace

void register_rowwise(nb::module_& m) {
  m.def("rms_norm", &rms_norm, "x"_a, "residual"_a.none(), "weight"_a, "eps"_a,
        "out"_a);
  m.def("rope_qkv", &rope_qkv, "qkv"_a, "cos"_a, "sin"_a, "q"_a,
        "k"_a, "v"_a);
  m.def("silu_mul", &silu_mul, "gate_up"_a, "out"_a);
}

}  // namespace chunkserve
