// Weights [outputs, inputs] in panels (gemm.h), packed once per call by all threads.
#pragma once

#include "gemm.h"
#include "layer.h"
#include "parallel.h"
#include "scratch.h"

namespace hypermlp {

enum class Use { kForward, kGradient };  // x weight^T, or the gradient of x, which is grad weight

// The matrix on the right of the product, read in place.
template <typename T>
View<T> right_factor(Use use, const T* weight, int64_t inputs) {
    return use == Use::kForward ? View<T>{weight, 1, inputs} : View<T>{weight, inputs, 1};
}

template <typename T>
struct PackedWeight {
    int64_t depth, columns;  // of the matrix on the right of the product
    View<T> view;
    T* panels;

    static size_t need(Use use, int64_t outputs, int64_t inputs) {
        return Arena::need<T>(use == Use::kForward ? inputs * padded<T>(outputs)
                                                   : outputs * padded<T>(inputs));
    }
    PackedWeight(Use use, const T* weight, int64_t outputs, int64_t inputs, Arena& arena)
        : depth(use == Use::kForward ? inputs : outputs),
          columns(use == Use::kForward ? outputs : inputs),
          view(right_factor(use, weight, inputs)),
          panels(arena.take<T>(depth * padded<T>(columns))) {}
    void pack(int64_t threads) const {
        if (depth == 0) return;
        for_ranges(threads, in_panels<T>(columns), [&](int64_t i) {
            pack_panel<T>(depth, columns, view, i * kPanel<T>, panel(i * kPanel<T>));
        });
    }

    // c[rows, columns] from a[rows, count] and the rows [first, first + count) of the matrix on the right.
    // One panel at a time, so that its part of c stays in the cache.
    template <Into into = Into::kNew>
    void apply(int64_t rows, const T* a, int64_t first, int64_t count, T* c) const {
        for (int64_t j = 0; j < columns; j += kPanel<T>)
            multiply<T, into>(rows, std::min(columns - j, kPanel<T>), count, {a, count, 1},
                              panel(j) + first * kPanel<T>, 0, c + j, columns);
    }
    // The same with the whole matrix.
    template <Into into = Into::kNew>
    void apply(int64_t rows, const T* a, T* c) const {
        apply<into>(rows, a, 0, depth, c);
    }

  private:
    T* panel(int64_t column) const { return panels + column * depth; }
};

// The weights of the projections before the operator.
template <typename T>
struct PackedProjections {
    PackedWeight<T> q, k, v, gates;

    static size_t need(Use use, const Projections<T>& p) {
        return 2 * PackedWeight<T>::need(use, p.q_width, p.hidden()) +
               PackedWeight<T>::need(use, p.v_width, p.hidden()) +
               PackedWeight<T>::need(use, p.gate_width, p.hidden());
    }
    PackedProjections(Use use, const Projections<T>& p, Arena& arena)
        : q(use, p.q_weight, p.q_width, p.hidden(), arena),
          k(use, p.k_weight, p.q_width, p.hidden(), arena),
          v(use, p.v_weight, p.v_width, p.hidden(), arena),
          gates(use, p.gate_weight, p.gate_width, p.hidden(), arena) {}
    void pack(int64_t threads) const {
        for (const PackedWeight<T>* weight : {&q, &k, &v, &gates}) weight->pack(threads);
    }
};

}  // namespace hypermlp
