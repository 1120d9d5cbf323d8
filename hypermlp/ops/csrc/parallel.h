// The only way in which the kernels use several threads. No result may depend on the number of threads or on
// timing: every sum has a fixed order.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <thread>

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

// Call work(phase, i) for each i in [0, counts[phase]), phase after phase: a phase begins when the one before
// it is complete. All phases are one parallel region, since waking threads costs more than a small phase. A
// worker waits only for work that another one has begun, so any number of workers may be late or absent.
template <size_t N, typename Work>
void in_phases(int64_t threads, const std::array<int64_t, N>& counts, const Work& work) {
    struct Progress {
        alignas(64) std::atomic<int64_t> next{0};
        alignas(64) std::atomic<int64_t> done{0};
    };
    Progress progress[N];
    const int64_t most = *std::max_element(counts.begin(), counts.end());
    parallel(std::min(threads, most), [&](int64_t) {
        for (size_t phase = 0; phase < N; ++phase) {
            Progress& own = progress[phase];
            const int64_t count = counts[phase];
            int64_t finished = 0;
            for (int64_t i = own.next++; i < count; i = own.next++, ++finished) work(phase, i);
            own.done.fetch_add(finished, std::memory_order_acq_rel);
            constexpr int kPatience = 4096;  // then let other threads run: there may be fewer processors
            for (int turns = 0; own.done.load(std::memory_order_acquire) < count; ++turns)
                if (turns >= kPatience) std::this_thread::yield();
        }
    });
}

}  // namespace hypermlp
