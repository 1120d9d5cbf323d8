// Backward: threads take (batch, head) items. An item walks its row blocks, recomputes them and adds up its
// gradients in place. No two threads write the same number, and the gradients of the mixes are kept per batch
// item and then added in order, so the result does not depend on timing.
#include <atomic>

#include "functions.h"
#include "kernels.h"
#include "mix.h"
#include "packs.h"

namespace hypermlp {

// Gradients of the parameters of one mix, for every (batch, head), in the kernels' order of slots.
template <typename T>
struct MixSums {
    int64_t heads, length, rank;
    T* scale = nullptr;                   // [batch, heads, length]
    T *left = nullptr, *right = nullptr;  // [batch, heads, length, rank]

    static size_t need(const Mix<T>& mix, int64_t batch, int64_t heads, int64_t keys) {
        if (!mix.exists()) return 0;
        const int64_t rows = batch * heads * padded<T>(std::min(mix.slots, keys));
        return Scratch::need<T>(rows) + 2 * Scratch::need<T>(rows * mix.rank);
    }
    MixSums(const Mix<T>& mix, const PackedMix<T>& packed, int64_t batch, int64_t heads_, Scratch& scratch)
        : heads(heads_), length(packed.length), rank(packed.rank) {
        if (!mix.exists()) return;
        const int64_t rows = batch * heads * length;
        scale = scratch.take<T>(rows);
        left = scratch.take<T>(rows * rank);
        right = scratch.take<T>(rows * rank);
    }
    void clear(int64_t batch, int64_t head) const {
        const int64_t first = (batch * heads + head) * length;
        std::fill_n(scale + first, length, T(0));
        std::fill_n(left + first * rank, length * rank, T(0));
        std::fill_n(right + first * rank, length * rank, T(0));
    }
    // Add up the batch, into the order of slots of the parameters.
    void store(const MixGradients<T>& grads, int64_t slots, const PackedMix<T>& packed, int64_t batch,
               int64_t head) const {
        store(scale, 1, grads.diag, slots, packed, batch, head);
        store(left, rank, grads.left, slots, packed, batch, head);
        store(right, rank, grads.right, slots, packed, batch, head);
    }

  private:
    void store(const T* sums, int64_t width, T* to, int64_t slots, const PackedMix<T>& packed, int64_t batch,
               int64_t head) const {
        T* out = to + head * slots * width;
        std::fill_n(out, slots * width, T(0));
        for (int64_t b = 0; b < batch; ++b) {
            const T* from = sums + (b * heads + head) * length * width;
            for (int64_t row = 0; row < length; ++row) {
                if (packed.slot(row) >= packed.used) continue;
                for (int64_t x = 0; x < width; ++x)
                    out[packed.slot(row) * width + x] += from[row * width + x];
            }
        }
    }
};

// The backward of one mix, for one head.
template <typename T>
struct HeadMixGrad {
    HeadMix<T> mix, reversed;
    T *scale, *left, *right;
    Strided<T> gate;

    HeadMixGrad(const Mix<T>& m, const PackedMix<T>& packed, const MixSums<T>& sums,
                const Strided<T>& grad_gate, int64_t batch, int64_t head, Direction direction)
        : mix(m, packed, batch, head, direction),
          reversed(m, packed, batch, head, opposite(direction)),
          gate(grad_gate) {
        const int64_t first = (batch * sums.heads + head) * sums.length;
        const bool straight = direction == Direction::kStraight;
        scale = sums.scale + first;
        left = (straight ? sums.left : sums.right) + first * m.rank;
        right = (straight ? sums.right : sums.left) + first * m.rank;
    }

    // Replace the gradient of y R by that of y, and add to those of the parameters. y is the input of the
    // mix; inner and gated come from its forward; panels has room for [rows, rank].
    void apply(const Block<T>& b, const T* y, const T* inner, const T* gated, T* grad, T* grad_inner,
               T* grad_gated, T* panels) const {
        const int64_t skip = mix.first_column(b), row0 = mix.first_row(b), ld = padded<T>(mix.rank);
        for (int64_t row = 0; row < b.rows; ++row) {
            const T *cells = b.aligned(y, row) + skip, *grads = b.aligned(grad, row) + skip;
            const int64_t from = std::max<int64_t>(b.begin(row) - skip, 0), to = b.end(row) - skip;
            T* sums = scale + row0;
#pragma omp simd
            for (int64_t c = from; c < to; ++c) sums[c] += cells[c] * grads[c];
        }
        outer(b, grad, gated, panels, right + row0 * mix.rank);
        reversed.inner(b, grad, grad_inner, grad_gated);
        outer(b, y, grad_gated, panels, left + row0 * mix.rank);
        reversed.update(b, grad, grad_gated, grad);
        for (int64_t row = 0; row < b.rows; ++row) {
            T* g = gate.at(mix.batch, b.first_query + row, mix.head);
            for (int64_t r = 0; r < mix.rank; ++r) g[r] = grad_inner[row * ld + r] * inner[row * ld + r];
        }
    }

