// A decoding step of a whole layer. With one new position it is bound by reading weights and caches, so every
// product is a dot product along the rows of a weight, and there is no other cost between the products.
#include <algorithm>
#include <array>

#include "functions.h"
#include "kernels.h"
#include "parallel.h"
#include "scratch.h"

namespace hypermlp {

// decode.cpp: decode() with scratch memory of the caller, and its size. If `out_gate` has data, [batch,
// queries, heads, vo_dim], it multiplies out.
template <typename T>
size_t decode_need(const Problem<T>&);
template <typename T>
void decode(const Problem<T>&, const Output<T>&, const Strided<const T>& out_gate, Arena&);

// y[rows, outputs] = x[rows, inputs] weight[outputs, inputs]^T + bias. bias may be null.
template <typename T>
struct Projection {
    const T *x, *weight, *bias;
    int64_t inputs, outputs;
    T* y;
};

constexpr int64_t kOutputs = 16;  // that one worker takes at a time

// Compute outputs [first, last).
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
            y[0] = s0;
            y[1] = s1;
            y[2] = s2;
            y[3] = s3;
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

// Compute several projections at once; workers take chunks of outputs.
template <typename T, int N>
void project(int64_t rows, const Projection<T> (&all)[N], int64_t threads) {
    int64_t chunks[N + 1] = {0};
    for (int i = 0; i < N; ++i) chunks[i + 1] = chunks[i] + (all[i].outputs + kOutputs - 1) / kOutputs;
    for_ranges(threads, chunks[N], [&](int64_t chunk) {
        int i = 0;
        while (chunk >= chunks[i + 1]) ++i;
        const int64_t first = (chunk - chunks[i]) * kOutputs;
        project(rows, all[i], first, std::min(first + kOutputs, all[i].outputs));
    });
}

// Write the new inputs into their cache, and their convolutions into keys and values, [rows, hidden].
template <typename T>
void convolve(const Step<T>& s, T* keys, T* values) {
    const Problem<T>& p = s.problem;
    const T *w0 = s.k_conv, *w1 = s.v_conv;
    for (int64_t b = 0; b < p.batch; ++b)
        for (int64_t t = 0; t < p.queries; ++t, keys += s.hidden, values += s.hidden) {
            const int64_t place = s.past_inputs + t;
            T* x = s.history.at(b, place);
            std::copy_n(s.x.at(b, t), s.hidden, x);
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

// The intermediate results of a step, each [rows, width].
template <typename T>
struct StepBuffers {
    T *x, *for_keys, *for_values, *q, *k, *v, *gates, *o, *inverse_norm;

    static constexpr int kCount = 9;
    static std::array<int64_t, kCount> widths(const Step<T>& s) {
        const Problem<T>& p = s.problem;
        const int64_t qk = p.branches() * p.qk_dim, vo = p.heads * p.vo_dim;
        return {s.hidden, s.hidden, s.hidden, qk, qk, vo, s.gate_width, vo, p.heads};
    }
    static size_t need(const Step<T>& s, int64_t rows) {
        size_t bytes = 0;
        for (const int64_t width : widths(s)) bytes += Arena::need<T>(rows * width);
        return bytes;
    }
    StepBuffers(const Step<T>& s, int64_t rows, Arena& arena) {
        T** const buffers[] = {&x, &for_keys, &for_values, &q, &k, &v, &gates, &o, &inverse_norm};
        for (int i = 0; i < kCount; ++i) *buffers[i] = arena.take<T>(rows * widths(s)[i]);
    }
};

template <typename T>
void step(const Step<T>& s) {
    Problem<T> p = s.problem;
    const int64_t rows = p.batch * p.queries, qk = p.branches() * p.qk_dim, vo = p.heads * p.vo_dim;
    Lease lease(StepBuffers<T>::need(s, rows) + decode_need(p));
    const StepBuffers<T> own(s, rows, lease.arena);

    for (int64_t row = 0; row < rows; ++row)
        std::copy_n(s.x.at(row / p.queries, row % p.queries), s.hidden, own.x + row * s.hidden);
    const bool convolved = s.history.data != nullptr;
    if (convolved) convolve(s, own.for_keys, own.for_values);
    project<T, 4>(rows,
                  {{own.x, s.gate_weight, s.gate_bias, s.hidden, s.gate_width, own.gates},
                   {own.x, s.q_weight, nullptr, s.hidden, qk, own.q},
                   {convolved ? own.for_keys : own.x, s.k_weight, nullptr, s.hidden, qk, own.k},
                   {convolved ? own.for_values : own.x, s.v_weight, nullptr, s.hidden, vo, own.v}},
                  p.threads);

    for (int64_t row = 0; row < rows; ++row) {
        const int64_t b = row / p.queries, t = p.keys - p.queries + row % p.queries;
        for (int64_t g = 0; g < p.branches(); ++g)
            std::copy_n(own.k + row * qk + g * p.qk_dim, p.qk_dim, s.keys.at(b, t, g));
        for (int64_t h = 0; h < p.heads; ++h)
            std::copy_n(own.v + row * vo + h * p.vo_dim, p.vo_dim, s.values.at(b, t, h));
        T* gates = own.gates + row * s.gate_width;
#pragma omp simd
        for (int64_t i = 0; i < s.gate_width; ++i) gates[i] = sigmoid(gates[i]);
        if (s.q_gate >= 0) {
            T *query = own.q + row * qk, *gate = gates + s.q_gate;
            for (int64_t i = 0; i < qk; ++i) query[i] *= gate[i];
        }
    }
    // The gate that begins at `column`, [batch, queries, heads, width]; without data if it is absent.
    const auto gate = [&](int64_t column, int64_t width) -> Strided<const T> {
        if (column < 0) return {};
        return {own.gates + column, p.queries * s.gate_width, s.gate_width, width};
    };
    p.q = {own.q, p.queries * qk, qk, p.qk_dim};
    p.k = s.keys.read_only();
    p.v = s.values.read_only();
    p.mix1.gate = gate(s.mix1_gate, p.mix1.rank);
    p.mix2.gate = gate(s.mix2_gate, p.mix2.rank);
    const Output<T> output{{own.o, p.queries * vo, vo, p.vo_dim}, own.inverse_norm};
    decode<T>(p, output, gate(s.output_gate, p.vo_dim), lease.arena);
    project<T, 1>(rows, {{own.o, s.o_weight, nullptr, vo, s.hidden, s.out}}, p.threads);
}

template void step(const Step<float>&);
template void step(const Step<double>&);

}  // namespace hypermlp
