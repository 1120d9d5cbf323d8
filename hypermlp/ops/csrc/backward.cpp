// Backward: workers take row blocks and recompute them. The blocks of one (batch, head) add to the same
// gradients of keys and values, and those of one head in a group of batch items to the same gradients of
// mixes, in the order of their turns (turns.h). The blocks of a head in a group form a chain. A worker begins
// with a chain of its own and then helps with the others, so there are as many independent tasks as row
// blocks. The gradients of the mixes are kept per group and then added in order.
#include <vector>

#include "functions.h"
#include "heads.h"
#include "kernels.h"
#include "mix_gradients.h"
#include "packs.h"
#include "parallel.h"
#include "turns.h"

namespace hypermlp {

// The scratch of one row block. Buffers of scores have `cells` elements, small ones [rows, rank], wide ones
// [rows, width].
template <typename T>
struct BackwardBuffers {
    T *before[2], *scores[2], *inner1[2], *gated1[2];  // by branch
    T *weights, *grad;
    T *inner2, *gated2, *grad_inner, *grad_gated;
    T *grad_rows, *panels;
    T* keys;          // kDepth keys in panels
    T* inverse_norm;  // [rows]

    // The scratch of one worker.
    static size_t need(const Problem<T>& p) {
        const int64_t rows = std::min(block_rows(p.keys), p.queries);
        return 6 * Arena::need<T>(Block<T>::cells(rows, p.keys)) + 8 * Arena::need<T>(small(p, rows)) +
               2 * Arena::need<T>(wide(p, rows)) + Arena::need<T>(kDepth * padded<T>(p.qk_dim)) +
               Arena::need<T>(rows);
    }
    BackwardBuffers(const Problem<T>& p, const Block<T>& b, Arena own) {
        own.reset();
        for (int branch = 0; branch < 2; ++branch) {
            before[branch] = own.take<T>(b.cells());
            scores[branch] = own.take<T>(b.cells());
            inner1[branch] = own.take<T>(small(p, b.rows));
            gated1[branch] = own.take<T>(small(p, b.rows));
        }
        for (T** buffer : {&weights, &grad}) *buffer = own.take<T>(b.cells());
        for (T** buffer : {&inner2, &gated2, &grad_inner, &grad_gated})
            *buffer = own.take<T>(small(p, b.rows));
        for (T** buffer : {&grad_rows, &panels}) *buffer = own.take<T>(wide(p, b.rows));
        keys = own.take<T>(kDepth * padded<T>(p.qk_dim));
        inverse_norm = own.take<T>(b.rows);
    }

  private:
    static int64_t small(const Problem<T>& p, int64_t rows) {
        return rows * padded<T>(std::max(p.mix1.rank, p.mix2.rank));
    }
    static int64_t wide(const Problem<T>& p, int64_t rows) {
        return rows * padded<T>(std::max(p.vo_dim, p.qk_dim));
    }
};

// Where blocks add to shared sums: values and keys by sections, so that one block can follow another before
// that one has finished; each mix as a whole.
constexpr int64_t kSections = 8, kValuePoints = 0, kKeyPoints = kSections, kPoints = 3 * kSections;
constexpr int64_t kMix1Points = 0, kMix2Point = 2, kMixPoints = 3;

// The keys of a section, a multiple of kTile.
inline int64_t section_keys(int64_t keys) {
    const int64_t least = std::max<int64_t>((keys + kSections - 1) / kSections, 96);
    return (least + kTile - 1) / kTile * kTile;
}

// A row block: its queries, and its turns among the blocks of its batch item and of its group.
struct Rows {
    int64_t batch, first, last, turn, group, group_turn;
};

template <typename T>
struct Backward {
    const Problem<T>& p;
    const Saved<T>& saved;
    const Gradients<T>& grads;
    Panels<T> keys_t, values_t;
    PackedMix<T> mix1, mix2;
    MixSums<T> sums1, sums2;
    Turns turns, mix_turns;

