// Depthwise causal convolutions of one input in one pass, forward and backward. Workers take chunks of
// positions. The gradients of the weights are kept per chunk and then added in order, so the result does not
// depend on timing.
#include "conv.h"

#include "parallel.h"

namespace hypermlp {

constexpr int64_t kPositions = 64;  // that one worker takes at a time

inline int64_t count_chunks(int64_t length) { return (length + kPositions - 1) / kPositions; }

// The room for the gradients of one weight, one part for each chunk of outputs.
template <typename T>
int64_t sums_room(const Convolutions<T>& c) {
    return c.batch * count_chunks(c.length) * c.kernel * c.width;
}

template <typename T, typename S>
struct ConvWork {
    const Convolutions<T>& c;
    Taps<T, S> taps;
    int64_t chunks;

    ConvWork(const Convolutions<T>& conv, const Strided<const S>& x, Arena& arena)
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

    void forward(const std::vector<T*>& outs) const {
        in_chunks([&](int64_t, int64_t b, int64_t first, int64_t last) {
            for (int64_t t = first; t < last; ++t)
                for (size_t which = 0; which < outs.size(); ++which)
                    taps.output(which, b, t, 0, c.width, outs[which] + (b * c.length + t) * c.width);
        });
    }

    void backward(const ConvGradients<T>& grads, Arena& arena) const {
        std::vector<T*> sums;
        for (size_t which = 0; which < grads.outs.size(); ++which)
            sums.push_back(arena.take<T>(sums_room(c)));
        const int64_t part = c.kernel * c.width;
        in_chunks([&](int64_t index, int64_t b, int64_t first, int64_t last) {
            // Rows before the first output belong to chunk 0.
            const int64_t first_input = first == 0 ? -c.past : first;
            T* grad = grads.x + (b * (c.past + c.length) + c.past + first_input) * c.width;
            std::fill_n(grad, (last - first_input) * c.width, T(0));
            for (size_t which = 0; which < sums.size(); ++which) {
                const auto row = [&](int64_t t) { return grads.outs[which].at(b, t); };
                T* sum = sums[which] + index * part;
                std::fill_n(sum, part, T(0));
                for (int64_t t = first; t < last; ++t) taps.add_weight_gradient(b, t, row(t), sum);
                for (int64_t s = first_input; s < last; ++s)
                    taps.add_input_gradient(which, b, s, row, grad + (s - first_input) * c.width);
            }
        });
        for (size_t which = 0; which < sums.size(); ++which)
            taps.store_weight_gradient(c.batch * chunks, sums[which], grads.weights[which]);
    }
};

template <typename T>
void conv_forward(const Convolutions<T>& c, const std::vector<T*>& outs) {
    Lease lease(Taps<T>::need(c));
    c.x.visit([&](const auto& x) { ConvWork(c, x, lease.arena).forward(outs); });
}
template <typename T>
void conv_backward(const Convolutions<T>& c, const ConvGradients<T>& grads) {
    Lease lease(Taps<T>::need(c) + c.weights.size() * Arena::need<T>(sums_room(c)));
    c.x.visit([&](const auto& x) { ConvWork(c, x, lease.arena).backward(grads, lease.arena); });
}

template void conv_forward(const Convolutions<float>&, const std::vector<float*>&);
template void conv_forward(const Convolutions<double>&, const std::vector<double*>&);
template void conv_backward(const Convolutions<float>&, const ConvGradients<float>&);
template void conv_backward(const Convolutions<double>&, const ConvGradients<double>&);

}  // namespace hypermlp
