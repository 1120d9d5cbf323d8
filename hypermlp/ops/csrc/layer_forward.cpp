// The forward of a layer around the operator. Workers take row blocks and finish them: convolutions,
// projections and gates of a block stay in the cache.
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
    PackedProjections<T> weights;

    static size_t need(const Projections<T>& p) {
        return Taps<T>::need(p.conv) + PackedProjections<T>::need(Use::kForward, p);
    }
    ProjectionWork(const Projections<T>& projections, const Projected<T>& out_, Arena& arena)
        : p(projections),
          out(out_),
          taps(p.conv, p.conv.x.in_place(), arena),
          weights(Use::kForward, p, arena) {}

    // Compute rows [first, last). convolved has room for as many rows of x.
    void block(int64_t first, int64_t last, T* convolved) const {
        const int64_t rows = last - first, hidden = p.hidden();
        const T* x = taps.x.data + first * hidden;
        weights.k.apply(rows, convolve(0, first, last, convolved), out.k + first * p.q_width);
        weights.v.apply(rows, convolve(1, first, last, convolved), out.v + first * p.v_width);
        weights.q.apply(rows, x, out.q + first * p.q_width);
        weights.gates.apply(rows, x, out.gates + first * p.gate_width);
        for (int64_t row = first; row < last; ++row) {
            T* gate = out.gates + row * p.gate_width;
#pragma omp simd
            for (int64_t i = 0; i < p.gate_width; ++i) gate[i] = sigmoid(gate[i] + p.gate_bias[i]);
            T* queries = out.q + row * p.q_width;
            for (int64_t i = 0; i < p.q_gate.width; ++i) queries[i] *= gate[p.q_gate.first + i];
        }
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
};

template <typename T>
void project(const Projections<T>& p, const Projected<T>& out) {
    const RowBlocks blocks(p.rows());
    const int64_t threads = p.conv.threads, room = p.conv.kernel == 0 ? 0 : blocks.most() * p.hidden();
    Lease lease(ProjectionWork<T>::need(p) + threads * Arena::need<T>(room));
    const ProjectionWork<T> work(p, out, lease.arena);
    std::vector<T*> convolved;
    for (int64_t worker = 0; worker < threads; ++worker) convolved.push_back(lease.arena.take<T>(room));
    work.weights.pack(threads);
    for_each(threads, blocks.count, [&](int64_t i, int64_t worker) {
        work.block(blocks.begin(i), blocks.begin(i + 1), convolved[worker]);
    });
}

template <typename T>
void read_out(const Readout<T>& r, T* out) {
    const RowBlocks blocks(r.rows);
    const int64_t room = r.gate.width == 0 ? 0 : blocks.most() * r.width;
    Lease lease(PackedWeight<T>::need(Use::kForward, r.hidden, r.width) + r.threads * Arena::need<T>(room));
    const PackedWeight<T> weight(Use::kForward, r.weight, r.hidden, r.width, lease.arena);
    std::vector<T*> gated;
    for (int64_t worker = 0; worker < r.threads; ++worker) gated.push_back(lease.arena.take<T>(room));
    weight.pack(r.threads);
    for_each(r.threads, blocks.count, [&](int64_t i, int64_t worker) {
        const int64_t first = blocks.begin(i), last = blocks.begin(i + 1);
        const T* from = r.o + first * r.width;
        if (r.gate.width != 0) {
            for (int64_t row = first; row < last; ++row) {
                const T *o = r.o + row * r.width, *gate = r.gates + row * r.gate_width + r.gate.first;
                T* to = gated[worker] + (row - first) * r.width;
#pragma omp simd
                for (int64_t d = 0; d < r.width; ++d) to[d] = o[d] * gate[d];
            }
            from = gated[worker];
        }
        weight.apply(last - first, from, out + first * r.hidden);
    });
}

template void project(const Projections<float>&, const Projected<float>&);
template void project(const Projections<double>&, const Projected<double>&);
template void read_out(const Readout<float>&, float*);
template void read_out(const Readout<double>&, double*);

}  // namespace hypermlp
