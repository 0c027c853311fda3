// The hardware that tpp.cu asks for (kernels/csrc/tpp_device.cuh), in plain C++, for tests without a GPU.
//
// Each thread of a block is a fiber. A fiber runs until it meets a warp operation or a barrier, and goes on when all that
// take part are there; which fiber runs next is random, by seed, and for a while one warp goes before all others, so that
// warps drift apart as far as the barriers let them. Warp operations follow the fragment maps of the PTX
// documentation. An asynchronous copy happens at a random time between its issue and the wait for it, so that both a
// missing wait and a buffer that is reused too early change the result. Blocks run one after the other, in random order.
// It cannot show: races between blocks, memory order, bank conflicts, time.
#pragma once

#include <ucontext.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#define __device__
#define __restrict__ __restrict

using i64 = long long;
using u32 = unsigned int;
using u16 = unsigned short;
constexpr int min(int a, int b) { return a < b ? a : b; }
constexpr int max(int a, int b) { return a < b ? b : a; }

namespace shim {

constexpr int kLanes = 32;
constexpr std::size_t kStackBytes = 256 * 1024;
constexpr std::size_t kDepositBytes = 64;

struct Index {
  u32 x = 0;
};

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "cuda_host_shim: %s\n", what);
  std::abort();
}

// xorshift64*; the large headers of std::random would be half of the compile time.
struct Random {
  unsigned long long state;
  u32 below(std::size_t n) {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return static_cast<u32>((state * 0x2545F4914F6CDD1Dull >> 32) % n);
  }
};

struct Copy {
  void* to;
  const void* from;
  bool valid;
  void run() const {
    if (valid) {
      std::memcpy(to, from, 16);
    } else {
      std::memset(to, 0, 16);
    }
  }
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  bool done = false;
  std::vector<Copy> copies;               // of the group that is not committed yet
  std::vector<std::vector<Copy>> groups;  // committed, oldest first
};

// Where a set of fibers meets. Deposits alternate between two halves: a fiber may still read the last one.
struct Meeting {
  std::vector<int> waiting;
  unsigned round = 0;
  const char* operation = nullptr;
  alignas(16) unsigned char deposits[2][kLanes][kDepositBytes];
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Meeting> warps;
  std::vector<Meeting> barriers;
  std::vector<std::vector<int>> runnable;  // fibers of each warp
  std::size_t favoured = 0;                // warp
  u32 favoured_for = 0;                    // more switches
  std::unique_ptr<unsigned char[]> shared;
  void (*body)(const void* params);
  const void* params;
  ucontext_t caller;
  int current = 0;
  int remaining = 0;
  Random random;
};

inline Block* block = nullptr;

inline void begin_switch([[maybe_unused]] void** save, [[maybe_unused]] const void* bottom,
                         [[maybe_unused]] std::size_t size) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(save, bottom, size);
#endif
}
inline void end_switch([[maybe_unused]] void* save) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(save, nullptr, nullptr);
#endif
}

}  // namespace shim

inline shim::Index threadIdx;
inline shim::Index blockIdx;
inline shim::Index gridDim;

#define TPP_DYNAMIC_SHARED(name) unsigned char* name = shim::block->shared.get()