    static size_t need(const Problem<T>& p) {
        const int64_t branches = p.batch * p.branches();
        return Panels<T>::need(branches, p.qk_dim, p.keys) +
               Panels<T>::need(p.batch * p.heads, p.vo_dim, p.keys) +
               PackedMix<T>::need(p.mix1, p.branches(), p.keys, Directions::kBoth) +
               PackedMix<T>::need(p.mix2, p.heads, p.keys, Directions::kBoth) +
               MixSums<T>::need(p.mix1, BatchGroups(p.batch).count, p.branches(), p.keys) +
               MixSums<T>::need(p.mix2, BatchGroups(p.batch).count, p.heads, p.keys);
    }
    Backward(const Problem<T>& problem, const Saved<T>& saved_, const Gradients<T>& grads_, Arena& arena)
        : p(problem),
          saved(saved_),
          grads(grads_),
          keys_t(p.batch, p.branches(), p.qk_dim, p.keys, arena),
          values_t(p.batch, p.heads, p.vo_dim, p.keys, arena),
          mix1(p.mix1, p.branches(), p.keys, p.layout, Directions::kBoth, arena),
          mix2(p.mix2, p.heads, p.keys, p.layout, Directions::kBoth, arena),
          sums1(p.mix1, mix1, BatchGroups(p.batch).count, p.branches(), arena),
          sums2(p.mix2, mix2, BatchGroups(p.batch).count, p.heads, arena),
          turns(p.batch * p.heads, kPoints),
          mix_turns(BatchGroups(p.batch).count * p.heads, kMixPoints) {}

    void pack() const {
        keys_t.pack(p.k, p.batch, PanelRows::kWidth, p.threads);
        values_t.pack(p.v, p.batch, PanelRows::kWidth, p.threads);
        mix1.pack(p.mix1, p.branches(), p.threads);
        mix2.pack(p.mix2, p.heads, p.threads);
    }

    void block(Arena arena, const Rows& rows, int64_t head) const {
        const Block<T> b(p, rows.batch, rows.first, rows.last);
        const BackwardBuffers<T> own(p, b, arena);
        recompute(b, own, rows.batch, head);
        readout_gradient(b, own, rows, head);
        activation_gradient(b, own);
        scores_gradient(b, own, rows, head);
    }

    // Add to the gradients of a mix when it is the block's turn.
    template <typename Add>
    void add_in_order(const MixSums<T>& sums, int64_t point, const Rows& rows, int64_t head,
                      int64_t sums_head, const Add& add) const {
        mix_turns.in_order(rows.group * p.heads + head, point, rows.group_turn, [&] {
            if (rows.group_turn == 0) sums.clear(rows.group, sums_head);
            add();
        });
    }

