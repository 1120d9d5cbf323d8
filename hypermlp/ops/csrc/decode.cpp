// The operator for few queries.
#include "decode.h"

#include "parallel.h"

namespace hypermlp {

template <typename T>
void decode(const Problem<T>& p, const Output<T>& output) {
    const int64_t width = p.branches() * p.qk_dim, size = p.batch * p.queries * width;
    Lease lease(Arena::need<T>(size) + Decode<T>::need(p, 0));
    T* queries = lease.arena.take<T>(size);
    for (int64_t row = 0; row < p.batch * p.queries; ++row)
        for (int64_t g = 0; g < p.branches(); ++g)
            p.q.read(row / p.queries, row % p.queries, g, p.qk_dim, queries + row * width + g * p.qk_dim);
    const Decode<T> work(p, queries, output, {}, {}, lease.arena);
    std::array<int64_t, Decode<T>::kPhases> counts;
    for (size_t phase = 0; phase < counts.size(); ++phase) counts[phase] = work.count(phase);
    in_phases(useful_threads(p.threads, work.reads()), counts,
              [&](size_t phase, int64_t i) { work.run(phase, i); });
}

template void decode(const Problem<float>&, const Output<float>&);
template void decode(const Problem<double>&, const Output<double>&);

}  // namespace hypermlp
