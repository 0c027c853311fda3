// What this machine can do at best, measured: the floor that benchmarks compare with.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "isa.h"
#include "probe_cpu_kernels.h"
#include "tensor.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace chunkserve {
namespace {

constexpr const ProbeKernels* kLevels[kNumIsas] = {
    &portable::probe_kernels,
#if defined(CHUNKSERVE_X86)
    &avx2::probe_kernels,
    &avx512::probe_kernels,
    &avx512_bf16::probe_kernels,
    &amx_bf16::probe_kernels,
#endif
};

const ProbeKernels& kernels_in_force() { return *kLevels[static_cast<int>(current_isa())]; }

// Keeps results of the loops from being optimised away.
std::atomic<float> sink;

template <class F>
double seconds_of(int num_tasks, F&& f) {
  const auto begin = std::chrono::steady_clock::now();
  parallel_for(num_tasks, f);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double probe_read_gb_per_s(const TensorArg& buffer_arg) {
  constexpr long kTaskBytes = 1 << 20;
  const Tensor buffer("buffer", buffer_arg, 1);
  const long num_tasks = buffer.shape[0] * buffer.element_bytes() / kTaskBytes;
  if (num_tasks == 0) throw std::invalid_argument("buffer is " + buffer.shape_text() + "; expected 1 MiB or more");
  nb::gil_scoped_release release;
  const ProbeKernels& kernels = kernels_in_force();
  const double seconds = seconds_of(static_cast<int>(num_tasks), [&](int task, int) {
    sink.store(kernels.read(buffer.as<char>() + task * kTaskBytes, kTaskBytes), std::memory_order_relaxed);
  });
  return static_cast<double>(num_tasks * kTaskBytes) / seconds * 1e-9;
}

double probe_multiply_gflop_per_s(bool bf16_pairs) {
  constexpr long kRounds = 20000;
  constexpr int kTasksPerThread = 32;
  nb::gil_scoped_release release;
  const ProbeKernels& kernels = kernels_in_force();
  const bool pairs = bf16_pairs && kernels.bf16_pair_flops_per_round != 0;
  const long flops = pairs ? kernels.bf16_pair_flops_per_round : kernels.multiply_flops_per_round;
  const int num_tasks = kTasksPerThread * num_threads();
  const double seconds = seconds_of(num_tasks, [&](int, int) {
    sink.store(kernels.multiply(kRounds, pairs), std::memory_order_relaxed);
  });
  return static_cast<double>(flops) * kRounds * num_tasks / seconds * 1e-9;
}

}  // namespace

void register_probe(nb::module_& m) {
  m.def("probe_read_gb_per_s", &probe_read_gb_per_s, "buffer"_a,
        "Reads a tensor [n] once with all threads; give one that no cache holds.");
  m.def("probe_multiply_gflop_per_s", &probe_multiply_gflop_per_s, "bf16_pairs"_a,
        "Multiply-adds of all threads at the instruction set in force, some 10 ms; bf16 pairs where it has them.");
}

}  // namespace chunkserve
