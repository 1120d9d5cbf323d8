// Forward: workers take (batch, head, row block) items, those with the longest rows first. Each item lives in
// its worker's part of the scratch memory.
#include <vector>

#include "functions.h"
#include "heads.h"
#include "kernels.h"
#include "mix.h"
#include "packs.h"
#include "parallel.h"

namespace hypermlp {

template <typename T>
struct Forward {
    const Problem<T>& p;
    const Output<T>& output;
    Panels<T> keys, values;
    PackedMix<T> mix1, mix2;

    static size_t need(const Problem<T>& p) {
        return Panels<T>::need(p.batch * p.branches(), p.qk_dim, p.keys) +
               Panels<T>::need(p.batch * p.heads, p.keys, p.vo_dim) +
               PackedMix<T>::need(p.mix1, p.branches(), p.keys, Directions::kStraight) +
               PackedMix<T>::need(p.mix2, p.heads, p.keys, Directions::kTransposed);
    }
    Forward(const Problem<T>& problem, const Output<T>& output_, Arena& arena)
        : p(problem),
          output(output_),
          keys(p.batch, p.branches(), p.qk_dim, p.keys, arena),
          values(p.batch, p.heads, p.keys, p.vo_dim, arena),
          mix1(p.mix1, p.branches(), p.keys, p.layout, Directions::kStraight, arena),
          mix2(p.mix2, p.heads, p.keys, p.layout, Directions::kTransposed, arena) {}

    void pack() const {
        keys.pack(p.k, p.batch, PanelRows::kWidth, p.threads);
        values.pack(p.v, p.batch, PanelRows::kTokens, p.threads);
        mix1.pack(p.mix1, p.branches(), p.threads);
        mix2.pack(p.mix2, p.heads, p.threads);
    }

    // The scratch of one worker.
    static size_t own_need(const Problem<T>& p) {
        const int64_t rows = std::min(block_rows(p.keys), p.queries);
        return 2 * Arena::need<T>(Block<T>::cells(rows, p.keys)) +
               2 * Arena::need<T>(rows * padded<T>(std::max(p.mix1.rank, p.mix2.rank))) +
               Arena::need<T>(rows * p.qk_dim);
    }

    void item(Arena own, int64_t batch, int64_t head, int64_t first, int64_t last) const {
        const Block<T> b(p, batch, first, last);
        const int64_t small = b.rows * padded<T>(std::max(p.mix1.rank, p.mix2.rank));
        own.reset();
        T* scores[2] = {own.take<T>(b.cells()), own.take<T>(b.cells())};
        T *inner = own.take<T>(small), *gated = own.take<T>(small), *room = own.take<T>(b.rows * p.qk_dim);
        const auto kept = [&](int64_t row) { return output.kept.at(batch, first + row, head); };

        for (int64_t g = head, branch = 0; g < p.branches(); g += p.heads, ++branch) {
            b.scores(widened_rows(p.q, batch, first, g, b.rows, p.qk_dim, room), p.qk_dim, keys.of(batch, g),
                     scores[branch]);
            if (p.mix1.exists()) {
                const HeadMix<T> mix(p.mix1, mix1, batch, g, Direction::kStraight);
                mix.inner(b, scores[branch], inner, gated);
                for (int64_t row = 0; output.keeps_inner && row < b.rows; ++row)
                    copy_row(inner + row * padded<T>(mix.rank), mix.rank, kept(row) + 1 + branch * mix.rank);
                mix.update(b, scores[branch], gated, scores[branch]);
            }
        }

        for (int64_t row = 0; row < b.rows; ++row) {
            T* gate = b.aligned(scores[0], row);
            *kept(row) = activate(b.begin(row), b.vectors_end(row), gate, b.aligned(scores[1], row));
            const T scale = row_scale(*kept(row));
            if (scale != 1)
                for (int64_t c = b.begin(row); c < b.end(row); ++c) gate[c] *= scale;
        }

        if (p.mix2.exists()) {
            const HeadMix<T> mix(p.mix2, mix2, batch, head, Direction::kTransposed);
            mix.inner(b, scores[0], inner, gated);
            for (int64_t row = 0; output.keeps_inner && row < b.rows; ++row) {
                T* to = kept(row) + kept_of_mix2(p);
                copy_row(inner + row * padded<T>(mix.rank), mix.rank, to);
                const T scale = row_scale(*kept(row));
                if (scale != 1 && scale != 0)
                    for (int64_t r = 0; r < mix.rank; ++r) to[r] /= scale;
            }
            mix.update(b, scores[0], gated, scores[0]);
        }
        T* out = output.out.at(batch, first, head);
        const int64_t ld = output.out.token;
        multiply<T, Into::kNew, Causal::kLeft>(b.rows, p.vo_dim, b.columns, {b.ordinary(scores[0]), b.ld, 1},
                                               values.of(batch, head) + b.first_key * kPanel<T>,
                                               values.step(), out, ld, b.slack());
        for (int64_t row = 0; row < b.rows; ++row) {
            const T factor = after_scale(*kept(row));
            for (int64_t d = 0; d < p.vo_dim; ++d) out[row * ld + d] *= factor;
        }
    }

    // Replace gate by the activation, not yet divided by the norm. Return 1 / rho.
    T activate(int64_t from, int64_t to, T* gate, const T* scale) const {
        T sum = 0;
        if (p.glu()) {
#pragma omp simd reduction(+ : sum)
            for (int64_t c = from; c < to; ++c) {
                sum += gate[c] * gate[c];
                gate[c] = positive(gate[c]) * softplus(scale[c]);
            }
        } else {
#pragma omp simd reduction(+ : sum)
            for (int64_t c = from; c < to; ++c) {
                sum += gate[c] * gate[c];
                gate[c] = positive(gate[c]);
            }
        }
        return 1 / std::sqrt(sum + T(p.eps));
    }
};

struct Item {
    int64_t batch, first, last;
};

template <typename T>
std::vector<Item> longest_first(const Problem<T>& p) {
    std::vector<Item> items;
    for (int64_t batch = 0; batch < p.batch; ++batch)
        for (int64_t first = 0; first < p.queries;) {
            const int64_t last = block_end(p, block_rows(p.keys), batch, first);
            items.push_back({batch, first, last});
            first = last;
        }
    std::stable_sort(items.begin(), items.end(),
                     [](const Item& a, const Item& b) { return a.last > b.last; });
    return items;
}

template <typename T>
void forward(const Problem<T>& p, const Output<T>& output) {
    const std::vector<Item> items = longest_first(p);
    const int64_t count = static_cast<int64_t>(items.size()) * p.heads;
    if (by_heads(p, Forward<T>::need(p), count)) {
        for (int64_t head = 0; head < p.heads; ++head) {
            const OneHead<T> one(p, head);
            forward(one(p), one(output));
        }
        return;
    }
    const int64_t workers = std::min(p.threads, count);
    const size_t own = Forward<T>::own_need(p);
    Lease lease(Forward<T>::need(p) + workers * own);
    const Forward<T> work(p, output, lease.arena);
    std::vector<Arena> arenas;
    for (int64_t worker = 0; worker < workers; ++worker) arenas.push_back(lease.arena.part(own));
    work.pack();
    for_each(workers, count, [&](int64_t i, int64_t worker) {
        const Item& item = items[i / p.heads];
        work.item(arenas[worker], item.batch, i % p.heads, item.first, item.last);
    });
}

template void forward(const Problem<float>&, const Output<float>&);
template void forward(const Problem<double>&, const Output<double>&);

}  // namespace hypermlp
