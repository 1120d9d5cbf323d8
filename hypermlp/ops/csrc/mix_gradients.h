// The gradients of the sequence mixes.
#pragma once

#include "mix.h"

namespace hypermlp {

// Gradients of the parameters of one mix, for every (batch, head), in the kernels' order of slots.
template <typename T>
struct MixSums {
    int64_t heads, length, rank;
    T* scale = nullptr;                   // [batch, heads, length]
    T *left = nullptr, *right = nullptr;  // [batch, heads, length, rank]

    static size_t need(const Mix<T>& mix, int64_t batch, int64_t heads, int64_t keys) {
        if (!mix.exists()) return 0;
        const int64_t rows = batch * heads * padded<T>(std::min(mix.slots, keys));
        return Arena::need<T>(rows) + 2 * Arena::need<T>(rows * mix.rank);
    }
    MixSums(const Mix<T>& mix, const PackedMix<T>& packed, int64_t batch, int64_t heads_, Arena& arena)
        : heads(heads_), length(packed.length), rank(packed.rank) {
        if (!mix.exists()) return;
        const int64_t rows = batch * heads * length;
        scale = arena.take<T>(rows);
        left = arena.take<T>(rows * rank);
        right = arena.take<T>(rows * rank);
    }
    void clear(int64_t batch, int64_t head) const {
        const int64_t first = (batch * heads + head) * length;
        std::fill_n(scale + first, length, T(0));
        std::fill_n(left + first * rank, length * rank, T(0));
        std::fill_n(right + first * rank, length * rank, T(0));
    }
    // Add up the batch, into the order of slots of the parameters.
    void store(const MixGradients<T>& grads, const Mix<T>& mix, const PackedMix<T>& packed, int64_t batch,
               int64_t threads) const {
        if (!mix.exists()) return;
        const int64_t panels = length / kPanel<T>;
        for_ranges(threads, heads * panels, [&](int64_t i) {
            const int64_t head = i / panels, first = i % panels * kPanel<T>;
            store(scale, 1, grads.diag, mix.slots, packed, batch, head, first);
            store(left, rank, grads.left, mix.slots, packed, batch, head, first);
            store(right, rank, grads.right, mix.slots, packed, batch, head, first);
        });
    }

  private:
    // Store the slots of one panel. That of the first panel also zeroes the slots that no key reaches.
    void store(const T* sums, int64_t width, T* to, int64_t slots, const PackedMix<T>& packed, int64_t batch,
               int64_t head, int64_t first) const {
        T* out = to + head * slots * width;
        if (first == 0) std::fill_n(out + packed.used * width, (slots - packed.used) * width, T(0));
        for (int64_t row = first; row < first + kPanel<T>; ++row) {
            const int64_t slot = packed.slot(row);
            if (slot >= packed.used) continue;
            std::fill_n(out + slot * width, width, T(0));
            for (int64_t b = 0; b < batch; ++b) {
                const T* from = sums + ((b * heads + head) * length + row) * width;
                for (int64_t x = 0; x < width; ++x) out[slot * width + x] += from[x];
            }
        }
    }
};

// The backward of one mix, for one head.
template <typename T>
struct HeadMixGrad {
    HeadMix<T> mix, reversed;
    T *scale, *left, *right;
    Strided<T> gate;

    HeadMixGrad(const Mix<T>& m, const PackedMix<T>& packed, const MixSums<T>& sums,
                const Strided<T>& grad_gate, int64_t batch, int64_t head, Direction direction)
        : mix(m, packed, batch, head, direction),
          reversed(m, packed, batch, head, opposite(direction)),
          gate(grad_gate) {
        const int64_t first = (batch * sums.heads + head) * sums.length;
        const bool straight = direction == Direction::kStraight;
        scale = sums.scale + first;
        left = (straight ? sums.left : sums.right) + first * m.rank;
        right = (straight ? sums.right : sums.left) + first * m.rank;
    }

    // Replace the gradient of y R by that of y, and add to those of the parameters when `in_order` calls. y
    // is the input of the mix; inner and gated come from its forward; panels has room for [rows, rank].
    template <typename InOrder>
    void apply(const Block<T>& b, const T* y, const T* inner, const T* gated, T* grad, T* grad_inner,
               T* grad_gated, T* panels, const InOrder& in_order) const {
        const int64_t row0 = mix.first_row(b), ld = padded<T>(mix.rank);
        reversed.inner(b, grad, grad_inner, grad_gated);
        in_order([&] {
            add_scale(b, y, grad);
            outer(b, grad, gated, panels, right + row0 * mix.rank);
            outer(b, y, grad_gated, panels, left + row0 * mix.rank);
        });
        reversed.update(b, grad, grad_gated, grad);
        for (int64_t row = 0; row < b.rows; ++row) {
            T* g = gate.at(mix.batch, b.first_query + row, mix.head);
            for (int64_t r = 0; r < mix.rank; ++r) g[r] = grad_inner[row * ld + r] * inner[row * ld + r];
        }
    }

  private:
    void add_scale(const Block<T>& b, const T* y, const T* grad) const {
        const int64_t skip = mix.first_column(b);
        T* sums = scale + mix.first_row(b);
        for (int64_t row = 0; row < b.rows; ++row) {
            const T *cells = b.aligned(y, row) + skip, *grads = b.aligned(grad, row) + skip;
            const int64_t from = std::max<int64_t>(b.begin(row) - skip, 0), to = b.end(row) - skip;
#pragma omp simd
            for (int64_t c = from; c < to; ++c) sums[c] += cells[c] * grads[c];
        }
    }

    // sums[width, rank] += cells^T small, over the rows of the block
    void outer(const Block<T>& b, const T* cells, const T* small, T* panels, T* sums) const {
        const int64_t ld = padded<T>(mix.rank), step = b.rows * kPanel<T>;
        for (int64_t r = 0; r < mix.rank; r += kPanel<T>)
            pack_panel<T>(b.rows, mix.rank, {small, ld, 1}, r, panels + r / kPanel<T> * step);
        const View<T> view = mix.view(b, cells);
        multiply<T, Into::kAdd>(mix.width(b), mix.rank, b.rows, {view.data, view.column, view.row}, panels,
                                step, sums, mix.rank);
    }
};

}  // namespace hypermlp
