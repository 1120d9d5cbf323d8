// Two depthwise causal convolutions of one input in one pass, forward and backward; see layers/common.py for the definition.
// Threads take chunks of positions. The weights' gradients are kept per chunk, so the result does not depend on timing.
#include <atomic>

#include "common.h"

namespace hypermlp {

struct Conv {
    int64_t batch, length, past, width, kernel, chunk, threads;  // past: rows of x before the first output
    const int64_t* reach;                                        // [batch, length] or null
    const void* x;                                               // [batch, past + length, width], contiguous
    const void* weight[2];                                       // [kernel, width]: lag first
    void* out[2];                                                // [batch, length, width]
    const void* grad_out[2];
    void* grad_x;          // [batch, past + length, width]
    void* grad_weight[2];  // [batch * chunks, kernel, width]

    int64_t chunks() const { return (length + chunk - 1) / chunk; }
    // How many lags output t sees.
    int64_t lags(int64_t b, int64_t t) const {
        const int64_t known = std::min(kernel, past + t + 1);
        return reach ? std::min(known, reach[b * length + t]) : known;
    }
};

template <typename Work>
void in_chunks(const Conv& c, const Work& work) {
    const int64_t count = c.batch * c.chunks();
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(static_cast<int>(std::min(c.threads, count)))
    for (int64_t i = next++; i < count; i = next++) work(i, i / c.chunks(), i % c.chunks() * c.chunk);
}

template <typename T>
void conv_forward(const Conv& c) {
    const int64_t width = c.width;
    in_chunks(c, [&](int64_t, int64_t b, int64_t first) {
        for (int64_t t = first; t < std::min(first + c.chunk, c.length); ++t) {
            T* out0 = static_cast<T*>(c.out[0]) + (b * c.length + t) * width;
            T* out1 = static_cast<T*>(c.out[1]) + (b * c.length + t) * width;
            const T* x = static_cast<const T*>(c.x) + (b * (c.past + c.length) + c.past + t) * width;
            const T *w0 = static_cast<const T*>(c.weight[0]), *w1 = static_cast<const T*>(c.weight[1]);
            const int64_t lags = c.lags(b, t);
            std::fill(out0, out0 + width, T(0));
            std::fill(out1, out1 + width, T(0));
            for (int64_t lag = 0; lag < lags; ++lag, x -= width, w0 += width, w1 += width) {
#pragma omp simd
                for (int64_t d = 0; d < width; ++d) {
                    out0[d] += x[d] * w0[d];
                    out1[d] += x[d] * w1[d];
                }
            }
        }
    });
}

template <typename T>
void conv_backward(const Conv& c) {
    const int64_t width = c.width;
    // Weights: each chunk of outputs on its own.
    in_chunks(c, [&](int64_t index, int64_t b, int64_t first) {
        T* grad0 = static_cast<T*>(c.grad_weight[0]) + index * c.kernel * width;
        T* grad1 = static_cast<T*>(c.grad_weight[1]) + index * c.kernel * width;
        std::fill(grad0, grad0 + c.kernel * width, T(0));
        std::fill(grad1, grad1 + c.kernel * width, T(0));
        for (int64_t t = first; t < std::min(first + c.chunk, c.length); ++t) {
            const T* g0 = static_cast<const T*>(c.grad_out[0]) + (b * c.length + t) * width;
            const T* g1 = static_cast<const T*>(c.grad_out[1]) + (b * c.length + t) * width;
            const T* x = static_cast<const T*>(c.x) + (b * (c.past + c.length) + c.past + t) * width;
            const int64_t lags = c.lags(b, t);
            for (int64_t lag = 0; lag < lags; ++lag, x -= width) {
                T *sum0 = grad0 + lag * width, *sum1 = grad1 + lag * width;
#pragma omp simd
                for (int64_t d = 0; d < width; ++d) {
                    sum0[d] += g0[d] * x[d];
                    sum1[d] += g1[d] * x[d];
                }
            }
        }
    });
    // Input: row s gathers from the outputs that see it, s ... s + kernel - 1. Rows before the first output go with chunk 0.
    in_chunks(c, [&](int64_t, int64_t b, int64_t first) {
        for (int64_t s = first == 0 ? -c.past : first; s < std::min(first + c.chunk, c.length); ++s) {
            T* grad = static_cast<T*>(c.grad_x) + (b * (c.past + c.length) + c.past + s) * width;
            std::fill(grad, grad + width, T(0));
            for (int64_t lag = std::max<int64_t>(0, -s); lag < c.kernel && s + lag < c.length; ++lag) {
                if (lag >= c.lags(b, s + lag)) continue;
                const T* g0 = static_cast<const T*>(c.grad_out[0]) + (b * c.length + s + lag) * width;
                const T* g1 = static_cast<const T*>(c.grad_out[1]) + (b * c.length + s + lag) * width;
                const T *w0 = static_cast<const T*>(c.weight[0]) + lag * width, *w1 = static_cast<const T*>(c.weight[1]) + lag * width;
#pragma omp simd
                for (int64_t d = 0; d < width; ++d) grad[d] += g0[d] * w0[d] + g1[d] * w1[d];
            }
        }
    });
}

}  // namespace hypermlp

extern "C" {
int64_t hypermlp_conv_size() { return sizeof(hypermlp::Conv); }
void hypermlp_conv_forward_float(const hypermlp::Conv* c) { hypermlp::conv_forward<float>(*c); }
void hypermlp_conv_forward_double(const hypermlp::Conv* c) { hypermlp::conv_forward<double>(*c); }
void hypermlp_conv_backward_float(const hypermlp::Conv* c) { hypermlp::conv_backward<float>(*c); }
void hypermlp_conv_backward_double(const hypermlp::Conv* c) { hypermlp::conv_backward<double>(*c); }
}
