// The backward of a layer around the operator. Workers take row blocks for the gradients of activations, and
// then parts of the weights. Convolutions and gated outputs are computed again where they are packed.
#include "conv.h"
#include "functions.h"
#include "layer.h"
#include "linear.h"
#include "weights.h"

namespace hypermlp {

// Zero the columns of a panel from `count` on.
template <typename T>
void clear_rest(int64_t depth, int64_t count, T* panel) {
    for (int64_t row = 0; count < kPanel<T> && row < depth; ++row)
        std::fill_n(panel + row * kPanel<T> + count, kPanel<T> - count, T(0));
}

template <typename T>
void read_out_gradients(const Readout<T>& r, const T* grad, T* grad_o, T* grad_weight) {
    const RowBlocks blocks(r.rows);
    const bool few = are_few(r.rows), gated = r.gate.width != 0;
    Lease lease(r.threads * Arena::need<T>(kPanelRoom<T>) +
                (few ? 0 : PackedWeight<T>::need(Use::kGradient, r.hidden, r.width)));
    const std::vector<T*> panels = for_workers<T>(lease.arena, r.threads, kPanelRoom<T>);
    const auto gate = [&](int64_t row) { return r.gates + row * r.gate_width + r.gate.first; };
    const auto apply_gate = [&](int64_t first, int64_t last) {
        for (int64_t row = first; gated && row < last; ++row) {
            const T* g = gate(row);
#pragma omp simd
            for (int64_t d = 0; d < r.width; ++d) grad_o[row * r.width + d] *= g[d];
        }
    };
    if (few) {
        const View<T> right = right_factor(Use::kGradient, r.weight, r.width);
        multiply_few_rows<T>(r.rows, {{grad_o, r.width, {{grad, r.hidden, right}}}}, r.threads, panels);
        for_each(r.threads, blocks.count,
                 [&](int64_t i, int64_t) { apply_gate(blocks.begin(i), blocks.begin(i + 1)); });
    } else {
        const PackedWeight<T> weight(Use::kGradient, r.weight, r.hidden, r.width, lease.arena);
        weight.pack(r.threads);
        for_each(r.threads, blocks.count, [&](int64_t i, int64_t) {
            const int64_t first = blocks.begin(i), last = blocks.begin(i + 1);
            weight.apply(last - first, grad + first * r.hidden, grad_o + first * r.width);
            apply_gate(first, last);
        });
    }
    std::vector<WeightTask<T>> tasks;
    add_weight_tasks<T>(tasks, grad, r.hidden, 0, r.width, grad_weight);
    const auto fill = [&](int64_t, int64_t column, int64_t count, int64_t k, int64_t depth, T* panel) {
        for (int64_t row = 0; row < depth; ++row) {
            const T* o = r.o + (k + row) * r.width + column;
            T* to = panel + row * kPanel<T>;
            if (gated) {
                const T* g = gate(k + row) + column;
#pragma omp simd
                for (int64_t d = 0; d < count; ++d) to[d] = o[d] * g[d];
            } else {
                std::copy_n(o, count, to);
            }
        }
        clear_rest(depth, count, panel);
    };
    run_weight_tasks(tasks, r.rows, r.threads, fill, panels);
}

template <typename T>
struct ProjectionBackward {
    const Projections<T>& p;
    const ProjectionInputs<T>& in;
    const ProjectionGradients<T>& grads;
    RowBlocks blocks;
    Taps<T> taps;
    T* q_gate;        // gradient of the gate of q before its sigmoid, [N, q_width]
    T* bias;          // gradient of the bias, by blocks
    T* conv_sums[2];  // gradients of the convolutions, by blocks

    static size_t need(const Projections<T>& p) {
        const int64_t count = RowBlocks(p.rows()).count;
        return Taps<T>::need(p.conv) + Arena::need<T>(p.rows() * p.q_gate.width) +
               Arena::need<T>(count * p.gate_width) + 2 * Arena::need<T>(count * p.conv.kernel * p.hidden());
    }
    ProjectionBackward(const Projections<T>& projections, const ProjectionInputs<T>& inputs,
                       const ProjectionGradients<T>& gradients, Arena& arena)
        : p(projections),
          in(inputs),
          grads(gradients),
          blocks(p.rows()),
          taps(p.conv, p.conv.x.in_place(), arena) {
        q_gate = arena.take<T>(p.rows() * p.q_gate.width);
        bias = arena.take<T>(blocks.count * p.gate_width);
        for (T*& sums : conv_sums) sums = arena.take<T>(blocks.count * p.conv.kernel * p.hidden());
    }

    // One gate: the gradient before its sigmoid, and where it is.
    struct Part {
        GateRange range;
        T* grad;
    };
    std::vector<Part> gate_parts() const {
        std::vector<Part> parts;
        for (const Part& part : {Part{p.q_gate, q_gate}, Part{p.output_gate, in.grad_o},
                                 Part{p.mix1_gate, in.grad_mix1}, Part{p.mix2_gate, in.grad_mix2}})
            if (part.range.width != 0) parts.push_back(part);
        return parts;
    }

