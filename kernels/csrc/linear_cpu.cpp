// Packed weights and their products: checks of tensors, packing, splitting over threads.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>

#include "isa.h"
#include "linear_cpu.h"
#include "linear_cpu_kernels.h"
#include "tensor.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace chunkserve {
namespace {

constexpr const LinearKernels* kLevels[kNumIsas] = {
    &portable::linear_kernels,
#if defined(CHUNKSERVE_X86)
    &avx2::linear_kernels,
    &avx512::linear_kernels,
    &avx512_bf16::linear_kernels,
    &amx_bf16::linear_kernels,
#endif
};

const LinearKernels& kernels_in_force() { return *kLevels[static_cast<int>(current_isa())]; }

long panels_of(long n) { return (n + kLinearPanel - 1) / kLinearPanel; }
long panel_elements(long k) { return (k + k % 2) * kLinearPanel; }

// Element (column, k) of a panel is at k * 16 + column for fp32 and int8, k / 2 * 32 + column * 2 + k % 2 for bf16.
template <class T, int Neighbours>
void pack_panel(const T* weight, long n, long k, long panel, T* packed) {
  T* out = packed + panel * panel_elements(k);
  std::fill_n(out, panel_elements(k), T{});
  for (long column = 0; column < std::min<long>(kLinearPanel, n - panel * kLinearPanel); ++column) {
    const T* row = weight + (panel * kLinearPanel + column) * k;
    T* lane = out + column * Neighbours;
    for (long i = 0; i < k; ++i) lane[i / Neighbours * Neighbours * kLinearPanel + i % Neighbours] = row[i];
  }
}

// weight [n, k] -> packed [panels of 16 columns, k rounded up to even * 16], same dtype.
void pack_linear(const TensorArg& weight_arg, const TensorArg& packed_arg) {
  const Tensor weight("weight", weight_arg, 2);
  const Tensor packed("packed", packed_arg, 2);
  const long n = weight.shape[0], k = weight.shape[1];
  packed.require_shape({panels_of(n), panel_elements(k)}, {&weight});
  packed.require_dtype(weight);
  nb::gil_scoped_release release;
  parallel_for(static_cast<int>(panels_of(n)), [&](int panel, int) {
    if (weight.dtype == DType::f32) {
      pack_panel<float, 1>(weight.as<float>(), n, k, panel, packed.as<float>());
    } else {
      pack_panel<std::uint16_t, 2>(weight.as<std::uint16_t>(), n, k, panel, packed.as<std::uint16_t>());
    }
  });
}

float widened(float x) { return x; }
float widened(std::uint16_t bf16) { return std::bit_cast<float>(static_cast<std::uint32_t>(bf16) << 16); }

// As pack_panel; a column's scale is its largest size over 127, its elements the nearest multiples of that. False where
// an element is not finite.
template <class T>
bool pack_panel_i8(const T* weight, long n, long k, long panel, std::int8_t* packed, float* scales) {
  std::int8_t* out = packed + panel * panel_elements(k);
  std::fill_n(out, panel_elements(k), std::int8_t{});
  for (long column = 0; column < std::min<long>(kLinearPanel, n - panel * kLinearPanel); ++column) {
    const T* row = weight + (panel * kLinearPanel + column) * k;
    float largest = 0.0f;
    for (long i = 0; i < k; ++i) {
      const float size = std::fabs(widened(row[i]));
      if (!std::isfinite(size)) return false;
      largest = std::max(largest, size);
    }
    const float scale = scales[panel * kLinearPanel + column] = largest / 127.0f;
    if (scale == 0.0f) continue;  // zeros, or so small that their sum is none
    for (long i = 0; i < k; ++i) {
      const float nearest = std::nearbyint(widened(row[i]) / scale);
      out[i * kLinearPanel + column] = static_cast<std::int8_t>(std::clamp(nearest, -127.0f, 127.0f));
    }
  }
  return true;
}

// weight [n, k] -> packed [panels of 16 columns, k rounded up to even * 16] int8, scale [n].
void pack_linear_i8(const TensorArg& weight_arg, const TensorArg& packed_arg, const TensorArg& scale_arg) {
  const Tensor weight("weight", weight_arg, 2);
  const Tensor packed("packed", packed_arg, 2, true);
  const Tensor scale("scale", scale_arg, 1);
  const long n = weight.shape[0], k = weight.shape[1];
  packed.require_shape({panels_of(n), panel_elements(k)}, {&weight});
  packed.require_dtype(DType::i8);
  scale.require_shape({n}, {&weight});
  scale.require_dtype(DType::f32);
  std::atomic<bool> finite = true;
  {
    nb::gil_scoped_release release;
    parallel_for(static_cast<int>(panels_of(n)), [&](int panel, int) {
      const auto pack = [&](const auto* from) {
        return pack_panel_i8(from, n, k, panel, packed.as<std::int8_t>(), scale.as<float>());
      };
      const bool packs =
          weight.dtype == DType::f32 ? pack(weight.as<float>()) : pack(weight.as<std::uint16_t>());
      if (!packs) finite = false;
    });
  }
  if (!finite) throw std::invalid_argument("weight has an element that is not finite, which no int8 stands for");
}

// Memory that only grows.
class Scratch {
 public:
  char* at_least(std::size_t bytes) {
    if (bytes > size_) {
      size_ = (bytes + kPage - 1) / kPage * kPage;
      memory_.reset(static_cast<char*>(std::aligned_alloc(kPage, size_)));
      if (!memory_) throw std::bad_alloc();
    }
    return memory_.get();
  }

