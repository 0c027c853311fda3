// tpp.cu on the host, behind a C interface. TPP_VALUE, TPP_KV_VALUE, TPP_HEAD_DIM and TPP_SHARED_LIMIT come from the
// command line.
#define TPP_HOST
#include "tpp.cu"

using Value = TPP_VALUE;
using KvValue = TPP_KV_VALUE;
using SegmentKernel = tpp::Segment<Value, KvValue, TPP_HEAD_DIM, TPP_SHARED_LIMIT>;
using MergeKernel = tpp::Merge<Value, TPP_HEAD_DIM>;
using AppendKernel = tpp::Append<Value, KvValue, TPP_HEAD_DIM>;

extern "C" int tpp_host_threads() { return SegmentKernel::kThreads; }
extern "C" int tpp_host_stages() { return SegmentKernel::kStages; }

// The C name of a kernel, and `run` of it in every thread.
#define TPP_LAUNCHER(name, Kernel, shared_bytes)                                                           \
  extern "C" void name(const Params* params, int blocks, unsigned seed) {                                  \
    const auto body = [](const void* p) { Kernel::run(*static_cast<const Params*>(p)); };                  \
    shim::launch(blocks, Kernel::kThreads, shared_bytes, seed, body, params);                              \
  }
TPP_LAUNCHER(tpp_segment, SegmentKernel, SegmentKernel::kSharedBytes)
TPP_LAUNCHER(tpp_merge, MergeKernel, 0)
TPP_LAUNCHER(tpp_append, AppendKernel, 0)
