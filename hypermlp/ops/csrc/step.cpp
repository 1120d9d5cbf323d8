// A decoding step of a whole layer. With one new position it is bound by reading weights and caches, so every
// product is a dot product along the rows of a weight, and all phases are one parallel region.
#include <algorithm>
#include <array>

#include "decode.h"
#include "functions.h"
#include "kernels.h"
#include "parallel.h"
#include "rows.h"
#include "scratch.h"

namespace hypermlp {

// y[rows, outputs] = x[rows, inputs] weight[outputs, inputs]^T + bias. bias may be null.
template <typename T, typename S>
struct Projection {
    int64_t rows;
    const T* x;
    const S *weight, *bias;
    int64_t inputs, outputs;
    T* y;

    static constexpr int64_t kOutputs = 16;  // that one worker takes at a time

    int64_t items() const { return (outputs + kOutputs - 1) / kOutputs; }
    int64_t reads() const { return outputs * inputs; }

    void run(int64_t item) const {
        const int64_t first = item * kOutputs, last = std::min(first + kOutputs, outputs);
        int64_t n = first;
        for (; n + 4 <= last; n += 4) block<4>(n);
        for (; n < last; ++n) block<1>(n);
        if (bias)
            for (int64_t row = 0; row < rows; ++row)
                for (int64_t i = first; i < last; ++i) y[row * outputs + i] += widen(bias[i]);
    }

  private:
    // Outputs n ... n + N - 1 of all rows: independent sums, and each weight is read once for several rows.
    template <int N>
    void block(int64_t n) const {
        constexpr int kRows = kLanes<T> / 4;
        const S* from = weight + n * inputs;
        int64_t row = 0;
        for (; row + kRows <= rows; row += kRows) block<kRows, N>(row, from, n);
        if constexpr (kRows > 2)
            for (; row + 2 <= rows; row += 2) block<2, N>(row, from, n);
        for (; row < rows; ++row) block<1, N>(row, from, n);
    }
    template <int M, int N>
    void block(int64_t row, const S* from, int64_t n) const {
        products<T, S, M, N>(x + row * inputs, inputs, from, inputs, inputs, y + row * outputs + n, outputs);
    }
};

// The intermediate results of a step in T. Rows are (batch, query) pairs; those of the registers follow them
// in for_keys, for_values, k and v.
template <typename T>
struct StepBuffers {
    T *x, *for_keys, *for_values, *q, *k, *v, *gates, *o, *norms, *register_keys, *out;

    static constexpr int kCount = 11;
    template <typename S>
    static std::array<int64_t, kCount> sizes(const Step<T, S>& s) {
        const Problem<T>& p = s.problem;
        const int64_t rows = p.batch * p.queries, all = rows + s.num_registers;
        const int64_t qk = p.branches() * p.qk_dim, vo = p.heads * p.vo_dim;
        const int64_t rotated = s.cos.data ? rows * s.num_registers * qk : 0;
        return {rows * s.hidden,     all * s.hidden, all * s.hidden, rows * qk, all * qk,       all * vo,
                rows * s.gate_width, rows * vo,      rows * p.heads, rotated,   rows * s.hidden};
    }
    template <typename S>
    static size_t need(const Step<T, S>& s) {
        size_t bytes = 0;
        for (const int64_t size : sizes(s)) bytes += Arena::need<T>(size);
        return bytes;
    }
    template <typename S>
    StepBuffers(const Step<T, S>& s, Arena& arena) {
        T** const buffers[] = {&x, &for_keys, &for_values,    &q,  &k, &v, &gates,
                               &o, &norms,    &register_keys, &out};
        for (int i = 0; i < kCount; ++i) *buffers[i] = arena.take<T>(sizes(s)[i]);
    }
};

// One step. The phases are: inputs and convolutions, by channels; projections; gates, rotations and caches,
// by rows; those of the operator; output projection.
template <typename T, typename S>
class LayerStep {
  public:
    static size_t need(const Step<T, S>& s) {
        return StepBuffers<T>::need(s) + Decode<T>::need(s.problem, s.num_registers);
    }
    LayerStep(const Step<T, S>& s, Arena& arena)
        : s_(s),
          p_(s.problem),
          rows_(p_.batch * p_.queries),
          qk_(p_.branches() * p_.qk_dim),
          vo_(p_.heads * p_.vo_dim),
          own_(s, arena),
          decode_(
              prepared(), own_.q,
              {{own_.o, p_.queries * vo_, vo_, p_.vo_dim}, {own_.norms, p_.queries * p_.heads, p_.heads, 1}},
              gate(s.output_gate, p_.vo_dim), prefix(), arena) {}

