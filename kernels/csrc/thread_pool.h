// The one pool of threads that all CPU kernels share.
#pragma once

#include <type_traits>

namespace chunkserve {

// Sets how many threads kernels use, the caller included; 0 means all that this process may run on.
// Waits for a running parallel_for. Returns the number that is now in force.
int set_num_threads(int num_threads);
int num_threads();

namespace detail {
using Task = void (*)(void* context, int task, int thread);
void run_tasks(int num_tasks, Task task, void* context);
}  // namespace detail

// Calls f(task, thread) once for each task in [0, num_tasks), in rising order of hand-out; the caller takes part as
// thread 0. Callers from several threads take turns; a call from inside a task runs in that task's thread. The first
// exception of a task is thrown again here. Workers start on the first call and do not survive fork().
template <class F>
void parallel_for(int num_tasks, F&& f) {
  using Function = std::remove_reference_t<F>;
  detail::run_tasks(
      num_tasks, [](void* context, int task, int thread) { (*static_cast<Function*>(context))(task, thread); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace chunkserve