namespace shim {

inline Fiber& self() { return block->fibers[static_cast<std::size_t>(block->current)]; }

inline int take_runnable() {
  const std::size_t num_warps = block->runnable.size();
  if (block->favoured_for == 0) {
    block->favoured = block->random.below(num_warps);
    block->favoured_for = 1 + block->random.below(20000);
  }
  block->favoured_for -= 1;
  const std::size_t start = block->runnable[block->favoured].empty() ? block->random.below(num_warps) : block->favoured;
  for (std::size_t i = 0; i < num_warps; ++i) {
    std::vector<int>& fibers = block->runnable[(start + i) % num_warps];
    if (fibers.empty()) continue;
    const std::size_t pick = block->random.below(fibers.size());
    const int next = fibers[pick];
    fibers[pick] = fibers.back();
    fibers.pop_back();
    return next;
  }
  fail("deadlock: threads wait for others that have ended or wait elsewhere");
}

inline void set_runnable(int fiber) { block->runnable[static_cast<std::size_t>(fiber / kLanes)].push_back(fiber); }

inline void enter(int fiber) {
  block->current = fiber;
  threadIdx.x = static_cast<u32>(fiber);
}

// Lets another fiber run; returns when this one was made runnable and picked.
inline void yield() {
  const int me = block->current;
  const int next = take_runnable();
  if (next == me) return;
  Fiber& to = block->fibers[static_cast<std::size_t>(next)];
  Fiber& from = self();
  enter(next);
  void* save = nullptr;
  begin_switch(&save, to.stack.get(), kStackBytes);
  swapcontext(&from.context, &to.context);
  end_switch(save);
}

// Waits until `count` fibers are here. The result is the number of the round, for the deposits.
inline unsigned meet(Meeting& meeting, int count, const char* operation) {
  if (!meeting.waiting.empty() && meeting.operation != operation) fail("the threads of a warp are at different operations");
  meeting.operation = operation;
  const unsigned round = meeting.round;
  meeting.waiting.push_back(block->current);
  if (static_cast<int>(meeting.waiting.size()) == count) {
    meeting.round += 1;
    for (const int fiber : meeting.waiting) set_runnable(fiber);
    meeting.waiting.clear();
  }
  yield();
  return round;
}

inline int lane() { return block->current % kLanes; }
inline Meeting& warp() { return block->warps[static_cast<std::size_t>(block->current / kLanes)]; }

// Gives `mine` to the warp; the result holds the value of every lane.
template <class X>
const X (&exchange(const X& mine, const char* operation))[kLanes] {
  static_assert(sizeof(X) <= kDepositBytes);
  Meeting& meeting = warp();
  // Packed by the size of X, so that the half is an array of X.
  auto& half = meeting.deposits[meeting.round % 2];
  std::memcpy(&half[0][0] + static_cast<std::size_t>(lane()) * sizeof(X), &mine, sizeof(X));
  meet(meeting, kLanes, operation);
  return reinterpret_cast<const X(&)[kLanes]>(half);
}

inline void fiber_main() {
  end_switch(nullptr);
  block->body(block->params);
  if (!self().groups.empty() || !self().copies.empty()) fail("a thread ends before its asynchronous copies");
  self().done = true;
  block->remaining -= 1;
  if (block->remaining == 0) {
    begin_switch(nullptr, nullptr, 0);
    setcontext(&block->caller);
  }
  const int next = take_runnable();
  enter(next);
  Fiber& to = block->fibers[static_cast<std::size_t>(next)];
  begin_switch(nullptr, to.stack.get(), kStackBytes);
  setcontext(&to.context);
}

// Runs a kernel: `body` once per thread of each block. Shared memory begins as NaN.
inline void launch(int num_blocks, int num_threads, std::size_t shared_bytes, unsigned seed,
                   void (*body)(const void* params), const void* params) {
  Block state;
  state.random.state = (seed + 1) * 0x9E3779B97F4A7C15ull;
  state.body = body;
  state.params = params;
  state.fibers = std::vector<Fiber>(static_cast<std::size_t>(num_threads));
  block = &state;
  gridDim.x = static_cast<u32>(num_blocks);
  std::vector<int> order(static_cast<std::size_t>(num_blocks));
  for (int i = 0; i < num_blocks; ++i) {
    const std::size_t place = state.random.below(static_cast<std::size_t>(i) + 1);
    order[static_cast<std::size_t>(i)] = order[place];
    order[place] = i;
  }
  for (const int number : order) {
    blockIdx.x = static_cast<u32>(number);
    // Exactly as large as asked for: ASan sees what goes past it.
    state.shared = std::make_unique<unsigned char[]>(shared_bytes);
    std::memset(state.shared.get(), 0xFF, shared_bytes);
    state.warps = std::vector<Meeting>(static_cast<std::size_t>(num_threads / kLanes));
    state.barriers = std::vector<Meeting>(16);
    state.remaining = num_threads;
    state.runnable.assign(state.warps.size(), {});
    for (int i = 0; i < num_threads; ++i) {
      Fiber& fiber = state.fibers[static_cast<std::size_t>(i)];
      fiber.done = false;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStackBytes;
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, fiber_main, 0);
      set_runnable(i);
    }
    const int first = take_runnable();
    enter(first);
    Fiber& to = state.fibers[static_cast<std::size_t>(first)];
    void* save = nullptr;
    begin_switch(&save, to.stack.get(), kStackBytes);
    swapcontext(&state.caller, &to.context);
    end_switch(save);
  }
  block = nullptr;
}

}  // namespace shim

struct Half {
  u16 bits;
};
struct Bfloat {
  u16 bits;
};

struct E4m3 {
  unsigned char bits;
};

inline float float_of(u32 bits) { return std::bit_cast<float>(bits); }
inline u32 bits_of(float x) { return std::bit_cast<u32>(x); }
inline float minus_infinity() { return -std::numeric_limits<float>::infinity(); }

