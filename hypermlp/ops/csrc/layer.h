// The interface of the kernels around the operator, for a whole layer: projections and gates before it, the
// output projection behind it. Matrices are contiguous. N = batch * length rows. Weights are [outputs,
// inputs].
#pragma once

#include "kernels.h"

namespace hypermlp {

// Some columns of the gates [N, gate_width], and as many rows of their weight. There are none if width is 0.
struct GateRange {
    int64_t first = 0, width = 0;
};

// q = (x q_weight^T) * gate, k = conv0(x) k_weight^T, v = conv1(x) v_weight^T, gates = sigmoid(x
// gate_weight^T + gate_bias).
template <typename T>
struct Projections {
    Convolutions<T> conv;  // x, the sizes and the threads; kernel is 0 if k and v are projections of x itself
    int64_t q_width = 0, v_width = 0, gate_width = 0;  // k is as wide as q
    GateRange q_gate, output_gate, mix1_gate, mix2_gate;
    const T *q_weight = nullptr, *k_weight = nullptr, *v_weight = nullptr, *gate_weight = nullptr,
            *gate_bias = nullptr;

    int64_t rows() const { return conv.batch * conv.length; }
    int64_t hidden() const { return conv.width; }
};

template <typename T>
struct Projected {
    T *q, *k, *v, *gates;
};
template <typename T>
void project(const Projections<T>&, const Projected<T>&);

// The inputs of the backward of the projections.
template <typename T>
struct ProjectionInputs {
    const T *q, *gates, *o;    // as the forward computed them; o are the head outputs before their gate
    const T *grad_k, *grad_v;  // gradients of k and v
    T *grad_q, *grad_o;        // gradients of the gated q, and of o; both are overwritten
    T *grad_mix1, *grad_mix2;  // gradients of the gates of the mixes, or null; overwritten
};

template <typename T>
struct ProjectionGradients {
    T* x;        // [N, hidden]
    T* conv[2];  // [hidden, kernel], or null
    T *q_weight, *k_weight, *v_weight, *gate_weight, *gate_bias;
};
template <typename T>
void project_gradients(const Projections<T>&, const ProjectionInputs<T>&, const ProjectionGradients<T>&);

// The output projection, (o * gate) weight^T. With a gate, `out` may be the memory of o, if it is as wide.
template <typename T>
struct Readout {
    int64_t rows = 0, hidden = 0, width = 0, gate_width = 0, threads = 1;
    GateRange gate;
    const T *o = nullptr, *gates = nullptr,
            *weight = nullptr;  // [N, width], [N, gate_width], [hidden, width]
};
template <typename T>
void read_out(const Readout<T>&, T* out);
template <typename T>
void read_out_gradients(const Readout<T>&, const T* grad, T* grad_o, T* grad_weight);

}  // namespace hypermlp