    // Replace the gradients of the gates by those before the sigmoid, and sum them up for the bias.
    void gate_gradients(int64_t block) const {
        T* sums = bias + block * p.gate_width;
        std::fill_n(sums, p.gate_width, T(0));
        for (int64_t row = blocks.begin(block); row < blocks.begin(block + 1); ++row) {
            const T* gates = in.gates + row * p.gate_width;
            const T *g = gates + p.q_gate.first, *q = in.q + row * p.q_width;
            T *grad_q = in.grad_q + row * p.q_width, *to = q_gate + row * p.q_gate.width;
            T* sum = sums + p.q_gate.first;
#pragma omp simd
            for (int64_t i = 0; i < p.q_gate.width; ++i) {
                to[i] = grad_q[i] * q[i] * (1 - g[i]);  // q has the gate already
                sum[i] += to[i];
                grad_q[i] *= g[i];
            }
            // The gradient of o has the gate already, so o stands in for the product of both.
            apply_sigmoid(p.output_gate, in.o + row * p.v_width, gates, row, in.grad_o, sums);
            apply_sigmoid(p.mix1_gate, gates + p.mix1_gate.first, gates, row, in.grad_mix1, sums);
            apply_sigmoid(p.mix2_gate, gates + p.mix2_gate.first, gates, row, in.grad_mix2, sums);
        }
    }

    // One block of rows: the gradient of x, and the block's part of the gradients of the convolutions.
    // convolved has room for the gradients of its convolved rows, and of those behind it that see them.
    void input_gradient(int64_t block, const PackedProjections<T>& weights, T* const convolved[2]) const {
        const int64_t first = blocks.begin(block), last = blocks.begin(block + 1), rows = last - first;
        T* x = grads.x + first * p.hidden();
        weights.q.apply(rows, in.grad_q + first * p.q_width, x);
        for (const Part& part : gate_parts())
            weights.gates.template apply<Into::kAdd>(rows, part.grad + first * part.range.width,
                                                     part.range.first, part.range.width, x);
        const T* given[2] = {in.grad_k, in.grad_v};
        const PackedWeight<T>* projections[2] = {&weights.k, &weights.v};
        // No convolution reaches beyond the end of a sequence.
        const int64_t length = p.conv.length, end_of_last = ((last - 1) / length + 1) * length;
        const int64_t end = std::min(last + std::max<int64_t>(p.conv.kernel - 1, 0), end_of_last);
        for (int i = 0; i < 2; ++i) {
            const T* grad = given[i] + first * projections[i]->depth;
            if (p.conv.kernel == 0)
                projections[i]->template apply<Into::kAdd>(rows, grad, x);
            else
                projections[i]->apply(end - first, grad, convolved[i]);
        }
        convolution_gradients(block, convolved, first);
    }

    // The same for all rows, which are few. convolved has room for as many rows of x.
    void all_input_gradients(T* const convolved[2], const std::vector<T*>& panels) const {
        const int64_t hidden = p.hidden();
        const auto term = [&](const T* grad, int64_t width, const T* weight) {
            return typename Product<T>::Term{grad, width, right_factor(Use::kGradient, weight, hidden)};
        };
        const auto keys = term(in.grad_k, p.q_width, p.k_weight),
                   values = term(in.grad_v, p.v_width, p.v_weight);
        std::vector<Product<T>> products{{grads.x, hidden, {term(in.grad_q, p.q_width, p.q_weight)}}};
        auto& terms = products[0].terms;
        for (const Part& part : gate_parts())
            terms.push_back(term(part.grad, part.range.width, p.gate_weight + part.range.first * hidden));
        if (p.conv.kernel == 0) {
            terms.insert(terms.end(), {keys, values});
        } else {
            products.push_back({convolved[0], hidden, {keys}});
            products.push_back({convolved[1], hidden, {values}});
        }
        multiply_few_rows(p.rows(), products, p.conv.threads, panels);
        for_each(p.conv.threads, blocks.count,
                 [&](int64_t block, int64_t) { convolution_gradients(block, convolved, 0); });
    }

    // Go back through the convolutions. Row 0 of convolved is row `base`.
    void convolution_gradients(int64_t block, T* const convolved[2], int64_t base) const {
        const int64_t hidden = p.hidden(), length = p.conv.length, taps_width = p.conv.kernel * hidden;
        for (size_t which = 0; which < p.conv.weights.size(); ++which) {
            T* const sums = conv_sums[which] + block * taps_width;
            std::fill_n(sums, taps_width, T(0));
            for (int64_t row = blocks.begin(block); row < blocks.begin(block + 1); ++row) {
                const int64_t b = row / length, t = row % length;
                const auto grad_row = [&](int64_t at) {
                    return convolved[which] + (b * length + at - base) * hidden;
                };
                taps.add_input_gradient(which, b, t, grad_row, grads.x + row * hidden);
                taps.add_weight_gradient(b, t, grad_row(t), sums);
            }
        }
    }

