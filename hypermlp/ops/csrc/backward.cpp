// Backward: each (batch, head) walks its row blocks, recomputes them and adds up its gradients in place. No two threads
// write the same number, and the mixes' gradients are kept per batch item, then summed in order: results do not depend on timing.
#include <atomic>

#include "kernels.h"
#include "packs.h"

namespace hypermlp {

// Gradients of one mix's parameters, for every (batch, head), in the kernels' order of slots.
template <typename T>
struct MixGrads {
    int64_t heads, length, rank;
    T *scale, *left, *right;  // [batch, heads, length], [batch, heads, length, rank] twice

    static size_t need(const Mix& mix, int64_t batch, int64_t heads, int64_t keys) {
        if (!mix.diag) return 0;
        const int64_t rows = batch * heads * padded<T>(std::min(mix.slots, keys));
        return Scratch::need<T>(rows) + 2 * Scratch::need<T>(rows * mix.rank);
    }
    MixGrads(const Mix& mix, const PackedMix<T>& packed, int64_t batch, int64_t heads_, Scratch& scratch)
        : heads(heads_), length(packed.length), rank(packed.rank) {
        if (!mix.diag) return;
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
    // Over the batch, into the user's order.
    void sum(const Mix& mix, const PackedMix<T>& packed, int64_t batch, int64_t head) const {
        sum(scale, 1, mix.grad_diag, mix.slots, packed, batch, head);
        sum(left, rank, mix.grad_left, mix.slots, packed, batch, head);
        sum(right, rank, mix.grad_right, mix.slots, packed, batch, head);
    }

  private:
    void sum(const T* grads, int64_t width, void* to, int64_t slots, const PackedMix<T>& packed, int64_t batch, int64_t head) const {
        T* out = static_cast<T*>(to) + head * slots * width;
        std::fill_n(out, slots * width, T(0));
        for (int64_t b = 0; b < batch; ++b) {
            const T* from = grads + (b * heads + head) * length * width;
            for (int64_t row = 0; row < length; ++row) {
                if (packed.slot(row) >= packed.used) continue;
                for (int64_t x = 0; x < width; ++x) out[packed.slot(row) * width + x] += from[row * width + x];
            }
        }
    }
};

// Gradients of one mix: grad (of y R) <- grad of y. y: before the mix; inner, gated: of the forward.
template <typename T>
struct HeadMixGrad {
    HeadMix<T> mix, transposed;
    T *scale, *left, *right;
    Strided gate;

    HeadMixGrad(const Mix& m, const PackedMix<T>& packed, const MixGrads<T>& grads, int64_t batch, int64_t head, bool transpose)
        : mix(m, packed, batch, head, transpose), transposed(m, packed, batch, head, !transpose), gate(m.grad_gate) {
        const int64_t first = (batch * grads.heads + head) * grads.length;
        scale = grads.scale + first;
        left = (transpose ? grads.right : grads.left) + first * m.rank;
        right = (transpose ? grads.left : grads.right) + first * m.rank;
    }

    // panels: room for [rows, rank]
    void apply(const Block<T>& b, const T* y, const T* inner, const T* gated, T* grad, T* grad_inner, T* grad_gated, T* panels) const {
        const int64_t skip = mix.first_column(b), row0 = mix.first_row(b), ld = padded<T>(mix.rank);
        for (int64_t row = 0; row < b.rows; ++row) {
            const T *cells = b.aligned(y, row) + skip, *grads = b.aligned(grad, row) + skip;
            const int64_t from = std::max<int64_t>(b.begin(row) - skip, 0), to = b.end(row) - skip;
            T* sums = scale + row0;
#pragma omp simd
            for (int64_t c = from; c < to; ++c) sums[c] += cells[c] * grads[c];
        }
        outer(b, grad, gated, panels, right + row0 * mix.rank);
        transposed.inner(b, grad, grad_inner, grad_gated);
        outer(b, y, grad_gated, panels, left + row0 * mix.rank);
        transposed.update(b, grad, grad_gated, grad);
        for (int64_t row = 0; row < b.rows; ++row) {
            T* g = gate.at<T>(mix.batch, b.first_query + row, mix.head);
            for (int64_t r = 0; r < mix.rank; ++r) g[r] = grad_inner[row * ld + r] * inner[row * ld + r];
        }
    }

  private:
    // sums[width, rank] += cells^T small, over the block's rows
    void outer(const Block<T>& b, const T* cells, const T* small, T* panels, T* sums) const {
        const int64_t ld = padded<T>(mix.rank), step = b.rows * kPanel<T>;
        for (int64_t r = 0; r < mix.rank; r += kPanel<T>) pack_panel<T>(b.rows, mix.rank, {small, ld, 1}, r, panels + r / kPanel<T> * step);
        const View<T> view = mix.view(b, cells);
        multiply<T, Into::kAdd>(mix.width(b), mix.rank, b.rows, {view.data, view.column, view.row}, panels, step, sums, mix.rank);
    }
};

template <typename T>
struct Backward {
    const Problem& p;
    Panels<T> keys, keys_t, values_t;
    PackedMix<T> mix1, mix2;
    MixGrads<T> grads1, grads2;

