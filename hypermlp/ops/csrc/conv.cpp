// Two depthwise causal convolutions of one input in one pass, forward and backward. Workers take chunks of
// positions. The gradients of the weights are kept per chunk and then added in order, so the result does not
// depend on timing.
#include <algorithm>

#include "kernels.h"
#include "parallel.h"
#include "scratch.h"

namespace hypermlp {

constexpr int64_t kPositions = 64;  // that one worker takes at a time

enum class Pass { kForward, kBackward };

template <typename T>
struct ConvWork {
    const ConvPair<T>& c;
    int64_t chunks, taps;
    T* weight[2];  // [kernel, width], lag 0 first
    T* sums[2];    // gradients of the weights, [batch * chunks, kernel, width]

    // The numbers of partial sums.
    static int64_t room(const ConvPair<T>& c, Pass pass) {
        const int64_t chunks = (c.length + kPositions - 1) / kPositions;
        return pass == Pass::kBackward ? c.batch * chunks * c.kernel * c.width : 0;
    }
    static size_t need(const ConvPair<T>& c, Pass pass) {
        return 2 * (Arena::need<T>(c.kernel * c.width) + Arena::need<T>(room(c, pass)));
    }
    ConvWork(const ConvPair<T>& conv, Pass pass, Arena& arena) : c(conv) {
        chunks = (c.length + kPositions - 1) / kPositions;
        taps = c.kernel * c.width;
        for (int i = 0; i < 2; ++i) {
            weight[i] = arena.take<T>(taps);
            sums[i] = arena.take<T>(room(c, pass));
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

    // Call work(chunk, batch, first, last) for every chunk of positions.
    template <typename Work>
    void in_chunks(const Work& work) const {
        const int64_t count = c.batch * chunks;
        for_each(c.threads, count, [&](int64_t i, int64_t) {
            const int64_t first = i % chunks * kPositions;
            work(i, i / chunks, first, std::min(first + kPositions, c.length));
        });
    }

    void forward(T* all0, T* all1) const {
        c.x.visit([&](const auto& x) { forward(x, all0, all1); });
    }

    void backward(const ConvGradients<T>& grads) const {
        c.x.visit([&](const auto& x) { weight_sums(x, grads); });
        input_gradient(grads);
        weight_gradients(grads);
    }

  private:
    template <typename S>
    void forward(const Strided<const S>& inputs, T* all0, T* all1) const {
        in_chunks([&](int64_t, int64_t b, int64_t first, int64_t last) {
            for (int64_t t = first; t < last; ++t) {
                T* out0 = all0 + (b * c.length + t) * c.width;
                T* out1 = all1 + (b * c.length + t) * c.width;
                std::fill_n(out0, c.width, T(0));
                std::fill_n(out1, c.width, T(0));
                for (int64_t lag = 0; lag < lags(b, t); ++lag) {
                    const S* x = inputs.at(b, c.past + t - lag);
                    const T *w0 = weight[0] + lag * c.width, *w1 = weight[1] + lag * c.width;
#pragma omp simd
                    for (int64_t d = 0; d < c.width; ++d) {
                        const T value = widen(x[d]);
                        out0[d] += value * w0[d];
                        out1[d] += value * w1[d];
                    }
                }
            }
        });
    }

    // The gradients of the weights from each chunk of outputs.
    template <typename S>
    void weight_sums(const Strided<const S>& inputs, const ConvGradients<T>& grads) const {
        in_chunks([&](int64_t index, int64_t b, int64_t first, int64_t last) {
            T *grad0 = sums[0] + index * taps, *grad1 = sums[1] + index * taps;
            std::fill_n(grad0, taps, T(0));
            std::fill_n(grad1, taps, T(0));
            for (int64_t t = first; t < last; ++t) {
                const T *g0 = grads.out[0].at(b, t), *g1 = grads.out[1].at(b, t);
                for (int64_t lag = 0; lag < lags(b, t); ++lag) {
                    const S* x = inputs.at(b, c.past + t - lag);
                    T *sum0 = grad0 + lag * c.width, *sum1 = grad1 + lag * c.width;
#pragma omp simd
                    for (int64_t d = 0; d < c.width; ++d) {
                        const T value = widen(x[d]);
                        sum0[d] += g0[d] * value;
                        sum1[d] += g1[d] * value;
                    }
                }
            }
        });
    }

    // Row s of the input's gradient gathers from the outputs that see it, s ... s + kernel - 1. Rows before
    // the first output belong to chunk 0.
    void input_gradient(const ConvGradients<T>& grads) const {
        in_chunks([&](int64_t, int64_t b, int64_t first, int64_t last) {
            for (int64_t s = first == 0 ? -c.past : first; s < last; ++s) {
                T* grad = grads.x + (b * (c.past + c.length) + c.past + s) * c.width;
                std::fill_n(grad, c.width, T(0));
                for (int64_t lag = std::max<int64_t>(0, -s); lag < c.kernel && s + lag < c.length; ++lag) {
                    if (lag >= lags(b, s + lag)) continue;
                    const T *g0 = grads.out[0].at(b, s + lag), *g1 = grads.out[1].at(b, s + lag);
                    const T *w0 = weight[0] + lag * c.width, *w1 = weight[1] + lag * c.width;
#pragma omp simd
                    for (int64_t d = 0; d < c.width; ++d) grad[d] += g0[d] * w0[d] + g1[d] * w1[d];
                }
            }
        });
    }

    // Add up the chunks, in place, and transpose.
    void weight_gradients(const ConvGradients<T>& grads) const {
        for (int i = 0; i < 2; ++i) {
            T *sum = sums[i], *out = grads.weight[i];
            for (int64_t chunk = 1; chunk < c.batch * chunks; ++chunk) {
                const T* more = sum + chunk * taps;
#pragma omp simd
                for (int64_t x = 0; x < taps; ++x) sum[x] += more[x];
            }
            for (int64_t lag = 0; lag < c.kernel; ++lag)
                for (int64_t d = 0; d < c.width; ++d) out[d * c.kernel + lag] = sum[lag * c.width + d];
        }
    }
};

template <typename T>
void conv_forward(const ConvPair<T>& c, T* out0, T* out1) {
    Lease lease(ConvWork<T>::need(c, Pass::kForward));
    ConvWork<T>(c, Pass::kForward, lease.arena).forward(out0, out1);
}
template <typename T>
void conv_backward(const ConvPair<T>& c, const ConvGradients<T>& grads) {
    Lease lease(ConvWork<T>::need(c, Pass::kBackward));
    ConvWork<T>(c, Pass::kBackward, lease.arena).backward(grads);
}

template void conv_forward(const ConvPair<float>&, float*, float*);
template void conv_forward(const ConvPair<double>&, double*, double*);
template void conv_backward(const ConvPair<float>&, const ConvGradients<float>&);
template void conv_backward(const ConvPair<double>&, const ConvGradients<double>&);

}  // namespace hypermlp
