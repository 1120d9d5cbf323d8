// The forward of a layer around the operator. Workers take row blocks and finish them: convolutions,
// projections and gates of a block stay in the cache. If there are few rows, these are three steps for all of
// them.
#include "conv.h"
#include "functions.h"
#include "layer.h"
#include "linear.h"
#include "weights.h"

namespace hypermlp {

template <typename T>
struct ProjectionWork {
    const Projections<T>& p;
    const Projected<T>& out;
    Taps<T> taps;

    ProjectionWork(const Projections<T>& projections, const Projected<T>& out_, Arena& arena)
        : p(projections), out(out_), taps(p.conv, p.conv.x.in_place(), arena) {}

    // Compute rows [first, last). convolved has room for as many rows of x.
    void block(int64_t first, int64_t last, const PackedProjections<T>& weights, T* convolved) const {
        const int64_t rows = last - first;
        const T* x = taps.x.data + first * p.hidden();
        weights.k.apply(rows, convolve(0, first, last, convolved), out.k + first * p.q_width);
        weights.v.apply(rows, convolve(1, first, last, convolved), out.v + first * p.v_width);
        weights.q.apply(rows, x, out.q + first * p.q_width);
        weights.gates.apply(rows, x, out.gates + first * p.gate_width);
        apply_gates(first, last);
    }

    // Compute all rows, which are few. convolved has room for as many rows of x, twice.
    void all_rows(const RowBlocks& blocks, T* const convolved[2], const std::vector<T*>& panels) const {
        const int64_t threads = p.conv.threads, hidden = p.hidden();
        const T *x = taps.x.data, *inputs[2] = {x, x};
        if (p.conv.kernel != 0) {
            for_each(threads, blocks.count, [&](int64_t i, int64_t) {
                for (int which = 0; which < 2; ++which)
                    convolve(which, blocks.begin(i), blocks.begin(i + 1),
                             convolved[which] + blocks.begin(i) * hidden);
            });
            std::copy_n(convolved, 2, inputs);
        }
        const auto product = [&](T* to, int64_t width, const T* input, const T* weight) {
            return Product<T>{to, width, {{input, hidden, right_factor(Use::kForward, weight, hidden)}}};
        };
        multiply_few_rows<T>(
            p.rows(),
            {product(out.k, p.q_width, inputs[0], p.k_weight),
             product(out.v, p.v_width, inputs[1], p.v_weight), product(out.q, p.q_width, x, p.q_weight),
             product(out.gates, p.gate_width, x, p.gate_weight)},
            threads, panels);
        for_each(threads, blocks.count,
                 [&](int64_t i, int64_t) { apply_gates(blocks.begin(i), blocks.begin(i + 1)); });
    }

  private:
    // Return the input of the projection of keys (0) or values (1), rows [first, last).
    const T* convolve(int which, int64_t first, int64_t last, T* to) const {
        if (p.conv.kernel == 0) return taps.x.data + first * p.hidden();
        for (int64_t row = first; row < last; ++row)
            taps.output(which, row / p.conv.length, row % p.conv.length, 0, p.hidden(),
                        to + (row - first) * p.hidden());
        return to;
    }

    void apply_gates(int64_t first, int64_t last) const {
        for (int64_t row = first; row < last; ++row) {
            T* gate = out.gates + row * p.gate_width;
#pragma omp simd
            for (int64_t i = 0; i < p.gate_width; ++i) gate[i] = sigmoid(gate[i] + p.gate_bias[i]);
            T* queries = out.q + row * p.q_width;
            for (int64_t i = 0; i < p.q_gate.width; ++i) queries[i] *= gate[p.q_gate.first + i];
        }
    }
};

template <typename T>
void project(const Projections<T>& p, const Projected<T>& out) {
    const RowBlocks blocks(p.rows());
    const int64_t threads = p.conv.threads, hidden = p.conv.kernel == 0 ? 0 : p.hidden();
    if (are_few(p.rows())) {
        const int64_t room = p.rows() * hidden;
        Lease lease(Taps<T>::need(p.conv) + 2 * Arena::need<T>(room) +
                    threads * Arena::need<T>(kPanelRoom<T>));
        const ProjectionWork<T> work(p, out, lease.arena);
        T* const convolved[2] = {lease.arena.take<T>(room), lease.arena.take<T>(room)};
        return work.all_rows(blocks, convolved, for_workers<T>(lease.arena, threads, kPanelRoom<T>));
    }
    const int64_t room = blocks.most() * hidden;
    Lease lease(Taps<T>::need(p.conv) + PackedProjections<T>::need(Use::kForward, p) +
                threads * Arena::need<T>(room));
    const ProjectionWork<T> work(p, out, lease.arena);
    const PackedProjections<T> weights(Use::kForward, p, lease.arena);
    const std::vector<T*> convolved = for_workers<T>(lease.arena, threads, room);
    weights.pack(threads);
    for_each(threads, blocks.count, [&](int64_t i, int64_t worker) {
        work.block(blocks.begin(i), blocks.begin(i + 1), weights, convolved[worker]);
    });
}

// Return o * gate for rows [first, last), which `to` has room for, or o if there is no gate.
template <typename T>
const T* gated_outputs(const Readout<T>& r, int64_t first, int64_t last, T* to) {
    if (r.gate.width == 0) return r.o + first * r.width;
    for (int64_t row = first; row < last; ++row) {
        const T *o = r.o + row * r.width, *gate = r.gates + row * r.gate_width + r.gate.first;
        T* gated = to + (row - first) * r.width;
#pragma omp simd
        for (int64_t d = 0; d < r.width; ++d) gated[d] = o[d] * gate[d];
    }
    return to;
}

template <typename T>
void read_out(const Readout<T>& r, T* out) {
    const RowBlocks blocks(r.rows);
    const int64_t width = r.gate.width == 0 ? 0 : r.width;
    if (are_few(r.rows)) {
        Lease lease(Arena::need<T>(r.rows * width) + r.threads * Arena::need<T>(kPanelRoom<T>));
        T* gated = lease.arena.take<T>(r.rows * width);
        const std::vector<T*> panels = for_workers<T>(lease.arena, r.threads, kPanelRoom<T>);
        if (width != 0)
            for_each(r.threads, blocks.count, [&](int64_t i, int64_t) {
                gated_outputs(r, blocks.begin(i), blocks.begin(i + 1), gated + blocks.begin(i) * width);
            });
        const View<T> right = right_factor(Use::kForward, r.weight, r.width);
        multiply_few_rows<T>(r.rows, {{out, r.hidden, {{width != 0 ? gated : r.o, r.width, right}}}},
                             r.threads, panels);
        return;
    }
    const int64_t room = blocks.most() * width;
    Lease lease(PackedWeight<T>::need(Use::kForward, r.hidden, r.width) + r.threads * Arena::need<T>(room));
    const PackedWeight<T> weight(Use::kForward, r.weight, r.hidden, r.width, lease.arena);
    const std::vector<T*> gated = for_workers<T>(lease.arena, r.threads, room);
    weight.pack(r.threads);
    for_each(r.threads, blocks.count, [&](int64_t i, int64_t worker) {
        const int64_t first = blocks.begin(i), last = blocks.begin(i + 1);
        weight.apply(last - first, gated_outputs(r, first, last, gated[worker]), out + first * r.hidden);
    });
}

template void project(const Projections<float>&, const Projected<float>&);
template void project(const Projections<double>&, const Projected<double>&);
template void read_out(const Readout<float>&, float*);
template void read_out(const Readout<double>&, double*);

}  // namespace hypermlp
