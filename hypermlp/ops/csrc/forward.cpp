// Forward: threads take (batch, head, row block) items, the longest rows first; each item lives in its thread's scratch.
#include <atomic>
#include <vector>

#include "block.h"

namespace hypermlp {

Sgemm sgemm = nullptr;
Dgemm dgemm = nullptr;

template <typename T>
void forward_item(const Problem& p, Scratch& scratch, int64_t batch, int64_t head, int64_t first, int64_t last) {
    const Block b(p, batch, first, last);
    const int64_t cells = Block::cells(b.rows, b.columns), rank = std::max(p.mix1.rank, p.mix2.rank);
    const int branches = p.glu ? 2 : 1;
    scratch.reserve(branches * Scratch::need<T>(cells) + 2 * Scratch::need<T>(b.rows * rank));
    T* scores[2] = {scratch.take<T>(cells), p.glu ? scratch.take<T>(cells) : nullptr};
    T *inner = scratch.take<T>(b.rows * rank), *gated = scratch.take<T>(b.rows * rank);

    for (int branch = 0; branch < branches; ++branch) {
        const int64_t g = head + branch * p.heads;
        const T* q = static_cast<const T*>(p.q.data) + batch * p.q.batch + first * p.q.token + g * p.q.head;
        const T* k = static_cast<const T*>(p.k.data) + batch * p.k.batch + b.first_key * p.k.token + g * p.k.head;
        product_nt<T>(b.rows, b.columns, p.qk_dim, q, p.q.token, k, p.k.token, 0, b.ordinary(scores[branch]), b.columns);
        b.mask(scores[branch]);
        if (p.mix1.scale) {
            const HeadMix<T> mix(p.mix1, batch, g, branches * p.heads, p.queries, false);
            mix.inner(b, scores[branch], inner, gated);
            mix.update(b, scores[branch], gated);
        }
    }

    T* inverse_norm = static_cast<T*>(p.inverse_norm) + (head * p.batch + batch) * p.queries + first;
    for (int64_t row = 0; row < b.rows; ++row) {
        T* gate = b.aligned(scores[0], row);
        const int64_t from = b.begin(row), to = b.end(row);
        T sum = 0;
        if (p.glu) {
            const T* scale = b.aligned(scores[1], row);
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
        inverse_norm[row] = 1 / std::sqrt(sum + T(p.eps));
    }

    if (p.mix2.scale) {
        const HeadMix<T> mix(p.mix2, batch, head, p.heads, p.queries, true);
        mix.inner(b, scores[0], inner, gated);
        mix.update(b, scores[0], gated);
    }
    const T* v = static_cast<const T*>(p.v.data) + batch * p.v.batch + b.first_key * p.v.token + head * p.v.head;
    T* out = static_cast<T*>(p.out.data) + batch * p.out.batch + first * p.out.token + head * p.out.head;
    product_nn<T>(b.rows, p.vo_dim, b.columns, b.ordinary(scores[0]), b.columns, v, p.v.token, 0, out, p.out.token);
    for (int64_t row = 0; row < b.rows; ++row)
        for (int64_t d = 0; d < p.vo_dim; ++d) out[row * p.out.token + d] *= inverse_norm[row];
}

struct Item {
    int64_t batch, first, last;
};

template <typename T>
void forward(const Problem& p) {
    std::vector<Item> items;
    for (int64_t batch = 0; batch < p.batch; ++batch)
        for (int64_t first = 0; first < p.queries;) {
            const int64_t last = block_end(p, batch, first);
            items.push_back({batch, first, last});
            first = last;
        }
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.last > b.last; });
    const int64_t count = static_cast<int64_t>(items.size()) * p.heads;
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(static_cast<int>(std::min(p.threads, count)))
    {
        static thread_local Scratch scratch;
        for (int64_t i = next++; i < count; i = next++) {
            const Item& item = items[i / p.heads];
            forward_item<T>(p, scratch, item.batch, i % p.heads, item.first, item.last);
        }
    }
}

}  // namespace hypermlp

extern "C" {
void hypermlp_set_gemm(void* sgemm, void* dgemm) {
    hypermlp::sgemm = reinterpret_cast<hypermlp::Sgemm>(sgemm);
    hypermlp::dgemm = reinterpret_cast<hypermlp::Dgemm>(dgemm);
}
int64_t hypermlp_problem_size() { return sizeof(hypermlp::Problem); }
void hypermlp_forward_float(const hypermlp::Problem* p) { hypermlp::forward<float>(*p); }
void hypermlp_forward_double(const hypermlp::Problem* p) { hypermlp::forward<double>(*p); }
}
