// Decode: few queries against many keys is bound by memory, so each (batch, head, query) reads K, V and the mixes once, in
// plain loops. Here the mixes' rows are in their own order, row = slot, and scale holds diag itself.
#include <atomic>

#include "common.h"

namespace hypermlp {

template <typename T>
struct DecodeMix {
    const T *diag, *left, *right, *gate;
    int64_t rank;

    DecodeMix(const Mix& mix, int64_t batch, int64_t query, int64_t head, int64_t heads, int64_t queries, bool transpose) {
        rank = mix.rank;
        if (!mix.scale) return;
        diag = static_cast<const T*>(mix.scale) + head * mix.slots;
        left = static_cast<const T*>(transpose ? mix.right : mix.left) + head * mix.slots * rank;
        right = static_cast<const T*>(transpose ? mix.left : mix.right) + head * mix.slots * rank;
        gate = static_cast<const T*>(mix.gate) + ((batch * queries + query) * heads + head) * rank;
    }

    // y <- y R; y has one number per visible key, oldest first. inner has room for rank numbers.
    void apply(T* y, int64_t count, bool lag, T* inner) const {
        // Slots run against the keys in lag order.
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
void decode_item(const Problem& p, Scratch& scratch, int64_t batch, int64_t head, int64_t query) {
    const int64_t position = p.keys - p.queries + query;
    const int64_t start = p.starts ? p.starts[batch * p.queries + query] : 0, count = position + 1 - start;
    const int branches = p.glu ? 2 : 1;
    const int64_t rank = std::max(p.mix1.rank, p.mix2.rank);
    scratch.reserve(2 * Scratch::need<T>(std::max<int64_t>(count, 1)) + Scratch::need<T>(rank));
    T* scores[2] = {scratch.take<T>(count), scratch.take<T>(count)};  // one per visible key, oldest first
    T* inner = scratch.take<T>(rank);

    for (int branch = 0; branch < branches; ++branch) {
        const int64_t g = head + branch * p.heads;
        const T* q = static_cast<const T*>(p.q.data) + batch * p.q.batch + query * p.q.token + g * p.q.head;
        const T* k = static_cast<const T*>(p.k.data) + batch * p.k.batch + start * p.k.token + g * p.k.head;
        for (int64_t i = 0; i < count; ++i) {
            const T* key = k + i * p.k.token;
            T sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t d = 0; d < p.qk_dim; ++d) sum += q[d] * key[d];
            scores[branch][i] = sum;
        }
        if (p.mix1.scale) DecodeMix<T>(p.mix1, batch, query, g, branches * p.heads, p.queries, false).apply(scores[branch], count, p.lag, inner);
    }

    T *gate = scores[0], *scale = scores[1], squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t slot = 0; slot < count; ++slot) squares += gate[slot] * gate[slot];
    if (p.glu) {
#pragma omp simd
        for (int64_t slot = 0; slot < count; ++slot) gate[slot] = positive(gate[slot]) * softplus(scale[slot]);
    } else {
#pragma omp simd
        for (int64_t slot = 0; slot < count; ++slot) gate[slot] = positive(gate[slot]);
    }
    const T inverse_norm = 1 / std::sqrt(squares + T(p.eps));
    static_cast<T*>(p.inverse_norm)[(head * p.batch + batch) * p.queries + query] = inverse_norm;
    if (p.mix2.scale) DecodeMix<T>(p.mix2, batch, query, head, p.heads, p.queries, true).apply(gate, count, p.lag, inner);

    const T* v = static_cast<const T*>(p.v.data) + batch * p.v.batch + start * p.v.token + head * p.v.head;
    T* out = static_cast<T*>(p.out.data) + batch * p.out.batch + query * p.out.token + head * p.out.head;
    std::fill(out, out + p.vo_dim, T(0));
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) {  // four keys at a time, so that the output is loaded and stored a quarter as often
        const T *v0 = v + i * p.v.token, *v1 = v0 + p.v.token, *v2 = v1 + p.v.token, *v3 = v2 + p.v.token;
        const T w0 = gate[i], w1 = gate[i + 1], w2 = gate[i + 2], w3 = gate[i + 3];
#pragma omp simd
        for (int64_t d = 0; d < p.vo_dim; ++d) out[d] += (w0 * v0[d] + w1 * v1[d]) + (w2 * v2[d] + w3 * v3[d]);
    }
    for (; i < count; ++i) {
        const T* value = v + i * p.v.token;
        const T weight = gate[i];
#pragma omp simd
        for (int64_t d = 0; d < p.vo_dim; ++d) out[d] += weight * value[d];
    }
    for (int64_t d = 0; d < p.vo_dim; ++d) out[d] *= inverse_norm;
}

template <typename T>
void decode(const Problem& p) {
    const int64_t count = p.batch * p.heads * p.queries;
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(static_cast<int>(std::min(p.threads, count)))
    {
        static thread_local Scratch scratch;
        for (int64_t i = next++; i < count; i = next++)
            decode_item<T>(p, scratch, i / (p.heads * p.queries), i / p.queries % p.heads, i % p.queries);
    }
}

}  // namespace hypermlp

extern "C" {
void hypermlp_decode_float(const hypermlp::Problem* p) { hypermlp::decode<float>(*p); }
void hypermlp_decode_double(const hypermlp::Problem* p) { hypermlp::decode<double>(*p); }
}