    static size_t need(const Problem& p) {
        const int64_t branches = p.batch * p.branches();
        return Panels<T>::need(branches, p.keys, p.qk_dim) + Panels<T>::need(branches, p.qk_dim, p.keys) +
               Panels<T>::need(p.batch * p.heads, p.vo_dim, p.keys) + PackedMix<T>::need(p.mix1, p.branches(), p.keys, kStraight | kTransposed) +
               PackedMix<T>::need(p.mix2, p.heads, p.keys, kStraight | kTransposed) + MixGrads<T>::need(p.mix1, p.batch, p.branches(), p.keys) +
               MixGrads<T>::need(p.mix2, p.batch, p.heads, p.keys);
    }
    Backward(const Problem& problem, Scratch& scratch)
        : p(problem),
          keys(p.batch, p.branches(), p.keys, p.qk_dim, scratch),
          keys_t(p.batch, p.branches(), p.qk_dim, p.keys, scratch),
          values_t(p.batch, p.heads, p.vo_dim, p.keys, scratch),
          mix1(p.mix1, p.branches(), p.keys, p.lag, kStraight | kTransposed, scratch),
          mix2(p.mix2, p.heads, p.keys, p.lag, kStraight | kTransposed, scratch),
          grads1(p.mix1, mix1, p.batch, p.branches(), scratch),
          grads2(p.mix2, mix2, p.batch, p.heads, scratch) {}

    void block(Scratch& scratch, int64_t batch, int64_t head, int64_t first, int64_t last) const {
        const Block<T> b(p, batch, first, last);
        const int64_t small = b.rows * padded<T>(std::max(p.mix1.rank, p.mix2.rank));
        const int64_t wide = b.rows * padded<T>(std::max(p.vo_dim, p.qk_dim));
        scratch.reserve(6 * Scratch::need<T>(b.cells()) + 9 * Scratch::need<T>(small) + 2 * Scratch::need<T>(wide));
        T *before[2], *scores[2], *inner1[2], *gated1[2];
        for (int branch = 0; branch < 2; ++branch) {
            before[branch] = scratch.take<T>(b.cells());
            scores[branch] = scratch.take<T>(b.cells());
            inner1[branch] = scratch.take<T>(small);
            gated1[branch] = scratch.take<T>(small);
        }
        T *weights = scratch.take<T>(b.cells()), *grad = scratch.take<T>(b.cells());
        T *inner2 = scratch.take<T>(small), *gated2 = scratch.take<T>(small);
        T *grad_inner = scratch.take<T>(small), *grad_gated = scratch.take<T>(small), *small_panels = scratch.take<T>(small);
        T *grad_rows = scratch.take<T>(wide), *panels = scratch.take<T>(wide);

        // Recompute the scores, before and after the first mix, and the activation.
        for (int64_t g = head, branch = 0; g < p.branches(); g += p.heads, ++branch) {
            T* target = p.mix1.diag ? before[branch] : scores[branch];
            b.scores({p.q.at<const T>(batch, first, g), p.q.token, 1}, p.qk_dim, keys_t.of(batch, g), target);
            if (p.mix1.diag) {
                const HeadMix<T> mix(p.mix1, mix1, batch, g, false);
                mix.inner(b, before[branch], inner1[branch], gated1[branch]);
                mix.update(b, before[branch], gated1[branch], scores[branch]);
            }
        }
        for (int64_t row = 0; row < b.rows; ++row) {
            const T *gate = b.aligned(scores[0], row), *scale = b.aligned(scores[1], row);
            T* activation = b.aligned(weights, row);
            const int64_t from = b.begin(row), to = b.end(row);
            if (p.glu) {
#pragma omp simd
                for (int64_t c = from; c < to; ++c) activation[c] = positive(gate[c]) * softplus(scale[c]);
            } else {
#pragma omp simd
                for (int64_t c = from; c < to; ++c) activation[c] = positive(gate[c]);
            }
        }
        b.mask(weights);

        // Rows of the output's gradient, over rho.
        const T* inverse_norm = static_cast<const T*>(p.inverse_norm) + (head * p.batch + batch) * p.queries + first;
        for (int64_t row = 0; row < b.rows; ++row) {
            const T* g = p.grad_out.at<const T>(batch, first + row, head);
            for (int64_t d = 0; d < p.vo_dim; ++d) grad_rows[row * p.vo_dim + d] = g[d] * inverse_norm[row];
        }

        // Readout: the mixed activation gives grad_v; then its memory takes the gradient.
        T* mixed = weights;
        if (p.mix2.diag) {
            const HeadMix<T> mix(p.mix2, mix2, batch, head, true);
            mixed = grad;
            mix.inner(b, weights, inner2, gated2);
            mix.update(b, weights, gated2, mixed);
        }
        add_outer(b, mixed, {grad_rows, p.vo_dim, 1}, p.vo_dim, panels, p.grad_v.at<T>(batch, b.first_key, head), p.grad_v.token);
        b.scores({grad_rows, p.vo_dim, 1}, p.vo_dim, values_t.of(batch, head), grad);
        if (p.mix2.diag) {
            const HeadMixGrad<T> mix(p.mix2, mix2, grads2, batch, head, true);
            mix.apply(b, weights, inner2, gated2, grad, grad_inner, grad_gated, small_panels);
        }

        // Activation: the gradients take the place of the scores.
        for (int64_t row = 0; row < b.rows; ++row) {
            T *gate = b.aligned(scores[0], row), *scale = b.aligned(scores[1], row);
            const T *g = b.aligned(grad, row), *activation = b.aligned(weights, row);
            const int64_t from = b.begin(row), to = b.end(row);
            T dot = 0;  // <do, o>
#pragma omp simd reduction(+ : dot)
            for (int64_t c = from; c < to; ++c) dot += g[c] * activation[c];
            const T norm = -dot * inverse_norm[row] * inverse_norm[row];
            if (p.glu) {
#pragma omp simd
                for (int64_t c = from; c < to; ++c) {
                    const T h = gate[c], s = scale[c], through = g[c] * softplus(s);  // computed on both sides: vectorises
                    gate[c] = (h > 0 ? through : T(0)) + norm * h;
                    scale[c] = g[c] * positive(h) * sigmoid(s);
                }
            } else {
#pragma omp simd
                for (int64_t c = from; c < to; ++c) gate[c] = (gate[c] > 0 ? g[c] : T(0)) + norm * gate[c];
            }
        }

        for (int64_t g = head, branch = 0; g < p.branches(); g += p.heads, ++branch) {
            if (p.mix1.diag) {
                const HeadMixGrad<T> mix(p.mix1, mix1, grads1, batch, g, false);
                mix.apply(b, before[branch], inner1[branch], gated1[branch], scores[branch], grad_inner, grad_gated, small_panels);
            }
            const T* own_keys = keys.of(batch, g) + b.first_key * kPanel<T>;
            T* grad_q = p.grad_q.at<T>(batch, first, g);
            multiply<T, Into::kNew, Causal::kLeft>(b.rows, p.qk_dim, b.columns, {b.ordinary(scores[branch]), b.ld, 1}, own_keys, keys.step(),
                                                   grad_q, p.grad_q.token, b.slack());
            const View<T> q{p.q.at<const T>(batch, first, g), p.q.token, 1};
            add_outer(b, scores[branch], q, p.qk_dim, panels, p.grad_k.at<T>(batch, b.first_key, g), p.grad_k.token);
        }
    }

