// The one pool of threads that all CPU kernels share.
#pragma once

#include <atomic>
#include <type_traits>

namespace chunkserve {

// Sets how many threads kernels use, the caller included; 0 means all that this process may run on.
// Waits for a running parallel_for. Returns the number that is now in force.
int set_num_threads(int num_threads);
int num_threads();

// Hands out the tasks of one job to its threads, each once, in rising order.
class TaskCounter {
 public:
  void begin(int num_tasks) {
    num_tasks_ = num_tasks;
    next_.store(0, std::memory_order_relaxed);
  }
  void end() { next_.store(num_tasks_, std::memory_order_relaxed); }
  // The next one; -1 when there are no more.
  int take() {
    const int task = next_.fetch_add(1, std::memory_order_relaxed);
    return task < num_tasks_ ? task : -1;
  }

 private:
  int num_tasks_ = 0;
  alignas(64) std::atomic<int> next_{0};
};

namespace detail {
using Job = void (*)(void* context, TaskCounter& tasks, int thread);
void run_job(int num_tasks, Job job, void* context);
}  // namespace detail

// Calls f(tasks, thread) in each thread, which takes tasks of [0, num_tasks) until there are none; the caller takes part
// as thread 0. Callers from several threads take turns; a call from inside a job runs in that job's thread. The first
// exception ends the job and is thrown again here. Workers start on the first call and do not survive fork().
template <class F>
void parallel_take(int num_tasks, F&& f) {
  using Function = std::remove_reference_t<F>;
  detail::run_job(
      num_tasks,
      [](void* context, TaskCounter& tasks, int thread) { (*static_cast<Function*>(context))(tasks, thread); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

// Calls f(task, thread) once for each task in [0, num_tasks); otherwise as parallel_take.
template <class F>
void parallel_for(int num_tasks, F&& f) {
  parallel_take(num_tasks, [&f](TaskCounter& tasks, int thread) {
    for (int task; (task = tasks.take()) >= 0;) f(task, thread);
  });
}

}  // namespace chunkserve
