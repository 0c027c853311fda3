// The layers of a Llama-like decoder as one call: between its products there is no Python, and no memory is taken.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention_driver.h"
#include "linear_cpu.h"
#include "plan_array.h"
#include "rowwise_cpu_kernels.h"
#include "tensor.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace chunkserve {
namespace {

struct Sizes {
  long hidden, intermediate, num_heads, num_kv_heads, head_dim;

  long qkv() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
};

struct Layer {
  PackedWeight qkv, output, gate_up, down;
  const float *q_norm, *k_norm;  // [D]; null where heads are not normalised
  const float *mlp_norm, *next_norm;
  KVTiles tiles;
  Logits logits;
};

const float* norm_weight(const char* name, const TensorArg& arg, long size) {
  const Tensor weight(name, arg, 1);
  weight.require_shape({size}, {});
  weight.require_dtype(DType::f32);
  return weight.as<float>();
}

class DecoderLayers {
 public:
  DecoderLayers(long hidden, long intermediate, long num_heads, long num_kv_heads, long head_dim, float eps)
      : sizes_{hidden, intermediate, num_heads, num_kv_heads, head_dim}, eps_(eps) {}

  // The caller keeps all tensors alive.
  void add(const WeightArg& qkv, const std::optional<TensorArg>& q_norm, const std::optional<TensorArg>& k_norm,
           const WeightArg& output, const TensorArg& mlp_norm, const WeightArg& gate_up, const WeightArg& down,
           const TensorArg& next_norm, const std::string& kv_dtype, std::int64_t num_slots, std::uintptr_t k,
           std::uintptr_t v, std::uintptr_t k_scale, std::uintptr_t v_scale, float scale, int window, float softcap) {
    const Sizes& s = sizes_;
    layers_.push_back({
        .qkv = packed_weight(qkv, s.qkv(), s.hidden),
        .output = packed_weight(output, s.hidden, s.num_heads * s.head_dim),
        .gate_up = packed_weight(gate_up, 2 * s.intermediate, s.hidden),
        .down = packed_weight(down, s.hidden, s.intermediate),
        .q_norm = q_norm ? norm_weight("q_norm", *q_norm, s.head_dim) : nullptr,
        .k_norm = k_norm ? norm_weight("k_norm", *k_norm, s.head_dim) : nullptr,
        .mlp_norm = norm_weight("mlp_norm", mlp_norm, s.hidden),
        .next_norm = norm_weight("next_norm", next_norm, s.hidden),
        .tiles = {.dtype = parse_dtype(kv_dtype),
                  .num_kv_heads = static_cast<int>(s.num_kv_heads),
                  .head_dim = static_cast<int>(s.head_dim),
                  .num_slots = num_slots,
                  .k = reinterpret_cast<void*>(k),
                  .v = reinterpret_cast<void*>(v),
                  .k_scale = reinterpret_cast<float*>(k_scale),
                  .v_scale = reinterpret_cast<float*>(v_scale)},
        .logits = {.scale = scale, .window = window, .softcap = softcap, .alibi_slopes = nullptr, .sinks = nullptr},
    });
  }

  // x [T, hidden], its normalised form h, both overwritten; cos, sin [T, D / 2]; all fp32.
  void run(const TensorArg& x_arg, const TensorArg& h_arg, const TensorArg& cos_arg, const TensorArg& sin_arg,
           const PlanArray& plan_data) {
    const Tensor x("x", x_arg, 2), h("h", h_arg, 2), cos("cos", cos_arg, 2), sin("sin", sin_arg, 2);
    const long rows = x.shape[0];
    for (const Tensor* tensor : {&x, &h, &cos, &sin}) tensor->require_dtype(DType::f32);
    x.require_shape({rows, sizes_.hidden}, {});
    h.require_shape({rows, sizes_.hidden}, {&x});
    for (const Tensor* tensor : {&cos, &sin}) tensor->require_shape({rows, sizes_.head_dim / 2}, {&x});
    const PlanView plan = view_of(plan_data);
    for (const Layer& layer : layers_) {
      // As a rule all layers have pools of the same size, and one look at the plan is enough.
      if (&layer != layers_.data() && layer.tiles.num_slots == layers_[0].tiles.num_slots) continue;
      check_writes(plan, rows, layer.tiles.num_slots);
      check_reads(plan, rows, layer.tiles.num_slots);
    }
    nb::gil_scoped_release release;
    make_room(rows);
    for (const Layer& layer : layers_) {
      run_layer(layer, rows, x.as<float>(), h.as<float>(), cos.as<float>(), sin.as<float>(), plan);
    }
  }

