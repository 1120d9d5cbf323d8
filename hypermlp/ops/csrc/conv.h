// The arithmetic of two depthwise causal convolutions of one input, one position at a time.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "rows.h"
#include "scratch.h"

namespace hypermlp {

// The input is stored as S.
template <typename T, typename S = T>
struct Taps {
    const ConvPair<T>& c;
    Strided<const S> x;  // that of c
    T* weight[2];        // [kernel, width], lag 0 first

    static size_t need(const ConvPair<T>& c) { return 2 * Arena::need<T>(c.kernel * c.width); }
    Taps(const ConvPair<T>& conv, const Strided<const S>& inputs, Arena& arena) : c(conv), x(inputs) {
        for (int i = 0; i < 2; ++i) {
            weight[i] = arena.take<T>(c.kernel * c.width);
            c.weight[i].visit([&](const auto& from) {
                for (int64_t lag = 0; lag < c.kernel; ++lag)
                    for (int64_t d = 0; d < c.width; ++d)
                        weight[i][lag * c.width + d] = widen(from.at(d, 0)[lag]);
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
    void output(int which, int64_t b, int64_t t, int64_t first, int64_t count, T* out) const {
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

    // sums[kernel, width] += the gradients of both weights from those of output t.
    void add_weight_gradients(int64_t b, int64_t t, const T* grad0, const T* grad1, T* sums0,
                              T* sums1) const {
        for (int64_t lag = 0; lag < lags(b, t); ++lag) {
            const S* from = input(b, t - lag);
            T *sum0 = sums0 + lag * c.width, *sum1 = sums1 + lag * c.width;
#pragma omp simd
            for (int64_t d = 0; d < c.width; ++d) {
                const T value = widen(from[d]);
                sum0[d] += grad0[d] * value;
                sum1[d] += grad1[d] * value;
            }
        }
    }

    // grad[width] += the gradient of input s, from the outputs s ... s + kernel - 1 that see it. row(i, t) is
    // the gradient of output t of convolution i.
    template <typename Row>
    void add_input_gradient(int64_t b, int64_t s, const Row& row, T* grad) const {
        for (int64_t lag = std::max<int64_t>(0, -s); lag < c.kernel && s + lag < c.length; ++lag) {
            if (lag >= lags(b, s + lag)) continue;
            const T *g0 = row(0, s + lag), *g1 = row(1, s + lag);
            const T *w0 = weight[0] + lag * c.width, *w1 = weight[1] + lag * c.width;
#pragma omp simd
            for (int64_t d = 0; d < c.width; ++d) grad[d] += g0[d] * w0[d] + g1[d] * w1[d];
        }
    }

    // Add up `count` partial sums of each weight's gradient, in place and in order, and store them in the
    // order of the weights.
    void store_weight_gradients(int64_t count, T* const sums[2], T* const to[2]) const {
        const int64_t taps = c.kernel * c.width;
        for (int i = 0; i < 2; ++i) {
            T* sum = sums[i];
            for (int64_t part = 1; part < count; ++part) {
                const T* more = sum + part * taps;
#pragma omp simd
                for (int64_t x = 0; x < taps; ++x) sum[x] += more[x];
            }
            for (int64_t lag = 0; lag < c.kernel; ++lag)
                for (int64_t d = 0; d < c.width; ++d) to[i][d * c.kernel + lag] = sum[lag * c.width + d];
        }
    }
};

}  // namespace hypermlp