    void run() const {
        constexpr size_t kBefore = 3, kAfter = kBefore + Decode<T>::kPhases;
        const int64_t all = rows_ + s_.num_registers, hidden = s_.hidden;
        const std::array<Projection<T, S>, 4> before{{
            {rows_, own_.x, s_.gate_weight, s_.gate_bias, hidden, s_.gate_width, own_.gates},
            {rows_, own_.x, s_.q_weight, nullptr, hidden, qk_, own_.q},
            {all, own_.for_keys, s_.k_weight, nullptr, hidden, qk_, own_.k},
            {all, own_.for_values, s_.v_weight, nullptr, hidden, vo_, own_.v},
        }};
        const Projection<T, S> after{rows_, own_.o, s_.o_weight, nullptr, vo_, hidden, own_.out};
        std::array<int64_t, kAfter + 1> counts;
        counts[0] = (hidden + kChannels - 1) / kChannels;
        counts[1] = 0;
        counts[2] = rows_;
        for (size_t phase = kBefore; phase < kAfter; ++phase) counts[phase] = decode_.count(phase - kBefore);
        counts[kAfter] = after.items();
        int64_t reads = decode_.reads() + after.reads();
        for (const Projection<T, S>& projection : before) {
            counts[1] += projection.items();
            reads += projection.reads();
        }
        in_phases(useful_threads(p_.threads, reads), counts, [&](size_t phase, int64_t i) {
            if (phase == 0) return channels(i);
            if (phase == 2) return row(i);
            if (phase >= kBefore && phase < kAfter) return decode_.run(phase - kBefore, i);
            if (phase == kAfter) {
                after.run(i);
                return store(i * after.kOutputs, std::min((i + 1) * after.kOutputs, hidden));
            }
            const Projection<T, S>* projection = before.data();
            for (; i >= projection->items(); ++projection) i -= projection->items();
            projection->run(i);
        });
    }

  private:
    static constexpr int64_t kChannels = 64;  // that one worker takes at a time

    int64_t past() const { return p_.keys - p_.queries; }
    // How many positions the new position of a row sees.
    int64_t reach(int64_t row) const { return s_.reach ? s_.reach[row] : past() + row % p_.queries + 1; }

    // Return the problem with the tensors that the step computes.
    const Problem<T>& prepared() {
        p_.k = s_.keys;
        p_.v = s_.values;
        p_.mix1.gate = gate(s_.mix1_gate, p_.mix1.rank);
        p_.mix2.gate = gate(s_.mix2_gate, p_.mix2.rank);
        return p_;
    }
    // The gate that begins at `column`, [batch, queries, heads, width]; without data if it is absent.
    Strided<const T> gate(int64_t column, int64_t width) const {
        if (column < 0) return {};
        return {own_.gates + column, p_.queries * s_.gate_width, s_.gate_width, width};
    }
    Prefix<T> prefix() const {
        const int64_t count = s_.num_registers;
        if (s_.cos.data) return {count, own_.register_keys, count * qk_, own_.v + rows_ * vo_};
        return {count, own_.k + rows_ * qk_, 0, own_.v + rows_ * vo_};
    }

    // Read the new inputs, write them into their cache, and compute both convolutions, for some channels.
    void channels(int64_t item) const {
        const int64_t first = item * kChannels, count = std::min(kChannels, s_.hidden - first);
        for (int64_t row = 0; row < rows_; ++row) {
            const int64_t b = row / p_.queries, t = row % p_.queries;
            const S* x = s_.x.at(b, t) + first;
            convert(x, count, own_.x + row * s_.hidden + first);
            if (s_.history.data) std::copy_n(x, count, s_.history.at(b, s_.past_inputs + t) + first);
        }
        for (int64_t row = 0; row < rows_ + s_.num_registers; ++row)
            for (T* to : {own_.for_keys, own_.for_values}) {
                T* out = to + row * s_.hidden + first;
                if (s_.history.data)
                    std::fill_n(out, count, T(0));
                else
                    convert(input(row, 0) + first, count, out);
            }
        if (!s_.history.data) return;
        for (int64_t lag = 0; lag < s_.kernel; ++lag) {
            T taps[2][kChannels];
            for (int64_t d = 0; d < count; ++d) {
                taps[0][d] = widen(s_.k_conv[(first + d) * s_.kernel + lag]);
                taps[1][d] = widen(s_.v_conv[(first + d) * s_.kernel + lag]);
            }
            for (int64_t row = 0; row < rows_ + s_.num_registers; ++row) {
                const S* from = input(row, lag);
                if (!from) continue;
                T *keys = own_.for_keys + row * s_.hidden + first,
                  *values = own_.for_values + row * s_.hidden + first;
                for (int64_t d = 0; d < count; ++d) {
                    const T x = widen(from[first + d]);
                    keys[d] += x * taps[0][d];
                    values[d] += x * taps[1][d];
                }
            }
        }
    }

