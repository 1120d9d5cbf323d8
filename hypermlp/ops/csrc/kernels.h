// The interface of the kernels, for T = float and double; storage.h has the types that tensors may be stored
// in. Nothing here depends on PyTorch: ops.cpp translates tensors into these structs, and any C++ program can
// do the same (tests/ops/driver.cpp does).
#pragma once

#include <cstdint>
#include <vector>

#include "storage.h"

namespace hypermlp {

enum class Activation { kRelu, kGlu };
enum class Layout { kLag, kForward };  // slots count back from the query, or on from its first visible key

// A sequence mix R = I + Diag(diag) + left Diag(gate) right^T. Its tensors have no data if there is no mix.
template <typename T>
struct Mix {
    Source<T> diag;         // [heads, slots]; at(head, slot)
    Source<T> left, right;  // [heads, slots, rank]; at(head, slot)
    int64_t slots = 0, rank = 0;
    Source<T> gate;  // [batch, queries, heads, rank]

    bool exists() const { return diag.exists(); }
};

// The arguments of hyper_attention (ops/api.py has the formula).
template <typename T>
struct Problem {
    int64_t batch = 0, heads = 0, queries = 0, keys = 0, qk_dim = 0, vo_dim = 0, threads = 1;
    Activation activation = Activation::kRelu;
    Layout layout = Layout::kLag;
    double eps = 0;
    const int64_t* starts = nullptr;  // [batch, queries], or null if every query sees all earlier keys
    Source<T> q, k, v;
    Mix<T> mix1, mix2;  // of the scores, with branches() heads; of the activation, with `heads` heads

    bool glu() const { return activation == Activation::kGlu; }
    bool lag() const { return layout == Layout::kLag; }
    int64_t branches() const { return glu() ? 2 * heads : heads; }  // heads of q, k and mix1
};

// The numbers of one row that are kept for backward(): 1 / rho; for each branch, the product of its row of
// scores with mix1.left; and that of the activation with mix2.right. Each product takes as long to compute as
// the scores of a narrow head.
template <typename T>
int64_t kept_of_mix2(const Problem<T>& p) {
    return 1 + (p.mix1.exists() ? p.branches() / p.heads * p.mix1.rank : 0);
}
template <typename T>
int64_t kept_width(const Problem<T>& p) {
    return kept_of_mix2(p) + (p.mix2.exists() ? p.mix2.rank : 0);
}

// The results of the forward kernels.
template <typename T>
struct Output {
    Strided<T> out;            // [batch, queries, heads, vo_dim]
    Strided<T> kept;           // [batch, queries, heads, 1 or kept_width(p)]: what backward() needs
    bool keeps_inner = false;  // whether forward() fills all of kept_width(p); decode() does not
};

// The inputs of the backward kernel besides the problem.
template <typename T>
struct Saved {
    Source<T> grad_out;      // gradient of Output::out
    Strided<const T> kept;   // Output::kept
    bool has_inner = false;  // whether forward() was called with keeps_inner
};

// The gradients of a mix. Those of the parameters are at(head, slot).
template <typename T>
struct MixGradients {
    Strided<T> diag, left, right;
    Strided<T> gate;
};

// The results of the backward kernel: one gradient for each tensor of the problem, with its shape.
template <typename T>
struct Gradients {
    Strided<T> q, k, v;
    MixGradients<T> mix1, mix2;
};

template <typename T>
void forward(const Problem<T>&, const Output<T>&);
template <typename T>
void backward(const Problem<T>&, const Saved<T>&, const Gradients<T>&);

// The number of tasks that backward() can run at the same time, without starts.
int64_t backward_tasks(int64_t batch, int64_t heads, int64_t queries, int64_t keys);

// The same as forward, faster for up to kDecodeQueries queries. It adds the products of a score up in another
// order.
constexpr int64_t kDecodeQueries = 4;
template <typename T>
void decode(const Problem<T>&, const Output<T>&);

// A whole layer for a few new positions: convolutions, projections, gates, attention over the caches, output
// projection. The tensors of the layer and its caches are stored as S.
template <typename T, typename S>
struct Step {
    // `problem.keys` counts the new positions too. step() itself sets q, k, v and the gates of the mixes.
    Problem<T> problem;
    Strided<S> keys, values;  // the caches, [batch, room, heads, width]; the new positions are written
    Strided<const S> x;       // [batch, queries, hidden]
    int64_t hidden = 0;
    S* out = nullptr;  // [batch, queries, hidden], contiguous

    // The convolutions. Without them, history has no data.
    Strided<S> history;  // cache of inputs, [batch, room, hidden]; the new positions are written
    int64_t past_inputs = 0, kernel = 0;
    const S *k_conv = nullptr, *v_conv = nullptr;  // [hidden, kernel]
    const int64_t* reach = nullptr;  // [batch, queries] or null: how many positions each new one sees

    // Rows that precede every context, [num_registers, hidden], or null.
    const S* registers = nullptr;
    int64_t num_registers = 0;

    // The rotation of queries and keys, or null: cos and sin of the angles of half a head's width,
    // [batch, queries, 1 + num_registers, qk_dim / 2]. The first is that of the new position, the others are
    // those of the registers that it sees. The batch stride is 0 if all sequences have the same.
    Strided<const T> cos, sin;

    // Weights are [outputs, inputs].
    const S *q_weight = nullptr, *k_weight = nullptr, *v_weight = nullptr, *o_weight = nullptr;

    // One matrix computes all gates. Each gate is a range of its rows; q_gate and so on are the first row of
    // each range, -1 if the gate is absent.
    const S *gate_weight = nullptr, *gate_bias = nullptr;  // [gate_width, hidden], [gate_width] or null
    int64_t gate_width = 0;
    int64_t q_gate = -1, output_gate = -1, mix1_gate = -1, mix2_gate = -1;
};
template <typename T, typename S>
void step(const Step<T, S>&);

// Depthwise causal convolutions of one input (the function causal_conv has the definition).
template <typename T>
struct Convolutions {
    int64_t batch = 0, length = 0, width = 0, kernel = 0, threads = 1;
    int64_t past = 0;                // rows of x before the first output
    const int64_t* reach = nullptr;  // [batch, length] or null: how many positions each output sees
    Source<T> x;                     // [batch, past + length, width]
    std::vector<Source<T>> weights;  // [width, kernel] each; at(channel, lag)
};

template <typename T>
struct ConvGradients {
    std::vector<Strided<const T>> outs;  // given: the gradient of each output
    T* x = nullptr;                      // [batch, past + length, width], contiguous
    std::vector<T*> weights;             // [width, kernel] each
};

// Write the output of each convolution, [batch, length, width], contiguous.
template <typename T>
void conv_forward(const Convolutions<T>&, const std::vector<T*>& outs);
template <typename T>
void conv_backward(const Convolutions<T>&, const ConvGradients<T>&);

}  // namespace hypermlp
