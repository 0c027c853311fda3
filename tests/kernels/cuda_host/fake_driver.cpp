// The functions of libcuda that cuda_module.py calls, for tests without a GPU: they check what they are given and note
// the last launch. Handles are wider than 32 bits, so that a pointer passed as an int is seen.
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {
void* const kContext = reinterpret_cast<void*>(0x1111222233334444);
void* const kModule = reinterpret_cast<void*>(0x5555666677778888);
const char* const kNames[] = {"tpp_segment", "tpp_merge", "tpp_append"};
const int kShape[2] = {128, 147456};
constexpr int kInvalid = 1;
int shared_allowed = 0;
void* current = nullptr;
char note[256];
}  // namespace

extern "C" {
int cuInit(unsigned flags) { return flags ? kInvalid : 0; }
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal + 40;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = kContext;
  return device == 40 ? 0 : kInvalid;
}
int cuCtxSetCurrent(void* context) {
  current = context;
  return context == kContext ? 0 : kInvalid;
}
int cuModuleLoadData(void** module, const void* image) {
  *module = kModule;
  return current == kContext && std::memcmp(image, "\x7f" "ELF", 4) == 0 ? 0 : kInvalid;
}
int cuModuleGetFunction(const void** function, void* module, const char* name) {
  for (const char* known : kNames) {
    if (std::strcmp(known, name) == 0) *function = known;
  }
  return module == kModule ? 0 : kInvalid;
}
int cuModuleGetGlobal_v2(std::uint64_t* address, std::size_t* size, void* module, const char* name) {
  *address = reinterpret_cast<std::uint64_t>(kShape);
  *size = sizeof kShape;
  return module == kModule && std::strcmp(name, "tpp_segment_shape") == 0 ? 0 : kInvalid;
}
int cuMemcpyDtoH_v2(void* to, std::uint64_t from, std::size_t size) {
  std::memcpy(to, reinterpret_cast<const void*>(from), size);
  return 0;
}
int cuFuncSetAttribute(const char* function, int attribute, int value) {
  if (function != kNames[0] || attribute != 8) return kInvalid;
  shared_allowed = value;
  return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const char* function, int threads, std::size_t shared) {
  *blocks = 2;
  return function == kNames[0] && threads == kShape[0] && shared == static_cast<std::size_t>(kShape[1]) ? 0 : kInvalid;
}
int cuLaunchKernel(const char* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, void* stream, void** params, void** extra) {
  if (current != kContext || extra || grid_y * grid_z * block_y * block_z != 1) return kInvalid;
  if (static_cast<int>(shared) > shared_allowed) return kInvalid;
  std::uint64_t first;
  std::memcpy(&first, params[0], sizeof first);
  std::snprintf(note, sizeof note, "%s %u %u %u %p %#lx", function, grid_x, block_x, shared, stream, first);
  return 0;
}
int cuGetErrorString(int error, const char** text) {
  *text = error == kInvalid ? "invalid argument" : "unknown";
  return 0;
}
const char* last_launch() { return note; }
}