    // The input at a distance before a row's own, a register if the context has no such position; null if
    // there is none.
    const S* input(int64_t row, int64_t lag) const {
        int64_t place = row - rows_ - lag;  // among the registers
        if (row < rows_) {
            const int64_t b = row / p_.queries, t = row % p_.queries, seen = reach(row);
            if (lag == 0 && !s_.history.data) return s_.x.at(b, t);
            if (lag < seen) {
                const int64_t held = s_.past_inputs + t - lag;
                return held < 0 ? nullptr : s_.history.at(b, held);
            }
            if (seen <= 0) return nullptr;
            place = s_.num_registers + seen - 1 - lag;
        }
        return place < 0 ? nullptr : s_.registers + place * s_.hidden;
    }

    // Gate and rotate the query of a row, and write its key and value into the caches.
    void row(int64_t row) const {
        const int64_t b = row / p_.queries, t = row % p_.queries, position = past() + t;
        T *query = own_.q + row * qk_, *key = own_.k + row * qk_, *gates = own_.gates + row * s_.gate_width;
#pragma omp simd
        for (int64_t i = 0; i < s_.gate_width; ++i) gates[i] = sigmoid(gates[i]);
        if (s_.cos.data) {
            rotate(row, 0, query, query);
            rotate(row, 0, key, key);
            T* keys = own_.register_keys + row * s_.num_registers * qk_;
            for (int64_t i = 0; i < s_.num_registers; ++i)
                rotate(row, 1 + i, own_.k + (rows_ + i) * qk_, keys + i * qk_);
        }
        if (s_.q_gate >= 0)
            for (int64_t i = 0; i < qk_; ++i) query[i] *= gates[s_.q_gate + i];
        for (int64_t g = 0; g < p_.branches(); ++g)
            convert(key + g * p_.qk_dim, p_.qk_dim, s_.keys.at(b, position, g));
        for (int64_t h = 0; h < p_.heads; ++h)
            convert(own_.v + row * vo_ + h * p_.vo_dim, p_.vo_dim, s_.values.at(b, position, h));
    }

    // Rotate all branches of a query or key by the angles `which` of a row. `to` may be `from`.
    void rotate(int64_t row, int64_t which, const T* from, T* to) const {
        const int64_t half = p_.qk_dim / 2;
        const T *cos = s_.cos.at(row / p_.queries, row % p_.queries, which),
                *sin = s_.sin.at(row / p_.queries, row % p_.queries, which);
        for (int64_t g = 0; g < p_.branches(); ++g, from += p_.qk_dim, to += p_.qk_dim)
            for (int64_t i = 0; i < half; ++i) {
                const T first = from[i], second = from[i + half];
                to[i] = first * cos[i] - second * sin[i];
                to[i + half] = second * cos[i] + first * sin[i];
            }
    }

    // Store outputs [first, last) of all rows.
    void store(int64_t first, int64_t last) const {
        for (int64_t row = 0; row < rows_; ++row)
            convert(own_.out + row * s_.hidden + first, last - first, s_.out + row * s_.hidden + first);
    }

    const Step<T, S>& s_;
    Problem<T> p_;
    int64_t rows_, qk_, vo_;
    StepBuffers<T> own_;
    Decode<T> decode_;
};

template <typename T, typename S>
void step(const Step<T, S>& s) {
    Lease lease(LayerStep<T, S>::need(s));
    LayerStep<T, S>(s, lease.arena).run();
}

template void step(const Step<float, float>&);
template void step(const Step<double, double>&);
template void step(const Step<float, BFloat16>&);
template void step(const Step<float, Float16>&);

}  // namespace hypermlp
