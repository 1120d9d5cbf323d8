// A step of decoding, the whole layer at once. With one new position its time is that of reading weights and caches, so all
// products are dot products along their rows, and nothing is left to pay for between them.
#include "kernels.h"

namespace hypermlp {

// y[rows, outputs] = x[rows, inputs] weight[outputs, inputs]^T + bias
template <typename T>
struct Projection {
    const T *x, *weight, *bias;
    int64_t inputs, outputs;
    T* y;
};

constexpr int64_t kOutputs = 16;  // that one thread takes at a time

template <typename T>
void project(int64_t rows, const Projection<T>& p, int64_t first, int64_t last) {
    int64_t n = first;
    for (; n + 4 <= last; n += 4) {  // four weights at a time: independent sums
        const T *w0 = p.weight + n * p.inputs, *w1 = w0 + p.inputs, *w2 = w1 + p.inputs, *w3 = w2 + p.inputs;
        for (int64_t row = 0; row < rows; ++row) {
            const T* x = p.x + row * p.inputs;
            T s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
            for (int64_t d = 0; d < p.inputs; ++d) {
                s0 += x[d] * w0[d];
                s1 += x[d] * w1[d];
                s2 += x[d] * w2[d];
                s3 += x[d] * w3[d];
            }
            T* y = p.y + row * p.outputs + n;
            y[0] = s0, y[1] = s1, y[2] = s2, y[3] = s3;
        }
    }
    for (; n < last; ++n)
        for (int64_t row = 0; row < rows; ++row) {
            const T *x = p.x + row * p.inputs, *w = p.weight + n * p.inputs;
            T sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t d = 0; d < p.inputs; ++d) sum += x[d] * w[d];
            p.y[row * p.outputs + n] = sum;
        }
    if (p.bias)
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t i = first; i < last; ++i) p.y[row * p.outputs + i] += p.bias[i];
}

// Several projections at once; threads take chunks of outputs.
template <typename T, int N>
void project(int64_t rows, const Projection<T> (&all)[N], int threads) {
    int64_t chunks[N + 1] = {0};
    for (int i = 0; i < N; ++i) chunks[i + 1] = chunks[i] + (all[i].outputs + kOutputs - 1) / kOutputs;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t chunk = 0; chunk < chunks[N]; ++chunk) {
        int i = 0;
        while (chunk >= chunks[i + 1]) ++i;
        const int64_t first = (chunk - chunks[i]) * kOutputs;
        project(rows, all[i], first, std::min(first + kOutputs, all[i].outputs));
    }
}

// The inputs go into their cache, and what the convolutions make of them to keys and values.
template <typename T>
void convolve(const Step& s, T* keys, T* values) {
    const Problem& p = s.problem;
    const T *w0 = static_cast<const T*>(s.k_conv), *w1 = static_cast<const T*>(s.v_conv);
    for (int64_t b = 0; b < p.batch; ++b)
        for (int64_t t = 0; t < p.queries; ++t, keys += s.hidden, values += s.hidden) {
            const int64_t place = s.past_inputs + t;
            T* x = s.history.at<T>(b, place, 0);
            std::copy_n(s.x.at<const T>(b, t, 0), s.hidden, x);
            std::fill_n(keys, s.hidden, T(0));
            std::fill_n(values, s.hidden, T(0));
            int64_t lags = std::min(s.kernel, place + 1);
            if (s.reach) lags = std::min(lags, s.reach[b * p.queries + t]);
            for (int64_t lag = 0; lag < lags; ++lag, x -= s.history.token)
                for (int64_t d = 0; d < s.hidden; ++d) {
                    keys[d] += x[d] * w0[d * s.kernel + lag];
                    values[d] += x[d] * w1[d * s.kernel + lag];
                }
        }
}

template <typename T>
void step(const Step& s) {
    Problem p = s.problem;
    const int64_t rows = p.batch * p.queries, qk = p.branches() * p.qk_dim, vo = p.heads * p.vo_dim;
    const int threads = static_cast<int>(p.threads);
    Scratch& scratch = shared_scratch();
    const int64_t sizes[] = {rows * s.hidden, rows * s.hidden, rows * s.hidden, rows * qk, rows * qk, rows * vo, rows * s.gate_width, rows * vo, rows * p.heads};
    size_t bytes = 0;
    for (const int64_t size : sizes) bytes += Scratch::need<T>(size);
    scratch.reserve(bytes);
    T *x = scratch.take<T>(sizes[0]), *for_keys = scratch.take<T>(sizes[1]), *for_values = scratch.take<T>(sizes[2]);
    T *q = scratch.take<T>(sizes[3]), *k = scratch.take<T>(sizes[4]), *v = scratch.take<T>(sizes[5]);
    T *gates = scratch.take<T>(sizes[6]), *o = scratch.take<T>(sizes[7]);
    p.inverse_norm = scratch.take<T>(sizes[8]);

    for (int64_t row = 0; row < rows; ++row) std::copy_n(s.x.at<const T>(row / p.queries, row % p.queries, 0), s.hidden, x + row * s.hidden);
    if (s.history.data)
        convolve(s, for_keys, for_values);
    else
        for_keys = for_values = x;
    const auto weight = [](const void* w) { return static_cast<const T*>(w); };
    project<T, 4>(rows,
                  {{x, weight(s.gate_weight), weight(s.gate_bias), s.hidden, s.gate_width, gates},
                   {x, weight(s.q_weight), nullptr, s.hidden, qk, q},
                   {for_keys, weight(s.k_weight), nullptr, s.hidden, qk, k},
                   {for_values, weight(s.v_weight), nullptr, s.hidden, vo, v}},
                  threads);

    for (int64_t row = 0; row < rows; ++row) {
        const int64_t b = row / p.queries, t = p.keys - p.queries + row % p.queries;
        for (int64_t g = 0; g < p.branches(); ++g) std::copy_n(k + row * qk + g * p.qk_dim, p.qk_dim, p.k.at<T>(b, t, g));
        for (int64_t h = 0; h < p.heads; ++h) std::copy_n(v + row * vo + h * p.vo_dim, p.vo_dim, p.v.at<T>(b, t, h));
        T *own = gates + row * s.gate_width, *query = q + row * qk;
#pragma omp simd
        for (int64_t i = 0; i < s.gate_width; ++i) own[i] = sigmoid(own[i]);
        if (s.feature_gates)
            for (int64_t i = 0; i < qk; ++i) query[i] *= own[i];
    }
    const auto gate = [&](int64_t offset, int64_t width) { return Strided{gates + offset, p.queries * s.gate_width, s.gate_width, width}; };
    p.q = {q, p.queries * qk, qk, p.qk_dim};
    p.out = {o, p.queries * vo, vo, p.vo_dim};
    if (s.feature_gates) p.out_gate = gate(qk, p.vo_dim);
    const int64_t offset = s.feature_gates ? qk + vo : 0;
    p.mix1.gate = gate(offset, p.mix1.rank);
    p.mix2.gate = gate(offset + p.branches() * p.mix1.rank, p.mix2.rank);
    decode<T>(p);
    project<T, 1>(rows, {{o, weight(s.o_weight), nullptr, vo, s.hidden, static_cast<T*>(s.out)}}, threads);
}

template void step<float>(const Step&);
template void step<double>(const Step&);

}  // namespace hypermlp