  private:
    // sums[width, rank] += cells^T small, over the rows of the block
    void outer(const Block<T>& b, const T* cells, const T* small, T* panels, T* sums) const {
        const int64_t ld = padded<T>(mix.rank), step = b.rows * kPanel<T>;
        for (int64_t r = 0; r < mix.rank; r += kPanel<T>)
            pack_panel<T>(b.rows, mix.rank, {small, ld, 1}, r, panels + r / kPanel<T> * step);
        const View<T> view = mix.view(b, cells);
        multiply<T, Into::kAdd>(mix.width(b), mix.rank, b.rows, {view.data, view.column, view.row}, panels,
                                step, sums, mix.rank);
    }
};

// The scratch of one row block. Buffers of scores have `cells` elements, small ones [rows, rank], wide ones
// [rows, width].
template <typename T>
struct BackwardBuffers {
    T *before[2], *scores[2], *inner1[2], *gated1[2];  // by branch
    T *weights, *grad;
    T *inner2, *gated2, *grad_inner, *grad_gated, *small_panels;
    T *grad_rows, *panels;

    BackwardBuffers(const Problem<T>& p, const Block<T>& b, Scratch& scratch) {
        const int64_t small = b.rows * padded<T>(std::max(p.mix1.rank, p.mix2.rank));
        const int64_t wide = b.rows * padded<T>(std::max(p.vo_dim, p.qk_dim));
        scratch.reserve(6 * Scratch::need<T>(b.cells()) + 9 * Scratch::need<T>(small) +
                        2 * Scratch::need<T>(wide));
        for (int branch = 0; branch < 2; ++branch) {
            before[branch] = scratch.take<T>(b.cells());
            scores[branch] = scratch.take<T>(b.cells());
            inner1[branch] = scratch.take<T>(small);
            gated1[branch] = scratch.take<T>(small);
        }
        for (T** buffer : {&weights, &grad}) *buffer = scratch.take<T>(b.cells());
        for (T** buffer : {&inner2, &gated2, &grad_inner, &grad_gated, &small_panels})
            *buffer = scratch.take<T>(small);
        for (T** buffer : {&grad_rows, &panels}) *buffer = scratch.take<T>(wide);
    }
};

template <typename T>
struct Backward {
    const Problem<T>& p;
    const Saved<T>& saved;
    const Gradients<T>& grads;
    Panels<T> keys, keys_t, values_t;
    PackedMix<T> mix1, mix2;
    MixSums<T> sums1, sums2;

    static size_t need(const Problem<T>& p) {
        const int64_t branches = p.batch * p.branches();
        return Panels<T>::need(branches, p.keys, p.qk_dim) + Panels<T>::need(branches, p.qk_dim, p.keys) +
               Panels<T>::need(p.batch * p.heads, p.vo_dim, p.keys) +
               PackedMix<T>::need(p.mix1, p.branches(), p.keys, Directions::kBoth) +
               PackedMix<T>::need(p.mix2, p.heads, p.keys, Directions::kBoth) +
               MixSums<T>::need(p.mix1, p.batch, p.branches(), p.keys) +
               MixSums<T>::need(p.mix2, p.batch, p.heads, p.keys);
    }
    Backward(const Problem<T>& problem, const Saved<T>& saved_, const Gradients<T>& grads_, Scratch& scratch)
        : p(problem),
          saved(saved_),
          grads(grads_),
          keys(p.batch, p.branches(), p.keys, p.qk_dim, scratch),
          keys_t(p.batch, p.branches(), p.qk_dim, p.keys, scratch),
          values_t(p.batch, p.heads, p.vo_dim, p.keys, scratch),
          mix1(p.mix1, p.branches(), p.keys, p.layout, Directions::kBoth, scratch),
          mix2(p.mix2, p.heads, p.keys, p.layout, Directions::kBoth, scratch),
          sums1(p.mix1, mix1, p.batch, p.branches(), scratch),
          sums2(p.mix2, mix2, p.batch, p.heads, scratch) {}

