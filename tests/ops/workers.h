// The threads of the programs that drive the kernels without PyTorch.
#pragma once

#include <thread>
#include <vector>

#include "parallel.h"

void hypermlp::run_workers(int64_t workers, void (*work)(void* context, int64_t worker), void* context) {
    std::vector<std::thread> threads;
    for (int64_t worker = 1; worker < workers; ++worker) threads.emplace_back(work, context, worker);
    work(context, 0);
    for (std::thread& thread : threads) thread.join();
}
