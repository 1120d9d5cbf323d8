// The gradients of the sequence mixes.
#pragma once

#include "mix.h"

namespace hypermlp {

// Batch items in groups. The items of a group add to the same sums, so that a large batch does not need as
// many of them. The groups depend on the batch alone.
struct BatchGroups {
    int64_t batch, count;

    explicit BatchGroups(int64_t batch_) : batch(batch_), count(std::min<int64_t>(batch, 8)) {}
    int64_t begin(int64_t group) const { return batch * group / count; }
};

// Gradients of the parameters of one mix, for every (group, head), in the kernels' order of slots. Rows have
// room for a panel beyond the last slot, because products store whole panels.
template <typename T>
struct MixSums {
    int64_t groups, heads, length, ld, rank;
    T* scale = nullptr;                   // [groups, heads, ld]
    T *left = nullptr, *right = nullptr;  // [groups, heads, rank, ld]

    static int64_t row(int64_t length) { return length + kPanel<T>; }
    static size_t need(const Mix<T>& mix, int64_t groups, int64_t heads, int64_t keys) {
        if (!mix.exists()) return 0;
        const int64_t cells = groups * heads * row(padded<T>(std::min(mix.slots, keys)));
        return Arena::need<T>(cells) + 2 * Arena::need<T>(cells * mix.rank);
    }
    MixSums(const Mix<T>& mix, const PackedMix<T>& packed, int64_t groups_, int64_t heads_, Arena& arena)
        : groups(groups_), heads(heads_), length(packed.length), ld(row(packed.length)), rank(packed.rank) {
        if (!mix.exists()) return;
        const int64_t cells = groups * heads * ld;
        scale = arena.take<T>(cells);
        left = arena.take<T>(cells * rank);
        right = arena.take<T>(cells * rank);
    }
    void clear(int64_t group, int64_t head) const {
        const int64_t first = (group * heads + head) * ld;
        std::fill_n(scale + first, ld, T(0));
        std::fill_n(left + first * rank, ld * rank, T(0));
        std::fill_n(right + first * rank, ld * rank, T(0));
    }
    // Add up the groups, into the order of slots of the parameters.
    void store(const MixGradients<T>& grads, const Mix<T>& mix, const PackedMix<T>& packed,
               int64_t threads) const {
        if (!mix.exists()) return;
        const int64_t panels = length / kPanel<T>;
        for_ranges(threads, heads * panels, [&](int64_t i) {
            const int64_t head = i / panels, first = i % panels * kPanel<T>;
            store(scale, 1, grads.diag, mix.slots, packed, head, first);
            store(left, rank, grads.left, mix.slots, packed, head, first);
            store(right, rank, grads.right, mix.slots, packed, head, first);
        });
    }

  private:
    // Store the slots of one panel. That of the first panel also zeroes the slots that no key reaches.
    void store(const T* sums, int64_t width, const Strided<T>& to, int64_t slots, const PackedMix<T>& packed,
               int64_t head, int64_t first) const {
        T* out = to.at(head, 0);
        if (first == 0) std::fill_n(out + packed.used * width, (slots - packed.used) * width, T(0));
        for (int64_t row = first; row < first + kPanel<T>; ++row) {
            const int64_t slot = packed.slot(row);
            if (slot >= packed.used) continue;
            for (int64_t x = 0; x < width; ++x) {
                T sum = 0;
                for (int64_t g = 0; g < groups; ++g) sum += sums[((g * heads + head) * width + x) * ld + row];
                out[slot * width + x] = sum;
            }
        }
    }
};

// The backward of one mix, for one head.
template <typename T>
struct HeadMixGrad {
    HeadMix<T> mix, reversed;
    T *scale, *left, *right;
    int64_t ld;
    Strided<T> gate;

    HeadMixGrad(const Mix<T>& m, const PackedMix<T>& packed, const MixSums<T>& sums,
                const Strided<T>& grad_gate, int64_t batch, int64_t group, int64_t head, Direction direction)
        : mix(m, packed, batch, head, direction),
          reversed(m, packed, batch, head, opposite(direction)),
          ld(sums.ld),
          gate(grad_gate) {
        const int64_t first = (group * sums.heads + head) * ld;
        const bool straight = direction == Direction::kStraight;
        scale = sums.scale + first;
        left = (straight ? sums.left : sums.right) + first * m.rank;
        right = (straight ? sums.right : sums.left) + first * m.rank;
    }

    // Replace the gradient of y R by that of y, and add to those of the parameters when `in_order` calls. y
    // is the input of the mix; inner and gated come from its forward.
    template <typename InOrder>
    void apply(const Block<T>& b, const T* y, const T* inner, const T* gated, T* grad, T* grad_inner,
               T* grad_gated, const InOrder& in_order) const {
        const int64_t small = padded<T>(mix.rank);
        reversed.inner(b, grad, grad_inner, grad_gated);
        in_order([&] { add(b, y, grad, gated, grad_gated); });
        reversed.update(b, grad, grad_gated, grad);
        for (int64_t row = 0; row < b.rows; ++row) {
            T* g = gate.at(mix.batch, b.first_query + row, mix.head);
            for (int64_t r = 0; r < mix.rank; ++r)
                g[r] = grad_inner[row * small + r] * inner[row * small + r];
        }
    }

  private:
    // Add the block's part of the gradients of the parameters, one panel of slots at a time:
    // scale += sum of y * grad, right += grad^T gated, left += y^T grad_gated, over the rows.
    void add(const Block<T>& b, const T* y, const T* grad, const T* gated, const T* grad_gated) const {
        using V = Vector<T>;
        const int64_t small = padded<T>(mix.rank), step = b.aligned_ld;
        // Begin at a whole panel of slots, so that no sum lies across two cache lines. The cells before the
        // first column are zeros: slots that no row sees, or the gap.
        const int64_t before = mix.first_row(b) % kPanel<T>, row0 = mix.first_row(b) - before;
        const int64_t first = mix.first_column(b) - before;
        for (int64_t j = 0; j < before + mix.width(b); j += kPanel<T>) {
            const int64_t seeing = b.first_seeing(first + j, first + j + kPanel<T>);
            const T *own_y = b.aligned(y) + first + j, *own_grad = b.aligned(grad) + first + j;
            T* sums = scale + row0 + j;
            auto sum0 = V::load(sums), sum1 = V::load(sums + kLanes<T>);
            for (int64_t row = seeing; row < b.rows; ++row) {
                sum0 += V::load(own_y + row * step) * V::load(own_grad + row * step);
                sum1 += V::load(own_y + row * step + kLanes<T>) * V::load(own_grad + row * step + kLanes<T>);
            }
            V::store(sums, sum0);
            V::store(sums + kLanes<T>, sum1);
            const int64_t depth = b.rows - seeing;
            add_in_place<T>(mix.rank, depth, {gated + seeing * small, 1, small}, own_grad + seeing * step,
                            step, right + row0 + j, ld);
            add_in_place<T>(mix.rank, depth, {grad_gated + seeing * small, 1, small}, own_y + seeing * step,
                            step, left + row0 + j, ld);
        }
    }
};

}  // namespace hypermlp