    void block(Scratch& scratch, int64_t batch, int64_t head, int64_t first, int64_t last) const {
        const Block<T> b(p, batch, first, last);
        const BackwardBuffers<T> own(p, b, scratch);
        const T* inverse_norm = saved.inverse_norm + (head * p.batch + batch) * p.queries + first;
        recompute(b, own, batch, head);
        readout_gradient(b, own, inverse_norm, batch, head);
        activation_gradient(b, own, inverse_norm);
        scores_gradient(b, own, batch, head);
    }

    // Recompute the scores, before and after the first mix, and the activation.
    void recompute(const Block<T>& b, const BackwardBuffers<T>& own, int64_t batch, int64_t head) const {
        for (int64_t g = head, branch = 0; g < p.branches(); g += p.heads, ++branch) {
            T* target = p.mix1.exists() ? own.before[branch] : own.scores[branch];
            b.scores({p.q.at(batch, b.first_query, g), p.q.token, 1}, p.qk_dim, keys_t.of(batch, g), target);
            if (p.mix1.exists()) {
                const HeadMix<T> mix(p.mix1, mix1, batch, g, Direction::kStraight);
                mix.inner(b, own.before[branch], own.inner1[branch], own.gated1[branch]);
                mix.update(b, own.before[branch], own.gated1[branch], own.scores[branch]);
            }
        }
        for (int64_t row = 0; row < b.rows; ++row) {
            const T *gate = b.aligned(own.scores[0], row), *scale = b.aligned(own.scores[1], row);
            T* activation = b.aligned(own.weights, row);
            const int64_t from = b.begin(row), to = b.end(row);
            if (p.glu()) {
#pragma omp simd
                for (int64_t c = from; c < to; ++c) activation[c] = positive(gate[c]) * softplus(scale[c]);
            } else {
#pragma omp simd
                for (int64_t c = from; c < to; ++c) activation[c] = positive(gate[c]);
            }
        }
        b.mask(own.weights);
    }

    // The mixed activation gives the gradient of v; then the buffer `grad` takes the gradient of the
    // activation.
    void readout_gradient(const Block<T>& b, const BackwardBuffers<T>& own, const T* inverse_norm,
                          int64_t batch, int64_t head) const {
        // Rows of the output's gradient, over rho.
        T* grad_rows = own.grad_rows;
        for (int64_t row = 0; row < b.rows; ++row) {
            const T* g = saved.grad_out.at(batch, b.first_query + row, head);
            for (int64_t d = 0; d < p.vo_dim; ++d) grad_rows[row * p.vo_dim + d] = g[d] * inverse_norm[row];
        }
        T* mixed = own.weights;
        if (p.mix2.exists()) {
            const HeadMix<T> mix(p.mix2, mix2, batch, head, Direction::kTransposed);
            mixed = own.grad;
            mix.inner(b, own.weights, own.inner2, own.gated2);
            mix.update(b, own.weights, own.gated2, mixed);
        }
        const View<T> rows{grad_rows, p.vo_dim, 1};
        add_outer(b, mixed, rows, p.vo_dim, own.panels, grads.v.at(batch, b.first_key, head), grads.v.token);
        b.scores(rows, p.vo_dim, values_t.of(batch, head), own.grad);
        if (p.mix2.exists()) {
            const HeadMixGrad<T> mix(p.mix2, mix2, sums2, grads.mix2.gate, batch, head,
                                     Direction::kTransposed);
            mix.apply(b, own.weights, own.inner2, own.gated2, own.grad, own.grad_inner, own.grad_gated,
                      own.small_panels);
        }
    }

    // Replace the scores after the first mix by their gradients.
    void activation_gradient(const Block<T>& b, const BackwardBuffers<T>& own, const T* inverse_norm) const {
        for (int64_t row = 0; row < b.rows; ++row) {
            T *gate = b.aligned(own.scores[0], row), *scale = b.aligned(own.scores[1], row);
            const T *g = b.aligned(own.grad, row), *activation = b.aligned(own.weights, row);
            const int64_t from = b.begin(row), to = b.end(row);
            T dot = 0;  // <do, o>
#pragma omp simd reduction(+ : dot)
            for (int64_t c = from; c < to; ++c) dot += g[c] * activation[c];
            const T norm = -dot * inverse_norm[row] * inverse_norm[row];
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
        }
    }