 private:
  static constexpr std::size_t kPage = 4096;
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> memory_;
  std::size_t size_ = 0;
};

// Activations are copied once per call into tiles; below this many elements the caller does it alone.
constexpr long kParallelPackElements = 32768;
// Tasks per thread at least, so that uneven threads end together; panels per task at most.
constexpr long kTasksPerThread = 8;
constexpr long kMaxTaskPanels = 16;

void linear_rows(LinearJob job, const LinearKernels& kernels) {
  const int tile_rows = job.weight_dtype == DType::bf16 ? kernels.max_tile_rows_bf16 : kernels.max_tile_rows_f32;
  const int num_tiles = static_cast<int>((job.num_rows + tile_rows - 1) / tile_rows);
  if (job.num_rows * job.k < kParallelPackElements) {
    for (int tile = 0; tile < num_tiles; ++tile) kernels.pack_tile(job, tile, num_tiles);
  } else {
    parallel_for(num_tiles, [&](int tile, int) { kernels.pack_tile(job, tile, num_tiles); });
  }
  const long panels = panels_of(job.n);
  const long wanted = panels / (num_threads() * kTasksPerThread) / 2 * 2;
  const long task_panels = std::clamp<long>(wanted, 2, kMaxTaskPanels);
  parallel_for(static_cast<int>((panels + task_panels - 1) / task_panels), [&](int task, int) {
    const long first = task * task_panels;
    kernels.multiply(job, num_tiles, first, std::min(first + task_panels, panels));
  });
}

}  // namespace

void multiply(const PackedWeight& w, const void* x, DType x_dtype, long rows, void* out, DType out_dtype) {
  if (rows == 0 || w.n == 0) return;
  const LinearKernels& kernels = kernels_in_force();
  const long num_blocks = (rows + kLinearMaxRows - 1) / kLinearMaxRows;
  const long k_padded = (w.k + kLinearBlockK - 1) / kLinearBlockK * kLinearBlockK;
  static thread_local Scratch scratch;
  char* packed_x = scratch.at_least(std::min<long>(rows, kLinearMaxRows) * k_padded * sizeof(float));
  for (long block = 0; block < num_blocks; ++block) {
    const long first = block * rows / num_blocks;
    linear_rows({.x = static_cast<const char*>(x) + first * w.k * element_bytes(x_dtype),
                 .x_dtype = x_dtype,
                 .weight = w.packed,
                 .weight_dtype = w.dtype,
                 .scale = w.scale,
                 .bias = w.bias,
                 .out = static_cast<char*>(out) + first * w.n * element_bytes(out_dtype),
                 .out_dtype = out_dtype,
                 .num_rows = (block + 1) * rows / num_blocks - first,
                 .n = w.n,
                 .k = w.k,
                 .packed_x = packed_x},
                kernels);
  }
}

PackedWeight packed_weight(const WeightArg& arg, long n, long k) {
  const Tensor packed("packed", std::get<0>(arg), 2, true);
  packed.require_shape({panels_of(n), panel_elements(k)}, {});
  const auto by_column = [&](const char* name, const std::optional<TensorArg>& values_arg) -> const float* {
    if (!values_arg) return nullptr;
    const Tensor values(name, *values_arg, 1);
    values.require_shape({n}, {&packed});
    values.require_dtype(DType::f32);
    return values.as<float>();
  };
  const float* scale = by_column("scale", std::get<1>(arg));
  if ((packed.dtype == DType::i8) != (scale != nullptr)) {
    throw std::invalid_argument("a packed weight of int8 has a scale, and no other has");
  }
  return {.packed = packed.data,
          .dtype = packed.dtype,
          .scale = scale,
          .bias = by_column("bias", std::get<2>(arg)),
          .n = n,
          .k = k};
}

namespace {

// out [t, n] = x [t, k] W^T + bias.
void linear(const TensorArg& x_arg, const WeightArg& weight_arg, const TensorArg& out_arg) {
  const Tensor x("x", x_arg, 2);
  const Tensor out("out", out_arg, 2);
  out.require_shape({x.shape[0], out.shape[1]}, {&x});
  const PackedWeight weight = packed_weight(weight_arg, out.shape[1], x.shape[1]);
  nb::gil_scoped_release release;
  multiply(weight, x.data, x.dtype, x.shape[0], out.data, out.dtype);
}

}  // namespace

void register_linear(nb::module_& m) {
  m.def("pack_linear", &pack_linear, "weight"_a, "packed"_a);
  m.def("pack_linear_int8", &pack_linear_i8, "weight"_a, "packed"_a, "scale"_a);
  m.def("linear", &linear, "x"_a, "weight"_a, "out"_a);
  m.attr("LINEAR_PANEL") = kLinearPanel;
}

}  // namespace chunkserve
