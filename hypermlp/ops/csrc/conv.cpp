// Two depthwise causal convolutions of one input in one pass, forward and backward. Workers take chunks of
// positions. The gradients of the weights are kept per chunk and then added in order, so the result does not
// depend on timing.
#include "conv.h"

#include "parallel.h"

namespace hypermlp {

constexpr int64_t kPositions = 64;  // that one worker takes at a time

inline int64_t count_chunks(int64_t length) { return (length + kPositions - 1) / kPositions; }

// The room for the gradients of one weight, one part for each chunk of outputs.
template <typename T>
int64_t sums_room(const ConvPair<T>& c) {
    return c.batch * count_chunks(c.length) * c.kernel * c.width;
}

template <typename T, typename S>
struct ConvWork {
    const ConvPair<T>& c;
    Taps<T, S> taps;
    int64_t chunks;

    ConvWork(const ConvPair<T>& conv, const Strided<const S>& x, Arena& arena)
        : c(conv), taps(conv, x, arena), chunks(count_chunks(conv.length)) {}

    // Call work(chunk, batch, first, last) for every chunk of positions.
    template <typename Work>
    void in_chunks(const Work& work) const {
        const int64_t count = c.batch * chunks;
        for_each(c.threads, count, [&](int64_t i, int64_t) {
            const int64_t first = i % chunks * kPositions;
            work(i, i / chunks, first, std::min(first + kPositions, c.length));
        });
    }

    void forward(T* out0, T* out1) const {
        in_chunks([&](int64_t, int64_t b, int64_t first, int64_t last) {
            for (int64_t t = first; t < last; ++t) {
                const int64_t row = (b * c.length + t) * c.width;
                taps.output(0, b, t, 0, c.width, out0 + row);
                taps.output(1, b, t, 0, c.width, out1 + row);
            }
        });
    }

    void backward(const ConvGradients<T>& grads, Arena& arena) const {
        T* const sums[2] = {arena.take<T>(sums_room(c)), arena.take<T>(sums_room(c))};
        const int64_t part = c.kernel * c.width;
        in_chunks([&](int64_t index, int64_t b, int64_t first, int64_t last) {
            T *sums0 = sums[0] + index * part, *sums1 = sums[1] + index * part;
            std::fill_n(sums0, part, T(0));
            std::fill_n(sums1, part, T(0));
            for (int64_t t = first; t < last; ++t)
                taps.add_weight_gradients(b, t, grads.out[0].at(b, t), grads.out[1].at(b, t), sums0, sums1);
            // Rows before the first output belong to chunk 0.
            for (int64_t s = first == 0 ? -c.past : first; s < last; ++s) {
                T* grad = grads.x + (b * (c.past + c.length) + c.past + s) * c.width;
                std::fill_n(grad, c.width, T(0));
                taps.add_input_gradient(
                    b, s, [&](int i, int64_t t) { return grads.out[i].at(b, t); }, grad);
            }
        });
        taps.store_weight_gradients(c.batch * chunks, sums, grads.weight);
    }
};

template <typename T>
void conv_forward(const ConvPair<T>& c, T* out0, T* out1) {
    Lease lease(Taps<T>::need(c));
    c.x.visit([&](const auto& x) { ConvWork(c, x, lease.arena).forward(out0, out1); });
}
template <typename T>
void conv_backward(const ConvPair<T>& c, const ConvGradients<T>& grads) {
    Lease lease(Taps<T>::need(c) + 2 * Arena::need<T>(sums_room(c)));
    c.x.visit([&](const auto& x) { ConvWork(c, x, lease.arena).backward(grads, lease.arena); });
}

template void conv_forward(const ConvPair<float>&, float*, float*);
template void conv_forward(const ConvPair<double>&, double*, double*);
template void conv_backward(const ConvPair<float>&, const ConvGradients<float>&);
template void conv_backward(const ConvPair<double>&, const ConvGradients<double>&);

}  // namespace hypermlp
