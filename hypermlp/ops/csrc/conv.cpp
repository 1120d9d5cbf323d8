// Two depthwise causal convolutions of one input in one pass, forward and backward; see layers/common.py for the definition.
// Threads take chunks of positions. The weights' gradients are kept per chunk, so the result does not depend on timing.
#include <atomic>

#include "kernels.h"

namespace hypermlp {

constexpr int64_t kPositions = 64;  // that one thread takes at a time

template <typename T>
struct ConvWork {
    const Conv& c;
    int64_t chunks, taps;
    T* weight[2];  // [kernel, width]: lag first
    T* sums[2];    // [batch * chunks, kernel, width]

    ConvWork(const Conv& conv, Scratch& scratch, bool backward) : c(conv) {
        chunks = (c.length + kPositions - 1) / kPositions;
        taps = c.kernel * c.width;
        const int64_t room = backward ? c.batch * chunks * taps : 0;
        scratch.reserve(2 * (Scratch::need<T>(taps) + Scratch::need<T>(room)));
        for (int i = 0; i < 2; ++i) {
            weight[i] = scratch.take<T>(taps);
            sums[i] = scratch.take<T>(room);
            const T* from = static_cast<const T*>(c.weight[i]);
            for (int64_t lag = 0; lag < c.kernel; ++lag)
                for (int64_t d = 0; d < c.width; ++d) weight[i][lag * c.width + d] = from[d * c.kernel + lag];
        }
    }

    // How many lags output t sees.
    int64_t lags(int64_t b, int64_t t) const {
        const int64_t known = std::min(c.kernel, c.past + t + 1);
        return c.reach ? std::min(known, c.reach[b * c.length + t]) : known;
    }
    const T* input(int64_t b, int64_t t) const { return c.x.at<const T>(b, c.past + t, 0); }

    template <typename Work>
    void in_chunks(const Work& work) const {  // work(index, batch, first, last)
        const int64_t count = c.batch * chunks;
        const auto run = [&](int64_t i) {
            const int64_t first = i % chunks * kPositions;
            work(i, i / chunks, first, std::min(first + kPositions, c.length));
        };
        if (count == 1) return run(0);
        std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(static_cast<int>(std::min(c.threads, count)))
        for (int64_t i = next++; i < count; i = next++) run(i);
    }

    void forward() const {
        in_chunks([&](int64_t, int64_t b, int64_t first, int64_t last) {
            for (int64_t t = first; t < last; ++t) {
                T* out0 = static_cast<T*>(c.out[0]) + (b * c.length + t) * c.width;
                T* out1 = static_cast<T*>(c.out[1]) + (b * c.length + t) * c.width;
                std::fill_n(out0, c.width, T(0));
                std::fill_n(out1, c.width, T(0));
                for (int64_t lag = 0; lag < lags(b, t); ++lag) {
                    const T *x = input(b, t - lag), *w0 = weight[0] + lag * c.width, *w1 = weight[1] + lag * c.width;
#pragma omp simd
                    for (int64_t d = 0; d < c.width; ++d) {
                        out0[d] += x[d] * w0[d];
                        out1[d] += x[d] * w1[d];
                    }
                }
            }
        });
    }

    void backward() const {
        // Weights: each chunk of outputs on its own.
        in_chunks([&](int64_t index, int64_t b, int64_t first, int64_t last) {
            T *grad0 = sums[0] + index * taps, *grad1 = sums[1] + index * taps;
            std::fill_n(grad0, taps, T(0));
            std::fill_n(grad1, taps, T(0));
            for (int64_t t = first; t < last; ++t) {
                const T *g0 = c.grad_out[0].at<const T>(b, t, 0), *g1 = c.grad_out[1].at<const T>(b, t, 0);
                for (int64_t lag = 0; lag < lags(b, t); ++lag) {
                    const T* x = input(b, t - lag);
                    T *sum0 = grad0 + lag * c.width, *sum1 = grad1 + lag * c.width;
#pragma omp simd
                    for (int64_t d = 0; d < c.width; ++d) {
                        sum0[d] += g0[d] * x[d];
                        sum1[d] += g1[d] * x[d];
                    }
                }
            }
        });
        // Input: row s gathers from the outputs that see it, s ... s + kernel - 1. Rows before the first output go with chunk 0.
        in_chunks([&](int64_t, int64_t b, int64_t first, int64_t last) {
            for (int64_t s = first == 0 ? -c.past : first; s < last; ++s) {
                T* grad = static_cast<T*>(c.grad_x) + (b * (c.past + c.length) + c.past + s) * c.width;
                std::fill_n(grad, c.width, T(0));
                for (int64_t lag = std::max<int64_t>(0, -s); lag < c.kernel && s + lag < c.length; ++lag) {
                    if (lag >= lags(b, s + lag)) continue;
                    const T *g0 = c.grad_out[0].at<const T>(b, s + lag, 0), *g1 = c.grad_out[1].at<const T>(b, s + lag, 0);
                    const T *w0 = weight[0] + lag * c.width, *w1 = weight[1] + lag * c.width;
#pragma omp simd
                    for (int64_t d = 0; d < c.width; ++d) grad[d] += g0[d] * w0[d] + g1[d] * w1[d];
                }
            }
        });
        for (int i = 0; i < 2; ++i) {
            T* out = static_cast<T*>(c.grad_weight[i]);
            for (int64_t chunk = 1; chunk < c.batch * chunks; ++chunk)
#pragma omp simd
                for (int64_t x = 0; x < taps; ++x) sums[i][x] += sums[i][chunk * taps + x];
            for (int64_t lag = 0; lag < c.kernel; ++lag)
                for (int64_t d = 0; d < c.width; ++d) out[d * c.kernel + lag] = sums[i][lag * c.width + d];
        }
    }
};

template <typename T>
void conv_forward(const Conv& c) {
    ConvWork<T>(c, shared_scratch(), false).forward();
}
template <typename T>
void conv_backward(const Conv& c) {
    ConvWork<T>(c, shared_scratch(), true).backward();
}

template void conv_forward<float>(const Conv&);
template void conv_forward<double>(const Conv&);
template void conv_backward<float>(const Conv&);
template void conv_backward<double>(const Conv&);

}  // namespace hypermlp
