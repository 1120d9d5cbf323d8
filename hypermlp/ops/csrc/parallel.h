// The only way in which the kernels use several threads. No result may depend on the number of threads or on
// timing: every sum has a fixed order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace hypermlp {

// Call work(context, worker) once for each worker in [0, workers). One thread may take several workers, one
// after another. `work` must not throw. The program defines this function: ops.cpp with PyTorch's threads,
// tests/ops/driver.cpp with std::thread.
void run_workers(int64_t workers, void (*work)(void* context, int64_t worker), void* context);

// Call work(worker) for each worker in [0, workers).
template <typename Work>
void parallel(int64_t workers, const Work& work) {
    if (workers <= 1) return work(int64_t{0});
    run_workers(
        workers, [](void* context, int64_t worker) { (*static_cast<const Work*>(context))(worker); },
        const_cast<void*>(static_cast<const void*>(&work)));
}

// Call work(i) for each i in [0, count). Every worker takes one contiguous range: for equal pieces of work.
template <typename Work>
void for_ranges(int64_t threads, int64_t count, const Work& work) {
    const int64_t workers = std::min(threads, count);
    if (count <= 0) return;
    parallel(workers, [&](int64_t worker) {
        const int64_t last = count * (worker + 1) / workers;
        for (int64_t i = count * worker / workers; i < last; ++i) work(i);
    });
}

// Call work(i, worker) for each i in [0, count). Workers take one at a time, in order: for unequal pieces.
template <typename Work>
void for_each(int64_t threads, int64_t count, const Work& work) {
    if (count <= 0) return;
    std::atomic<int64_t> next{0};
    parallel(std::min(threads, count), [&](int64_t worker) {
        for (int64_t i = next++; i < count; i = next++) work(i, worker);
    });
}

}  // namespace hypermlp
