// Backward: each (batch, head) walks its row blocks, recomputes them and adds up its gradients in place. No two threads
// write the same number, and the mixes' gradients are kept per batch item, so the result does not depend on timing.
#include <atomic>

#include "block.h"

namespace hypermlp {

// Gradients of one mix: grad (of y R) <- grad of y. y: before the mix; inner, gated: of the forward.
template <typename T>
struct HeadMixGrad {
    HeadMix<T> mix, transposed;
    T *scale, *left, *right, *gate;

    HeadMixGrad(const Mix& m, int64_t batch, int64_t head, int64_t heads, int64_t queries, bool transpose)
        : mix(m, batch, head, heads, queries, transpose), transposed(m, batch, head, heads, queries, !transpose) {
        const int64_t index = batch * heads + head, rows = m.slots * m.rank;
        scale = static_cast<T*>(m.grad_scale) + index * m.slots;
        left = static_cast<T*>(transpose ? m.grad_right : m.grad_left) + index * rows;
        right = static_cast<T*>(transpose ? m.grad_left : m.grad_right) + index * rows;
        gate = static_cast<T*>(m.grad_gate) + (batch * queries * heads + head) * m.rank;
    }

    void apply(const Block& b, const T* y, const T* inner, const T* gated, T* grad, T* grad_inner, T* grad_gated) const {
        const int64_t n = mix.width(b), skip = mix.first_column(b), row0 = mix.first_row(b), rank = mix.rank;
        for (int64_t row = 0; row < b.rows; ++row) {
            const T *cells = b.aligned(y, row) + skip, *grads = b.aligned(grad, row) + skip;
            const int64_t from = std::max<int64_t>(b.begin(row) - skip, 0), to = b.end(row) - skip;
            T* sums = scale + row0;
#pragma omp simd
            for (int64_t c = from; c < to; ++c) sums[c] += cells[c] * grads[c];
        }
        product_tn<T>(n, rank, b.rows, b.aligned(grad) + skip, b.aligned_ld, gated, rank, 1, right + row0 * rank, rank);
        transposed.inner(b, grad, grad_inner, grad_gated);
        product_tn<T>(n, rank, b.rows, b.aligned(y) + skip, b.aligned_ld, grad_gated, rank, 1, left + row0 * rank, rank);
        transposed.update(b, grad, grad_gated);
        for (int64_t row = 0; row < b.rows; ++row) {
            T* g = gate + (b.first_query + row) * mix.gate_token;
            for (int64_t r = 0; r < rank; ++r) g[r] = grad_inner[row * rank + r] * inner[row * rank + r];
        }
    }
};

template <typename T>
void backward_block(const Problem& p, Scratch& scratch, int64_t batch, int64_t head, int64_t first, int64_t last) {
    const Block b(p, batch, first, last);
    const int64_t cells = Block::cells(b.rows, b.columns), rank = std::max(p.mix1.rank, p.mix2.rank), small = b.rows * rank;
    const int branches = p.glu ? 2 : 1;
    scratch.reserve((2 * branches + 2) * Scratch::need<T>(cells) + 8 * Scratch::need<T>(small) + Scratch::need<T>(b.rows * p.vo_dim));
    T *before[2], *scores[2], *inner1[2], *gated1[2];
    for (int branch = 0; branch < branches; ++branch) {
        before[branch] = scratch.take<T>(cells);
        scores[branch] = scratch.take<T>(cells);
        inner1[branch] = scratch.take<T>(small);
        gated1[branch] = scratch.take<T>(small);
    }
    T *weights = scratch.take<T>(cells), *grad = scratch.take<T>(cells);
    T *inner2 = scratch.take<T>(small), *gated2 = scratch.take<T>(small);
    T *grad_inner = scratch.take<T>(small), *grad_gated = scratch.take<T>(small);
    T *grad_rows = scratch.take<T>(b.rows * p.vo_dim);

    // Recompute the scores, before and after the first mix, and the activation.
    for (int branch = 0; branch < branches; ++branch) {
        const int64_t g = head + branch * p.heads;
        const T* q = static_cast<const T*>(p.q.data) + batch * p.q.batch + first * p.q.token + g * p.q.head;
        const T* k = static_cast<const T*>(p.k.data) + batch * p.k.batch + b.first_key * p.k.token + g * p.k.head;
        T* target = p.mix1.scale ? before[branch] : scores[branch];
        product_nt<T>(b.rows, b.columns, p.qk_dim, q, p.q.token, k, p.k.token, 0, b.ordinary(target), b.columns);
        b.mask(target);
        if (p.mix1.scale) {
            const HeadMix<T> mix(p.mix1, batch, g, branches * p.heads, p.queries, false);
            std::memcpy(scores[branch], before[branch], cells * sizeof(T));
            mix.inner(b, scores[branch], inner1[branch], gated1[branch]);
            mix.update(b, scores[branch], gated1[branch]);
        }
    }
    for (int64_t row = 0; row < b.rows; ++row) {
        const T *gate = b.aligned(scores[0], row), *scale = p.glu ? b.aligned(scores[1], row) : nullptr;
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
        const T* g = static_cast<const T*>(p.grad_out.data) + batch * p.grad_out.batch + (first + row) * p.grad_out.token + head * p.grad_out.head;
        for (int64_t d = 0; d < p.vo_dim; ++d) grad_rows[row * p.vo_dim + d] = g[d] * inverse_norm[row];
    }

    // Readout: the mixed activation gives grad_v; then its memory takes the gradient.
    T* mixed = weights;
    if (p.mix2.scale) {
        const HeadMix<T> mix(p.mix2, batch, head, p.heads, p.queries, true);
        std::memcpy(grad, weights, cells * sizeof(T));
        mixed = grad;
        mix.inner(b, mixed, inner2, gated2);
        mix.update(b, mixed, gated2);
    }
    const T* v = static_cast<const T*>(p.v.data) + batch * p.v.batch + b.first_key * p.v.token + head * p.v.head;
    T* grad_v = static_cast<T*>(p.grad_v.data) + batch * p.grad_v.batch + b.first_key * p.grad_v.token + head * p.grad_v.head;
    product_tn<T>(b.columns, p.vo_dim, b.rows, b.ordinary(mixed), b.columns, grad_rows, p.vo_dim, 1, grad_v, p.grad_v.token);
    product_nt<T>(b.rows, b.columns, p.vo_dim, grad_rows, p.vo_dim, v, p.v.token, 0, b.ordinary(grad), b.columns);
    b.mask(grad);
    if (p.mix2.scale) {
        const HeadMixGrad<T> mix(p.mix2, batch, head, p.heads, p.queries, true);
        mix.apply(b, weights, inner2, gated2, grad, grad_inner, grad_gated);
    }

    // Activation: the gradients take the place of the scores.
    for (int64_t row = 0; row < b.rows; ++row) {
        T *gate = b.aligned(scores[0], row), *scale = p.glu ? b.aligned(scores[1], row) : nullptr;
        const T *g = b.aligned(grad, row), *activation = b.aligned(weights, row);
        const int64_t from = b.begin(row), to = b.end(row);
        T dot = 0;  // <do, o>
#pragma omp simd reduction(+ : dot)
        for (int64_t c = from; c < to; ++c) dot += g[c] * activation[c];
        const T norm = -dot * inverse_norm[row] * inverse_norm[row];
        if (p.glu) {
#pragma omp simd
            for (int64_t c = from; c < to; ++c) {
                const T h = gate[c], s = scale[c];
                gate[c] = (h > 0 ? g[c] * softplus(s) : T(0)) + norm * h;
                scale[c] = g[c] * positive(h) * sigmoid(s);
            }
        } else {
#pragma omp simd
            for (int64_t c = from; c < to; ++c) gate[c] = (gate[c] > 0 ? g[c] : T(0)) + norm * gate[c];
        }
    }

    for (int branch = 0; branch < branches; ++branch) {
        const int64_t g = head + branch * p.heads;
        if (p.mix1.scale) {
            const HeadMixGrad<T> mix(p.mix1, batch, g, branches * p.heads, p.queries, false);
            mix.apply(b, before[branch], inner1[branch], gated1[branch], scores[branch], grad_inner, grad_gated);
        }
        const T* q = static_cast<const T*>(p.q.data) + batch * p.q.batch + first * p.q.token + g * p.q.head;
        const T* k = static_cast<const T*>(p.k.data) + batch * p.k.batch + b.first_key * p.k.token + g * p.k.head;
        T* grad_q = static_cast<T*>(p.grad_q.data) + batch * p.grad_q.batch + first * p.grad_q.token + g * p.grad_q.head;
        T* grad_k = static_cast<T*>(p.grad_k.data) + batch * p.grad_k.batch + b.first_key * p.grad_k.token + g * p.grad_k.head;
        product_nn<T>(b.rows, p.qk_dim, b.columns, b.ordinary(scores[branch]), b.columns, k, p.k.token, 0, grad_q, p.grad_q.token);
        product_tn<T>(b.columns, p.qk_dim, b.rows, b.ordinary(scores[branch]), b.columns, q, p.q.token, 1, grad_k, p.grad_k.token);
    }
}

template <typename T>
void backward(const Problem& p) {
    const int64_t count = p.batch * p.heads;
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(static_cast<int>(std::min(p.threads, count)))
    {
        static thread_local Scratch scratch;
        for (int64_t i = next++; i < count; i = next++)
            for (int64_t first = 0; first < p.queries;) {
                const int64_t last = block_end(p, i / p.heads, first);
                backward_block<T>(p, scratch, i / p.heads, i % p.heads, first, last);
                first = last;
            }
    }
}

}  // namespace hypermlp

extern "C" {
void hypermlp_backward_float(const hypermlp::Problem* p) { hypermlp::backward<float>(*p); }
void hypermlp_backward_double(const hypermlp::Problem* p) { hypermlp::backward<double>(*p); }
}
