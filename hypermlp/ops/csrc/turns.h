// The order in which row blocks add to sums that they share. Each block of a chain has a number, its turn. At
// every point it waits until all blocks before it have passed, so that each sum has one order of additions,
// whatever the number of threads. A worker takes the blocks of a chain in order, so the block that others
// wait for is always running.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

namespace hypermlp {

class Turns {
  public:
    Turns(int64_t chains, int64_t points)
        : points_(points), passed_(new std::atomic<int64_t>[chains * points]()) {}

    // Call work() when all blocks before `turn` have passed this point of the chain; then pass it.
    template <typename Work>
    void in_order(int64_t chain, int64_t point, int64_t turn, const Work& work) const {
        std::atomic<int64_t>& passed = passed_[chain * points_ + point];
        for (int64_t spins = 0; passed.load(std::memory_order_acquire) != turn; ++spins)
            if (spins > kSpins) std::this_thread::yield();
        work();
        passed.store(turn + 1, std::memory_order_release);
    }

  private:
    static constexpr int64_t kSpins = 1000;
    int64_t points_;
    std::unique_ptr<std::atomic<int64_t>[]> passed_;
};

}  // namespace hypermlp
