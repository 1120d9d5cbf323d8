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

// One step of a layer that decodes, all that stands between its projections: new keys and values go into the caches, the
// gates' sigmoids onto queries, mixes and output.
struct Step {
    Problem problem;                // q is set by the step, k and v are the caches, holding `keys` positions afterwards
    Strided q, new_keys, new_values;  // [batch, queries, heads, width]
    Strided gates;                  // [batch, queries, 1, gate_width]: of q, out, mix1, mix2, as far as they are there
    int64_t gate_width;
    bool feature_gates;
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
void conv_step(const Conv&, const Strided& news);  // conv_forward, after the last `length` rows of x are written from news
template <typename T>
void conv_backward(const Conv&);

}  // namespace hypermlp