    // Recompute the scores, before and after the first mix, and the activation, and get the norms.
    void recompute(const Block<T>& b, const BackwardBuffers<T>& own, int64_t batch, int64_t head) const {
        for (int64_t g = head, branch = 0; g < p.branches(); g += p.heads, ++branch) {
            T* target = p.mix1.exists() ? own.before[branch] : own.scores[branch];
            b.scores(widened_rows(p.q, batch, b.first_query, g, b.rows, p.qk_dim, own.panels), p.qk_dim,
                     keys_t.of(batch, g), target);
            if (p.mix1.exists()) {
                const HeadMix<T> mix(p.mix1, mix1, batch, g, Direction::kStraight);
                inner(b, mix, head, 1 + branch * mix.rank, own.before[branch], own.inner1[branch],
                      own.gated1[branch]);
                mix.update(b, own.before[branch], own.gated1[branch], own.scores[branch]);
            }
        }
        for (int64_t row = 0; row < b.rows; ++row) {
            const T *gate = b.aligned(own.scores[0], row), *scale = b.aligned(own.scores[1], row);
            T* activation = b.aligned(own.weights, row);
            const int64_t from = b.begin(row), to = b.vectors_end(row);
            if (p.glu()) {
#pragma omp simd
                for (int64_t c = from; c < to; ++c) activation[c] = positive(gate[c]) * softplus(scale[c]);
            } else {
#pragma omp simd
                for (int64_t c = from; c < to; ++c) activation[c] = positive(gate[c]);
            }
        }
        b.mask(own.weights);
        for (int64_t row = 0; row < b.rows; ++row)
            own.inverse_norm[row] =
                p.queries > kDecodeQueries ? *kept(b, batch, head, row) : inverse_norm(b, own, row);
    }
    // Get mix.inner() from what was kept of each row, at `first`, or compute it from the buffer.
    void inner(const Block<T>& b, const HeadMix<T>& mix, int64_t head, int64_t first, const T* buffer,
               T* inner, T* gated) const {
        if (!saved.has_inner) return mix.inner(b, buffer, inner, gated);
        for (int64_t row = 0; row < b.rows; ++row)
            copy_row(kept(b, mix.batch, head, row) + first, mix.rank, inner + row * padded<T>(mix.rank));
        mix.apply_gate(b, inner, gated);
    }
    const T* kept(const Block<T>& b, int64_t batch, int64_t head, int64_t row) const {
        return saved.kept.at(batch, b.first_query + row, head);
    }

    // Return 1 / rho of the recomputed scores. The norm of a row that sees one key cancels in its gradient,
    // so it has to fit these scores to the last bit, and decode() may have rounded them differently.
    T inverse_norm(const Block<T>& b, const BackwardBuffers<T>& own, int64_t row) const {
        const T* gate = b.aligned(own.scores[0], row);
        T sum = 0;
        for (int64_t c = b.begin(row); c < b.end(row); ++c) sum += gate[c] * gate[c];
        return 1 / std::sqrt(sum + T(p.eps));
    }

    // The mixed activation gives the gradient of v; then the buffer `grad` takes the gradient of the
    // activation.
    void readout_gradient(const Block<T>& b, const BackwardBuffers<T>& own, const Rows& block,
                          int64_t head) const {
        const int64_t batch = block.batch;
        // Rows of the output's gradient, over rho.
        T* grad_rows = own.grad_rows;
        for (int64_t row = 0; row < b.rows; ++row) {
            T* to = grad_rows + row * p.vo_dim;
            saved.grad_out.read(batch, b.first_query + row, head, p.vo_dim, to);
            for (int64_t d = 0; d < p.vo_dim; ++d) to[d] *= own.inverse_norm[row];
        }
        T* mixed = own.weights;
        if (p.mix2.exists()) {
            const HeadMix<T> mix(p.mix2, mix2, batch, head, Direction::kTransposed);
            mixed = own.grad;
            inner(b, mix, head, kept_of_mix2(p), own.weights, own.inner2, own.gated2);
            mix.update(b, own.weights, own.gated2, mixed);
        }
        const View<T> rows{grad_rows, p.vo_dim, 1};
        add_outer(b, mixed, rows, p.vo_dim, own.panels, grads.v.at(batch, 0, head), grads.v.token, block,
                  head, kValuePoints);
        b.scores(rows, p.vo_dim, values_t.of(batch, head), own.grad);
        if (p.mix2.exists()) {
            const HeadMixGrad<T> mix(p.mix2, mix2, sums2, grads.mix2.gate, batch, block.group, head,
                                     Direction::kTransposed);
            mix.apply(b, own.weights, own.inner2, own.gated2, own.grad, own.grad_inner, own.grad_gated,
                      [&](const auto& add) { add_in_order(sums2, kMix2Point, block, head, head, add); });
        }
    }

