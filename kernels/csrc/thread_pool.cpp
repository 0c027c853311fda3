#include "thread_pool.h"

#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

namespace chunkserve {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int available_cpus() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
  const unsigned n = std::thread::hardware_concurrency();
  return n > 0 ? static_cast<int>(n) : 1;
}

// Index of the pool's thread that runs a job here, -1 outside of jobs.
thread_local int current_thread = -1;

class ThreadPool {
 public:
  int resize(int num_threads) {
    std::lock_guard guard(turn_);
    const int wanted = num_threads > 0 ? num_threads : available_cpus();
    if (wanted < size_) stop_workers();
    size_ = wanted;
    return wanted;
  }

  int size() {
    std::lock_guard guard(turn_);
    return size_;
  }

  void run(int num_tasks, detail::Job job, void* context) {
    if (num_tasks <= 0) return;
    if (current_thread >= 0) {
      TaskCounter tasks;
      tasks.begin(num_tasks);
      job(context, tasks, current_thread);
      return;
    }
    std::lock_guard guard(turn_);
    job_ = job;
    context_ = context;
    error_ = nullptr;
    tasks_.begin(num_tasks);
    const bool wake = num_tasks > 1 && size_ > 1;
    if (wake) {
      start_workers();
      open_.store(true);
      epoch_.fetch_add(1);
      epoch_.notify_all();
    }
    take_part(0);
    if (wake) {
      // Workers that have not come in by now stay out, so a descheduled one costs nothing.
      open_.store(false);
      // On busy cores the last task's thread may be waiting for the very core that a longer loop would hold.
      const auto give_up = std::chrono::steady_clock::now() + kSpin;
      for (int inside; (inside = inside_.load()) != 0;) {
        for (int i = 0; i < 16; ++i) pause_briefly();
        if (std::chrono::steady_clock::now() > give_up) inside_.wait(inside);
      }
    }
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void start_workers() {
    while (static_cast<int>(workers_.size()) < size_ - 1) {
      const int thread = static_cast<int>(workers_.size()) + 1;
      workers_.emplace_back([this, thread, seen = epoch_.load()] { work(thread, seen); });
    }
  }

  void stop_workers() {
    stop_.store(true);
    epoch_.fetch_add(1);
    epoch_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stop_.store(false);
  }

  void work(int thread, unsigned seen) {
    for (;;) {
      const auto give_up = std::chrono::steady_clock::now() + kSpin;
      while (epoch_.load() == seen) {
        for (int i = 0; i < 16; ++i) pause_briefly();
        if (std::chrono::steady_clock::now() > give_up) epoch_.wait(seen);
      }
      seen = epoch_.load();
      if (stop_.load()) return;
      // The order matters: whoever counts itself in before the caller closes the job is waited for.
      inside_.fetch_add(1);
      if (open_.load()) take_part(thread);
      if (inside_.fetch_sub(1) == 1) inside_.notify_one();
    }
  }

  void take_part(int thread) {
    current_thread = thread;
    try {
      job_(context_, tasks_, thread);
    } catch (...) {
      std::lock_guard guard(error_lock_);
      if (!error_) error_ = std::current_exception();
      tasks_.end();
    }
    current_thread = -1;
  }

  std::mutex turn_;
  int size_ = available_cpus();
  std::vector<std::thread> workers_;

  detail::Job job_ = nullptr;
  void* context_ = nullptr;
  TaskCounter tasks_;
  std::mutex error_lock_;
  std::exception_ptr error_;

  alignas(64) std::atomic<unsigned> epoch_{0};
  alignas(64) std::atomic<int> inside_{0};
  std::atomic<bool> open_{false};
  std::atomic<bool> stop_{false};
};

// Never destroyed: workers may still wait on it when the process ends.
ThreadPool& pool() {
  static ThreadPool* const instance = new ThreadPool;
  return *instance;
}

}  // namespace

int set_num_threads(int num_threads) { return pool().resize(num_threads); }
int num_threads() { return pool().size(); }

namespace detail {
void run_job(int num_tasks, Job job, void* context) { pool().run(num_tasks, job, context); }
}  // namespace detail

}  // namespace chunkserve
