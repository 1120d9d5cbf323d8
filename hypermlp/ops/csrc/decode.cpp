// Decode: few queries against many keys are bound by memory, so a query reads K, V and the mixes once, in
// four phases:
// 1. scores: workers take chunks of keys, all heads at once;
// 2. mixes and activation: workers take heads;
// 3. readout: workers take chunks of keys again, into partial sums;
// 4. the partial sums are added in the order of their chunks, so that the result does not depend on timing.
#include <algorithm>

#include "functions.h"
#include "kernels.h"
#include "mix.h"
#include "parallel.h"
#include "scratch.h"

namespace hypermlp {

constexpr int64_t kChunk = 128;  // keys

// The mix of one head for one query.
template <typename T>
struct DecodeMix {
    const T *diag, *left, *right, *gate;
    int64_t rank;

    DecodeMix(const Mix<T>& mix, int64_t batch, int64_t query, int64_t head, Direction direction) {
        const bool straight = direction == Direction::kStraight;
        rank = mix.rank;
        diag = mix.diag + head * mix.slots;
        left = (straight ? mix.left : mix.right) + head * mix.slots * rank;
        right = (straight ? mix.right : mix.left) + head * mix.slots * rank;
        gate = mix.gate.at(batch, query, head);
    }

    // y <- y R. y has one number per visible key, oldest first; inner has room for `rank` numbers.
    void apply(T* y, int64_t count, Layout layout, T* inner) const {
        // In layout "lag" slots run against the order of the keys.
        const bool lag = layout == Layout::kLag;
        const int64_t first = lag ? count - 1 : 0, step = lag ? -1 : 1;
        std::fill(inner, inner + rank, T(0));
        for (int64_t i = 0; i < count; ++i) {
            const T* row = left + (first + step * i) * rank;
            const T value = y[i];
#pragma omp simd
            for (int64_t r = 0; r < rank; ++r) inner[r] += value * row[r];
        }
        for (int64_t r = 0; r < rank; ++r) inner[r] *= gate[r];
        for (int64_t i = 0; i < count; ++i) {
            const int64_t slot = first + step * i;
            const T* row = right + slot * rank;
            T sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t r = 0; r < rank; ++r) sum += inner[r] * row[r];
            y[i] += y[i] * diag[slot] + sum;
        }
    }
};

template <typename T>
struct Decode {
    const Problem<T>& p;
    const Output<T>& output;
    const Strided<const T>& out_gate;
    int64_t rows, chunks, branches;  // rows: (batch, query) pairs
    T* scores;                       // [rows, branches, keys]
    T* partial;                      // [rows, chunks, heads, vo_dim]
    T* inner;                        // [rows, heads, rank]

    Decode(const Problem<T>& problem, const Output<T>& output_, const Strided<const T>& out_gate_,
           Arena& arena)
        : p(problem),
          output(output_),
          out_gate(out_gate_),
          rows(p.batch * p.queries),
          chunks(in_chunks(p)),
          branches(p.branches()),
          scores(arena.take<T>(rows * branches * p.keys)),
          partial(arena.take<T>(rows * chunks * p.heads * p.vo_dim)),
          inner(arena.take<T>(rows * p.heads * rank(p))) {}

    static int64_t in_chunks(const Problem<T>& p) { return (p.keys + kChunk - 1) / kChunk; }
    static int64_t rank(const Problem<T>& p) { return std::max(p.mix1.rank, p.mix2.rank); }
    static size_t need(const Problem<T>& p) {
        const int64_t rows = p.batch * p.queries;
        return Arena::need<T>(rows * p.branches() * p.keys) +
               Arena::need<T>(rows * in_chunks(p) * p.heads * p.vo_dim) +
               Arena::need<T>(rows * p.heads * rank(p));
    }

    int64_t start(int64_t row) const { return p.starts ? p.starts[row] : 0; }
    int64_t end(int64_t row) const { return p.keys - p.queries + row % p.queries + 1; }
    T* score(int64_t row, int64_t branch) const { return scores + (row * branches + branch) * p.keys; }
    T& inverse_norm(int64_t row, int64_t head) const { return output.inverse_norm[head * rows + row]; }

