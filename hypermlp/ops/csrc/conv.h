// The arithmetic of depthwise causal convolutions of one input, one position at a time.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "rows.h"
#include "scratch.h"

namespace hypermlp {

// The input is stored as S.
template <typename T, typename S = T>
struct Taps {
    const Convolutions<T>& c;
    Strided<const S> x;      // that of c
    std::vector<T*> weight;  // [kernel, width] each, lag 0 first

    static size_t need(const Convolutions<T>& c) {
        return c.weights.size() * Arena::need<T>(c.kernel * c.width);
    }
    Taps(const Convolutions<T>& conv, const Strided<const S>& inputs, Arena& arena) : c(conv), x(inputs) {
        for (const Source<T>& source : c.weights) {
            T* to = weight.emplace_back(arena.take<T>(c.kernel * c.width));
            source.visit([&](const auto& from) {
                for (int64_t lag = 0; lag < c.kernel; ++lag)
                    for (int64_t d = 0; d < c.width; ++d) to[lag * c.width + d] = widen(from.at(d, 0)[lag]);
            });
        }
    }

    // How many lags output t sees.
    int64_t lags(int64_t b, int64_t t) const {
        const int64_t known = std::min(c.kernel, c.past + t + 1);
        return c.reach ? std::min(known, c.reach[b * c.length + t]) : known;
    }
    const S* input(int64_t b, int64_t t) const { return x.at(b, c.past + t); }

    // out[count] <- output t of convolution `which`, from channel `first` on.
    void output(size_t which, int64_t b, int64_t t, int64_t first, int64_t count, T* out) const {
        using V = Vector<T>;
        const S* from = input(b, t) + first;
        const T* w = weight[which] + first;
        const int64_t seen = lags(b, t), before = x.token;
        int64_t d = 0;
        for (; d + kLanes<T> <= count; d += kLanes<T>) {
            typename V::type sum = {};
            for (int64_t lag = 0; lag < seen; ++lag)
                sum += Load<T, S>::whole(from + d - lag * before) * V::load(w + d + lag * c.width);
            V::store(out + d, sum);
        }
        for (; d < count; ++d) {
            T sum = 0;
            for (int64_t lag = 0; lag < seen; ++lag)
                sum += widen(from[d - lag * before]) * w[d + lag * c.width];
            out[d] = sum;
        }
    }

    // sums[kernel, width] += the gradient of a weight from that of its output t.
    void add_weight_gradient(int64_t b, int64_t t, const T* grad, T* sums) const {
        for (int64_t lag = 0; lag < lags(b, t); ++lag) {
            const S* from = input(b, t - lag);
            T* sum = sums + lag * c.width;
#pragma omp simd
            for (int64_t d = 0; d < c.width; ++d) sum[d] += grad[d] * widen(from[d]);
        }
    }

    // grad[width] += the gradient of input s from the outputs s ... s + kernel - 1 of one convolution, those
    // that see it. row(t) is the gradient of output t.
    template <typename Row>
    void add_input_gradient(size_t which, int64_t b, int64_t s, const Row& row, T* grad) const {
        for (int64_t lag = std::max<int64_t>(0, -s); lag < c.kernel && s + lag < c.length; ++lag) {
            if (lag >= lags(b, s + lag)) continue;
            const T *g = row(s + lag), *w = weight[which] + lag * c.width;
#pragma omp simd
            for (int64_t d = 0; d < c.width; ++d) grad[d] += g[d] * w[d];
        }
    }

    // Add up `count` partial sums of a weight's gradient, in place and in order, and store them in the order
    // of the weight.
    void store_weight_gradient(int64_t count, T* sums, T* to) const {
        const int64_t taps = c.kernel * c.width;
        for (int64_t part = 1; part < count; ++part) {
            const T* more = sums + part * taps;
#pragma omp simd
            for (int64_t i = 0; i < taps; ++i) sums[i] += more[i];
        }
        for (int64_t lag = 0; lag < c.kernel; ++lag)
            for (int64_t d = 0; d < c.width; ++d) to[d * c.kernel + lag] = sums[lag * c.width + d];
    }
};

}  // namespace hypermlp