inline u16 to_bits(Half, float x) { return std::bit_cast<u16>(static_cast<_Float16>(x)); }
inline u16 to_bits(Bfloat, float x) {
  const u32 bits = std::bit_cast<u32>(x);
  if (std::isnan(x)) return 0x7fff;
  return static_cast<u16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline float to_float(Half, u16 bits) { return static_cast<float>(std::bit_cast<_Float16>(bits)); }
inline float to_float(Bfloat, u16 bits) { return std::bit_cast<float>(static_cast<u32>(bits) << 16); }

template <class T>
u32 pack2(T type, float low, float high) {
  return to_bits(type, low) | static_cast<u32>(to_bits(type, high)) << 16;
}

inline float exp2_fast(float x) {
  const float y = std::exp2(x);
  return y < std::numeric_limits<float>::min() ? 0.0f : y;
}
inline float log2_fast(float x) { return std::log2(x); }

template <class X>
X shuffle(X x, int lane) {
  return shim::exchange(x, "shuffle")[lane];
}
template <class X>
X shuffle_xor(X x, int mask) {
  return shim::exchange(x, "shuffle_xor")[shim::lane() ^ mask];
}

inline void team_sync(int team, int warps) {
  if (warps == 1) {
    shim::meet(shim::warp(), shim::kLanes, "warp barrier");
  } else {
    shim::meet(shim::block->barriers[static_cast<std::size_t>(team) + 1], warps * shim::kLanes, "barrier");
  }
}

inline void copy_async16(void* shared, const void* global, bool valid) {
  if (reinterpret_cast<std::size_t>(shared) % 16 || reinterpret_cast<std::size_t>(global) % 16) {
    shim::fail("an asynchronous copy is not aligned to 16 bytes");
  }
  const shim::Copy copy{shared, global, valid};
  if (shim::block->random.below(2)) {
    copy.run();
  } else {
    shim::self().copies.push_back(copy);
  }
}
inline void copy_async_commit() {
  shim::self().groups.push_back(std::move(shim::self().copies));
  shim::self().copies.clear();
}
template <int kPending>
void copy_async_wait() {
  auto& groups = shim::self().groups;
  while (groups.size() > kPending) {
    for (const shim::Copy& copy : groups.front()) copy.run();
    groups.erase(groups.begin());
  }
}

inline void load_matrix4_of(u32 (&out)[4], const void* row, bool transposed, const char* operation) {
  const void* const(&rows)[shim::kLanes] = shim::exchange(row, operation);
  const int lane = shim::lane();
  for (int m = 0; m < 4; ++m) {
    u16 pair[2];
    for (int e = 0; e < 2; ++e) {
      const int across = lane % 4 * 2 + e;
      const int r = transposed ? across : lane / 4;
      const int c = transposed ? lane / 4 : across;
      if (reinterpret_cast<std::size_t>(rows[m * 8 + r]) % 16) shim::fail("a row of ldmatrix is not aligned to 16 bytes");
      std::memcpy(&pair[e], static_cast<const unsigned char*>(rows[m * 8 + r]) + c * 2, 2);
    }
    out[m] = pair[0] | static_cast<u32>(pair[1]) << 16;
  }
  // On the device, too, a lane may go on and overwrite a row only after all lanes have their values.
  shim::meet(shim::warp(), shim::kLanes, operation);
}
inline void load_matrix4(u32 (&out)[4], const void* row) { load_matrix4_of(out, row, false, "ldmatrix"); }
inline void load_matrix4_transposed(u32 (&out)[4], const void* row) {
  load_matrix4_of(out, row, true, "ldmatrix.trans");
}

// PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type". With g = lane / 4 and t = lane % 4:
//   a[i] holds row g + 8 (i % 2), columns 2 t + 8 (i / 2) and the next;
//   b[i] holds rows 2 t + 8 i and the next, column g;
//   c[i] is row g + 8 (i / 2), column 2 t + i % 2.
template <class T>
void mma(T type, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  struct Fragment {
    u32 a[4];
    u32 b[2];
  };
  const Fragment(&all)[shim::kLanes] = shim::exchange(Fragment{{a[0], a[1], a[2], a[3]}, {b0, b1}}, "mma");
  const auto half = [type](u32 pair, int k) { return to_float(type, static_cast<u16>(k % 2 ? pair >> 16 : pair)); };
  const int lane = shim::lane();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8;
    const int column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const Fragment& with_a = all[row % 8 * 4 + k % 8 / 2];
      const Fragment& with_b = all[column * 4 + k % 8 / 2];
      c[i] += half(with_a.a[row / 8 + k / 8 * 2], k) * half(with_b.b[k / 8], k);
    }
  }
}