    void chunk_scores(int64_t row, int64_t chunk) const {
        const int64_t from = std::max(start(row), chunk * kChunk);
        const int64_t to = std::min(end(row), (chunk + 1) * kChunk);
        const T *q = p.q.at(row / p.queries, row % p.queries), *k = p.k.at(row / p.queries, 0);
        for (int64_t key = from; key < to; ++key)
            for (int64_t g = 0; g < branches; ++g) {
                const T *query = q + g * p.q.head, *values = k + key * p.k.token + g * p.k.head;
                T sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t d = 0; d < p.qk_dim; ++d) sum += query[d] * values[d];
                score(row, g)[key] = sum;
            }
    }

    void weights(int64_t row, int64_t head) const {
        const int64_t batch = row / p.queries, query = row % p.queries;
        const int64_t count = end(row) - start(row);
        T *gate = score(row, head) + start(row), *room = inner + (row * p.heads + head) * rank(p),
          squares = 0;
        if (p.mix1.exists())
            for (int64_t g = head; g < branches; g += p.heads) {
                const DecodeMix<T> mix(p.mix1, batch, query, g, Direction::kStraight);
                mix.apply(score(row, g) + start(row), count, p.layout, room);
            }
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < count; ++i) squares += gate[i] * gate[i];
        inverse_norm(row, head) = 1 / std::sqrt(squares + T(p.eps));
        const T factor = row_scale(inverse_norm(row, head));
        if (p.glu()) {
            const T* scale = score(row, head + p.heads) + start(row);
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) gate[i] = positive(gate[i]) * softplus(scale[i]) * factor;
        } else {
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) gate[i] = positive(gate[i]) * factor;
        }
        if (p.mix2.exists())
            DecodeMix<T>(p.mix2, batch, query, head, Direction::kTransposed)
                .apply(gate, count, p.layout, room);
    }

    void chunk_readout(int64_t row, int64_t chunk) const {
        const int64_t from = std::max(start(row), chunk * kChunk);
        const int64_t to = std::min(end(row), (chunk + 1) * kChunk);
        const T* v = p.v.at(row / p.queries, 0);
        T* sums = partial + (row * chunks + chunk) * p.heads * p.vo_dim;
        std::fill(sums, sums + p.heads * p.vo_dim, T(0));
        for (int64_t key = from; key < to; ++key)
            for (int64_t head = 0; head < p.heads; ++head) {
                const T* value = v + key * p.v.token + head * p.v.head;
                const T weight = score(row, head)[key];
                T* sum = sums + head * p.vo_dim;
#pragma omp simd
                for (int64_t d = 0; d < p.vo_dim; ++d) sum[d] += weight * value[d];
            }
    }

    void reduce(int64_t row, int64_t head) const {
        T* out = output.out.at(row / p.queries, row % p.queries, head);
        const T factor = after_scale(inverse_norm(row, head));
        std::fill(out, out + p.vo_dim, T(0));
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            const T* sum = partial + ((row * chunks + chunk) * p.heads + head) * p.vo_dim;
#pragma omp simd
            for (int64_t d = 0; d < p.vo_dim; ++d) out[d] += factor * sum[d];
        }
        if (out_gate.data) {
            const T* gate = out_gate.at(row / p.queries, row % p.queries, head);
            for (int64_t d = 0; d < p.vo_dim; ++d) out[d] *= gate[d];
        }
    }

    void run() const {
        const auto by_chunk = [&](auto work) {
            for_ranges(p.threads, rows * chunks, [&](int64_t i) { work(i / chunks, i % chunks); });
        };
        const auto by_head = [&](auto work) {
            for_ranges(p.threads, rows * p.heads, [&](int64_t i) { work(i / p.heads, i % p.heads); });
        };
        by_chunk([&](int64_t row, int64_t chunk) { chunk_scores(row, chunk); });
        by_head([&](int64_t row, int64_t head) { weights(row, head); });
        by_chunk([&](int64_t row, int64_t chunk) { chunk_readout(row, chunk); });
        by_head([&](int64_t row, int64_t head) { reduce(row, head); });
    }
};

template <typename T>
size_t decode_need(const Problem<T>& p) {
    return Decode<T>::need(p);
}
template <typename T>
void decode(const Problem<T>& p, const Output<T>& output, const Strided<const T>& out_gate, Arena& arena) {
    Decode<T>(p, output, out_gate, arena).run();
}
template <typename T>
void decode(const Problem<T>& p, const Output<T>& output) {
    Lease lease(Decode<T>::need(p));
    decode<T>(p, output, {}, lease.arena);
}

template size_t decode_need(const Problem<float>&);
template size_t decode_need(const Problem<double>&);
template void decode(const Problem<float>&, const Output<float>&);
template void decode(const Problem<double>&, const Output<double>&);
template void decode(const Problem<float>&, const Output<float>&, const Strided<const float>&, Arena&);
template void decode(const Problem<double>&, const Output<double>&, const Strided<const double>&, Arena&);

}  // namespace hypermlp