    // sums[keys, width] += cells^T rows, over the block's rows. panels: room for [rows, width]
    void add_outer(const Block<T>& b, T* cells, View<T> rows, int64_t width, T* panels, T* sums, int64_t ld) const {
        const int64_t step = b.rows * kPanel<T>;
        for (int64_t d = 0; d < width; d += kPanel<T>) pack_panel<T>(b.rows, width, rows, d, panels + d / kPanel<T> * step);
        multiply<T, Into::kAdd, Causal::kTransposed>(b.columns, width, b.rows, {b.ordinary(cells), 1, b.ld}, panels, step, sums, ld, b.slack());
    }

    void item(Scratch& scratch, int64_t batch, int64_t head) const {
        for (int64_t g = head; g < p.branches(); g += p.heads) {
            clear(p.grad_k.at<T>(batch, 0, g), p.grad_k.token, p.qk_dim);
            if (p.mix1.diag) grads1.clear(batch, g);
        }
        clear(p.grad_v.at<T>(batch, 0, head), p.grad_v.token, p.vo_dim);
        if (p.mix2.diag) grads2.clear(batch, head);
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
void backward(const Problem& p) {
    Scratch& shared = shared_scratch();
    shared.reserve(Backward<T>::need(p));
    const Backward<T> work(p, shared);
    const int64_t count = p.batch * p.heads;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
#pragma omp parallel num_threads(static_cast<int>(std::min(p.threads, count)))
    {
        work.keys.pack(p.k, p.batch, false);
        work.keys_t.pack(p.k, p.batch, true);
        work.values_t.pack(p.v, p.batch, true);
#pragma omp barrier
        try {
            for (int64_t i = next++; i < count; i = next++) work.item(own_scratch(), i / p.heads, i % p.heads);
        } catch (const std::bad_alloc&) {  // may not leave the region
            failed = true;
        }
#pragma omp barrier
        if (p.mix1.diag) {
#pragma omp for schedule(static)
            for (int64_t g = 0; g < p.branches(); ++g) work.grads1.sum(p.mix1, work.mix1, p.batch, g);
        }
        if (p.mix2.diag) {
#pragma omp for schedule(static)
            for (int64_t head = 0; head < p.heads; ++head) work.grads2.sum(p.mix2, work.mix2, p.batch, head);
        }
    }
    if (failed) throw std::bad_alloc();
}

template void backward<float>(const Problem&);
template void backward<double>(const Problem&);

}  // namespace hypermlp