    // Replace the scores after the first mix by their gradients.
    void activation_gradient(const Block<T>& b, const BackwardBuffers<T>& own) const {
        for (int64_t row = 0; row < b.rows; ++row) {
            T *gate = b.aligned(own.scores[0], row), *scale = b.aligned(own.scores[1], row);
            const T *g = b.aligned(own.grad, row), *activation = b.aligned(own.weights, row);
            const int64_t from = b.begin(row), to = b.vectors_end(row);
            T dot = 0;  // <do, o>
#pragma omp simd reduction(+ : dot)
            for (int64_t c = from; c < to; ++c) dot += g[c] * activation[c];
            const T norm = -dot * own.inverse_norm[row] * own.inverse_norm[row];
            if (p.glu()) {
#pragma omp simd
                for (int64_t c = from; c < to; ++c) {
                    // `through` is computed for both signs of h, so that the loop vectorises.
                    const T h = gate[c], s = scale[c], through = g[c] * softplus(s);
                    gate[c] = (h > 0 ? through : T(0)) + norm * h;
                    scale[c] = g[c] * positive(h) * sigmoid(s);
                }
            } else {
#pragma omp simd
                for (int64_t c = from; c < to; ++c) gate[c] = (gate[c] > 0 ? g[c] : T(0)) + norm * gate[c];
            }
            // A norm that is not finite must not reach cells that the row does not see.
            Vector<T>::store(gate + b.end(row), typename Vector<T>::type{});
        }
    }

    // Go back through the first mix to q and k.
    void scores_gradient(const Block<T>& b, const BackwardBuffers<T>& own, const Rows& block,
                         int64_t head) const {
        const int64_t batch = block.batch;
        for (int64_t g = head, branch = 0; g < p.branches(); g += p.heads, ++branch) {
            T* scores = own.scores[branch];
            if (p.mix1.exists()) {
                const HeadMixGrad<T> mix(p.mix1, mix1, sums1, grads.mix1.gate, batch, block.group, g,
                                         Direction::kStraight);
                mix.apply(b, own.before[branch], own.inner1[branch], own.gated1[branch], scores,
                          own.grad_inner, own.grad_gated, [&](const auto& add) {
                              add_in_order(sums1, kMix1Points + branch, block, head, g, add);
                          });
            }
            query_gradient(b, scores, batch, g, own.keys);
            // The rows of the output's gradient are not needed any more.
            const View<T> q = widened_rows(p.q, batch, b.first_query, g, b.rows, p.qk_dim, own.grad_rows);
            add_outer(b, scores, q, p.qk_dim, own.panels, grads.k.at(batch, 0, g), grads.k.token, block, head,
                      kKeyPoints + branch * kSections);
        }
    }

    // The gradient of q is the gradient of the scores times the keys, of which `panels` holds kDepth at a
    // time.
    void query_gradient(const Block<T>& b, T* scores, int64_t batch, int64_t g, T* panels) const {
        for (int64_t key = 0; key < b.columns; key += kDepth) {
            const int64_t depth = std::min(kDepth, b.columns - key);
            pack_tokens(p.k, batch, b.first_key + key, g, depth, p.qk_dim, panels);
            const auto add = [&](auto into) {
                multiply<T, into, Causal::kLeft>(
                    b.rows, p.qk_dim, depth, {b.ordinary(scores) + key, b.ld, 1}, panels, depth * kPanel<T>,
                    grads.q.at(batch, b.first_query, g), grads.q.token, b.slack() - key);
            };
            if (key == 0)
                add(std::integral_constant<Into, Into::kNew>());
            else
                add(std::integral_constant<Into, Into::kAdd>());
        }
    }