 private:
  void make_room(long rows) {
    const Sizes& s = sizes_;
    const auto grow = [&](std::vector<float>& memory, long width) {
      if (memory.size() < static_cast<std::size_t>(rows * width)) memory.resize(rows * width);
    };
    grow(qkv_, s.qkv());
    grow(heads_, s.qkv());
    grow(attended_, s.num_heads * s.head_dim);
    grow(added_, s.hidden);
    grow(gate_up_, 2 * s.intermediate);
    grow(gated_, s.intermediate);
  }

  void run_layer(const Layer& layer, long rows, float* x, float* h, const float* cos, const float* sin,
                 const PlanView& plan) {
    const Sizes& s = sizes_;
    product(layer.qkv, h, rows, qkv_.data());
    if (layer.q_norm) norm_heads(layer, rows);
    float* const q = heads_.data();
    float* const k = q + rows * s.num_heads * s.head_dim;
    float* const v = k + rows * s.num_kv_heads * s.head_dim;
    by_rows(RopeJob{.qkv = qkv_.data(),
                    .in_dtype = DType::f32,
                    .cos = cos,
                .sin = sin,
                .q = q,
                .k = k,
                .v = v,
                .out_dtype = DType::f32,
                .num_heads = s.num_heads,
                .num_kv_heads = s.num_kv_heads,
                .head_dim = s.head_dim},
        rows);
    append(layer.tiles, heads(k, s.num_kv_heads), heads(v, s.num_kv_heads), plan);
    attend(layer.tiles, heads(q, s.num_heads), static_cast<int>(s.num_heads), layer.logits, attended_.data(), plan);
    product(layer.output, attended_.data(), rows, added_.data());
    add_and_norm(x, layer.mlp_norm, rows, h);
    product(layer.gate_up, h, rows, gate_up_.data());
    by_rows(SiluMulJob{.gate_up = gate_up_.data(),
                   .in_dtype = DType::f32,
                   .out = gated_.data(),
                   .out_dtype = DType::f32,
                   .size = s.intermediate},
        rows);
    product(layer.down, gated_.data(), rows, added_.data());
    add_and_norm(x, layer.next_norm, rows, h);
  }

  static void product(const PackedWeight& weight, const float* x, long rows, float* out) {
    multiply(weight, x, DType::f32, rows, out, DType::f32);
  }

  HeadRows heads(const float* data, long num_heads) const {
    return {DType::f32, data, num_heads * sizes_.head_dim, sizes_.head_dim};
  }

  // Each head of q and k by itself, in place; a token's heads are rows next to each other.
  void norm_heads(const Layer& layer, long rows) {
    const Sizes& s = sizes_;
    for (long row = 0; row < rows; ++row) {
      float* const q = qkv_.data() + row * s.qkv();
      by_rows(norm_job(q, nullptr, layer.q_norm, q, s.head_dim), s.num_heads);
      float* const k = q + s.num_heads * s.head_dim;
      by_rows(norm_job(k, nullptr, layer.k_norm, k, s.head_dim), s.num_kv_heads);
    }
  }

  void add_and_norm(float* x, const float* weight, long rows, float* h) {
    by_rows(norm_job(x, added_.data(), weight, h, sizes_.hidden), rows);
  }

  RmsNormJob norm_job(float* x, const float* residual, const float* weight, float* out, long size) const {
    return {.x = x,
            .residual = residual,
            .x_dtype = DType::f32,
            .weight = weight,
            .eps = eps_,
            .out = out,
            .out_dtype = DType::f32,
            .size = size};
  }

  Sizes sizes_;
  float eps_;
  std::vector<Layer> layers_;
  // Of the step; they only grow.
  std::vector<float> qkv_, heads_, attended_, added_, gate_up_, gated_;
};

}  // namespace

void register_decoder(nb::module_& m) {
  nb::class_<DecoderLayers>(m, "DecoderLayers")
      .def(nb::init<long, long, long, long, long, float>(), "hidden"_a, "intermediate"_a, "num_heads"_a,
           "num_kv_heads"_a, "head_dim"_a, "eps"_a)
      .def("add", &DecoderLayers::add, nb::kw_only(), "qkv"_a, "q_norm"_a.none(), "k_norm"_a.none(), "output"_a,
           "mlp_norm"_a, "gate_up"_a, "down"_a, "next_norm"_a, "kv_dtype"_a, "num_slots"_a, "k"_a, "v"_a, "k_scale"_a,
           "v_scale"_a, "scale"_a, "window"_a, "softcap"_a)
      .def("run", &DecoderLayers::run, "x"_a, "h"_a, "cos"_a, "sin"_a, "plan"_a);
}

}  // namespace chunkserve
