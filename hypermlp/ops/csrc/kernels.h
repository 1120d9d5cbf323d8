// The kernels, for float and double.
#pragma once

#include "common.h"

namespace hypermlp {

template <typename T>
void forward(const Problem&);
template <typename T>
void decode(const Problem&);  // forward, for few queries
template <typename T>
void backward(const Problem&);

// A whole layer for a few new positions: convolutions, projections, gates, attention over the caches, output.
struct Step {
    Problem problem;  // k and v are the caches, which hold `keys` positions afterwards; q and out are the step's own
    int64_t hidden, kernel, past_inputs, gate_width;
    bool feature_gates;
    const int64_t* reach;  // [batch, queries] or null: how many inputs the convolutions see
    Strided x, history;    // [batch, queries, hidden]; [batch, room, hidden], null without convolutions
    const void *k_conv, *v_conv;                                               // [hidden, kernel]
    const void *q_weight, *k_weight, *v_weight, *o_weight, *gate_weight, *gate_bias;  // [outputs, inputs], [outputs]
    void* out;  // [batch, queries, hidden]
};
template <typename T>
void step(const Step&);

struct Conv {
    int64_t batch, length, past, width, kernel, threads;  // past: rows of x before the first output
    const int64_t* reach;                                 // [batch, length] or null
    Strided x;                                            // [batch, past + length, width]
    const void* weight[2];                                // [width, kernel]
    void* out[2];                                         // [batch, length, width]
    Strided grad_out[2];
    void* grad_x;          // [batch, past + length, width]
    void* grad_weight[2];  // [width, kernel]
};
template <typename T>
void conv_forward(const Conv&);
template <typename T>
void conv_backward(const Conv&);

}  // namespace hypermlp