    // sums[keys, width] += cells^T rows, over the rows of the block, section by section of the keys, whose
    // points begin at `point`. panels has room for [rows, width].
    void add_outer(const Block<T>& b, T* cells, View<T> rows, int64_t width, T* panels, T* sums, int64_t ld,
                   const Rows& block, int64_t head, int64_t point) const {
        const int64_t step = b.rows * kPanel<T>, section = section_keys(p.keys);
        for (int64_t d = 0; d < width; d += kPanel<T>)
            pack_panel<T>(b.rows, width, rows, d, panels + d / kPanel<T> * step);
        for (int64_t i = 0; i * section < p.keys; ++i)
            turns.in_order(block.batch * p.heads + head, point + i, block.turn, [&] {
                const int64_t begin = i * section, end = std::min(begin + section, p.keys);
                if (block.turn == 0)
                    for (int64_t key = begin; key < end; ++key) std::fill_n(sums + key * ld, width, T(0));
                const int64_t first = std::max(begin, b.first_key) - b.first_key;
                const int64_t last = std::min(end - b.first_key, b.columns);
                if (first < last)
                    multiply<T, Into::kAdd, Causal::kTransposed>(
                        last - first, width, b.rows, {b.ordinary(cells) + first, 1, b.ld}, panels, step,
                        sums + (b.first_key + first) * ld, ld, b.slack() - first);
            });
    }
};

template <typename T>
void backward(const Problem<T>& p, const Saved<T>& saved, const Gradients<T>& grads) {
    // The row blocks of each group, item by item, longest rows first.
    const BatchGroups groups(p.batch);
    std::vector<std::vector<Rows>> blocks(groups.count);
    int64_t count = 0;
    for (int64_t group = 0; group < groups.count; ++group) {
        for (int64_t batch = groups.begin(group); batch < groups.begin(group + 1); ++batch) {
            std::vector<Rows> item;
            for (int64_t first = 0; first < p.queries; first = item.back().last)
                item.push_back({batch, first, block_end(p, block_rows(p.keys), batch, first), 0, group, 0});
            std::reverse(item.begin(), item.end());
            for (size_t turn = 0; turn < item.size(); ++turn) {
                item[turn].turn = static_cast<int64_t>(turn);
                item[turn].group_turn = static_cast<int64_t>(blocks[group].size());
                blocks[group].push_back(item[turn]);
            }
        }
        count += static_cast<int64_t>(blocks[group].size()) * p.heads;
    }
    if (by_heads(p, Backward<T>::need(p), count)) {
        for (int64_t head = 0; head < p.heads; ++head) {
            const OneHead<T> one(p, head);
            backward(one(p), one(saved), one(grads));
        }
        return;
    }
    const int64_t workers = std::min(p.threads, count), chains = groups.count * p.heads;
    const size_t own = BackwardBuffers<T>::need(p);
    Lease lease(Backward<T>::need(p) + workers * own);
    const Backward<T> work(p, saved, grads, lease.arena);
    std::vector<Arena> arenas;
    for (int64_t worker = 0; worker < workers; ++worker) arenas.push_back(lease.arena.part(own));
    work.pack();
    std::vector<std::atomic<int64_t>> next(chains);
    parallel(workers, [&](int64_t worker) {
        for (int64_t i = 0; i < chains; ++i) {
            const int64_t chain = (i + worker * chains / workers) % chains;
            const auto& rows = blocks[chain / p.heads];
            const int64_t turns = static_cast<int64_t>(rows.size());
            for (int64_t turn = next[chain]++; turn < turns; turn = next[chain]++)
                work.block(arenas[worker], rows[turn], chain % p.heads);
        }
    });
    work.sums1.store(grads.mix1, p.mix1, work.mix1, p.threads);
    work.sums2.store(grads.mix2, p.mix2, work.mix2, p.threads);
}

int64_t backward_tasks(int64_t batch, int64_t heads, int64_t queries, int64_t keys) {
    const int64_t rows = block_rows(keys);
    return batch * heads * ((queries + rows - 1) / rows);
}

template void backward(const Problem<float>&, const Saved<float>&, const Gradients<float>&);
template void backward(const Problem<double>&, const Saved<double>&, const Gradients<double>&);

}  // namespace hypermlp