    void weight_gradients(const std::vector<T*>& panels) const {
        enum Input { kX, kForKeys, kForValues };
        const bool conv = p.conv.kernel != 0;
        const int64_t hidden = p.hidden();
        std::vector<WeightTask<T>> tasks;
        add_weight_tasks<T>(tasks, in.grad_q, p.q_width, kX, hidden, grads.q_weight);
        for (const Part& part : gate_parts())
            add_weight_tasks<T>(tasks, part.grad, part.range.width, kX, hidden,
                                grads.gate_weight + part.range.first * hidden);
        add_weight_tasks<T>(tasks, in.grad_k, p.q_width, conv ? kForKeys : kX, hidden, grads.k_weight);
        add_weight_tasks<T>(tasks, in.grad_v, p.v_width, conv ? kForValues : kX, hidden, grads.v_weight);
        const auto fill = [&](int64_t input, int64_t column, int64_t count, int64_t k, int64_t depth,
                              T* panel) {
            const T* x = taps.x.data;
            if (input == kX)
                return pack_panel<T>(depth, hidden, View<T>{x + k * hidden, hidden, 1}, column, panel);
            for (int64_t row = k; row < k + depth; ++row)
                taps.output(input == kForKeys ? 0 : 1, row / p.conv.length, row % p.conv.length, column,
                            count, panel + (row - k) * kPanel<T>);
            clear_rest(depth, count, panel);
        };
        run_weight_tasks(tasks, p.rows(), p.conv.threads, fill, panels);
    }

    // Add up the blocks' parts.
    void sum_blocks() const {
        for (int64_t i = 0; i < p.gate_width; ++i) {
            T sum = 0;
            for (int64_t block = 0; block < blocks.count; ++block) sum += bias[block * p.gate_width + i];
            grads.gate_bias[i] = sum;
        }
        for (size_t which = 0; which < p.conv.weights.size(); ++which)
            taps.store_weight_gradient(blocks.count, conv_sums[which], grads.conv[which]);
    }

  private:
    // Turn one row of a gate's gradient, grad, into grad * value * (1 - gate).
    void apply_sigmoid(const GateRange& range, const T* value, const T* gates, int64_t row, T* all,
                       T* sums) const {
        T *grad = all + row * range.width, *sum = sums + range.first;
        const T* gate = gates + range.first;
#pragma omp simd
        for (int64_t i = 0; i < range.width; ++i) {
            grad[i] *= value[i] * (1 - gate[i]);
            sum[i] += grad[i];
        }
    }
};

template <typename T>
void project_gradients(const Projections<T>& p, const ProjectionInputs<T>& in,
                       const ProjectionGradients<T>& grads) {
    const int64_t threads = p.conv.threads, hidden = p.conv.kernel == 0 ? 0 : p.hidden();
    const bool few = are_few(p.rows());
    // The rows of a block, and those behind it that see them.
    const int64_t room = hidden * (few ? p.rows() : RowBlocks(p.rows()).most() + p.conv.kernel - 1);
    const int64_t copies = few ? 1 : threads;
    Lease lease(ProjectionBackward<T>::need(p) + threads * Arena::need<T>(kPanelRoom<T>) +
                2 * copies * Arena::need<T>(room) +
                (few ? 0 : PackedProjections<T>::need(Use::kGradient, p)));
    const ProjectionBackward<T> work(p, in, grads, lease.arena);
    const std::vector<T*> panels = for_workers<T>(lease.arena, threads, kPanelRoom<T>);
    const std::vector<T*> convolved[2] = {for_workers<T>(lease.arena, copies, room),
                                          for_workers<T>(lease.arena, copies, room)};
    if (few) {
        for_each(threads, work.blocks.count, [&](int64_t i, int64_t) { work.gate_gradients(i); });
        T* const own[2] = {convolved[0][0], convolved[1][0]};
        work.all_input_gradients(own, panels);
    } else {
        const PackedProjections<T> weights(Use::kGradient, p, lease.arena);
        weights.pack(threads);
        for_each(threads, work.blocks.count, [&](int64_t i, int64_t worker) {
            T* const own[2] = {convolved[0][worker], convolved[1][worker]};
            work.gate_gradients(i);
            work.input_gradient(i, weights, own);
        });
    }
    work.weight_gradients(panels);
    work.sum_blocks();
}

template void project_gradients(const Projections<float>&, const ProjectionInputs<float>&,
                                const ProjectionGradients<float>&);
template void project_gradients(const Projections<double>&, const ProjectionInputs<double>&,
                                const ProjectionGradients<double>&);
template void read_out_gradients(const Readout<float>&, const float*, float*, float*);
template void read_out_gradients(const Readout<double>&, const double*, double*, double*);

}  // namespace hypermlp