    // Go back through the first mix to q and k.
    void scores_gradient(const Block<T>& b, const BackwardBuffers<T>& own, int64_t batch,
                         int64_t head) const {
        for (int64_t g = head, branch = 0; g < p.branches(); g += p.heads, ++branch) {
            T* scores = own.scores[branch];
            if (p.mix1.exists()) {
                const HeadMixGrad<T> mix(p.mix1, mix1, sums1, grads.mix1.gate, batch, g,
                                         Direction::kStraight);
                mix.apply(b, own.before[branch], own.inner1[branch], own.gated1[branch], scores,
                          own.grad_inner, own.grad_gated, own.small_panels);
            }
            const T* own_keys = keys.of(batch, g) + b.first_key * kPanel<T>;
            multiply<T, Into::kNew, Causal::kLeft>(b.rows, p.qk_dim, b.columns, {b.ordinary(scores), b.ld, 1},
                                                   own_keys, keys.step(), grads.q.at(batch, b.first_query, g),
                                                   grads.q.token, b.slack());
            const View<T> q{p.q.at(batch, b.first_query, g), p.q.token, 1};
            add_outer(b, scores, q, p.qk_dim, own.panels, grads.k.at(batch, b.first_key, g), grads.k.token);
        }
    }

    // sums[keys, width] += cells^T rows, over the rows of the block. panels has room for [rows, width].
    void add_outer(const Block<T>& b, T* cells, View<T> rows, int64_t width, T* panels, T* sums,
                   int64_t ld) const {
        const int64_t step = b.rows * kPanel<T>;
        for (int64_t d = 0; d < width; d += kPanel<T>)
            pack_panel<T>(b.rows, width, rows, d, panels + d / kPanel<T> * step);
        multiply<T, Into::kAdd, Causal::kTransposed>(b.columns, width, b.rows, {b.ordinary(cells), 1, b.ld},
                                                     panels, step, sums, ld, b.slack());
    }

    void item(Scratch& scratch, int64_t batch, int64_t head) const {
        for (int64_t g = head; g < p.branches(); g += p.heads) {
            clear(grads.k.at(batch, 0, g), grads.k.token, p.qk_dim);
            if (p.mix1.exists()) sums1.clear(batch, g);
        }
        clear(grads.v.at(batch, 0, head), grads.v.token, p.vo_dim);
        if (p.mix2.exists()) sums2.clear(batch, head);
        for (int64_t first = 0; first < p.queries;) {
            const int64_t last = block_end(p, block_rows(p.keys), batch, first);
            block(scratch, batch, head, first, last);
            first = last;
        }
    }
    void clear(T* rows, int64_t ld, int64_t width) const {
        for (int64_t key = 0; key < p.keys; ++key) std::fill_n(rows + key * ld, width, T(0));
    }
};

template <typename T>
void backward(const Problem<T>& p, const Saved<T>& saved, const Gradients<T>& grads) {
    Scratch& shared = shared_scratch();
    shared.reserve(Backward<T>::need(p));
    const Backward<T> work(p, saved, grads, shared);
    const int64_t count = p.batch * p.heads;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
#pragma omp parallel num_threads(static_cast <int>(std::min(p.threads, count)))
    {
        work.keys.pack(p.k, p.batch, PanelRows::kTokens);
        work.keys_t.pack(p.k, p.batch, PanelRows::kWidth);
        work.values_t.pack(p.v, p.batch, PanelRows::kWidth);
#pragma omp barrier
        try {
            for (int64_t i = next++; i < count; i = next++)
                work.item(own_scratch(), i / p.heads, i % p.heads);
        } catch (const std::bad_alloc&) {  // an exception must not leave the parallel region
            failed = true;
        }
#pragma omp barrier
        if (p.mix1.exists()) {
#pragma omp for schedule(static)
            for (int64_t g = 0; g < p.branches(); ++g)
                work.sums1.store(grads.mix1, p.mix1.slots, work.mix1, p.batch, g);
        }
        if (p.mix2.exists()) {
#pragma omp for schedule(static)
            for (int64_t head = 0; head < p.heads; ++head)
                work.sums2.store(grads.mix2, p.mix2.slots, work.mix2, p.batch, head);
        }
    }
    if (failed) throw std::bad_alloc();
}

template void backward(const Problem<float>&, const Saved<float>&, const Gradients<float>&);
template void backward(const Problem<double>&, const Saved<double>&, const Gradients<double>&);

}  // namespace hypermlp
