// One head of a call as a call of its own. Long sequences are computed head by head: the packed keys, values
// and mixes of one head are then all that is held, and all that competes for the cache.
#pragma once

#include "kernels.h"

namespace hypermlp {

// Whether to compute head by head: `packed` bytes are many, and the row blocks of one head, of `blocks` in
// all, are enough for all threads.
template <typename T>
bool by_heads(const Problem<T>& p, size_t packed, int64_t blocks) {
    constexpr size_t kMany = 24 << 20;
    constexpr int64_t kBlocksPerThread = 8;
    return p.heads > 1 && packed > kMany && blocks >= p.heads * p.threads * kBlocksPerThread;
}

// Takes one head out of the arguments of a kernel. The branches of a head are `heads` apart.
template <typename T>
struct OneHead {
    int64_t head, heads;

    OneHead(const Problem<T>& p, int64_t head_) : head(head_), heads(p.heads) {}

    Problem<T> operator()(Problem<T> p) const {
        p.heads = 1;
        for (Source<T>* x : {&p.q, &p.k, &p.v}) *x = x->heads(head, heads);
        take_from(p.mix1);
        take_from(p.mix2);
        return p;
    }
    Output<T> operator()(const Output<T>& output) const {
        return {output.out.heads(head, heads), output.kept.heads(head, heads), output.keeps_inner};
    }
    Saved<T> operator()(const Saved<T>& saved) const {
        return {saved.grad_out.heads(head, heads), saved.kept.heads(head, heads), saved.has_inner};
    }
    Gradients<T> operator()(Gradients<T> grads) const {
        for (Strided<T>* grad : {&grads.q, &grads.k, &grads.v}) *grad = grad->heads(head, heads);
        take_from(grads.mix1);
        take_from(grads.mix2);
        return grads;
    }

  private:
    // The parameters of a mix are [heads, slots, ...].
    template <typename M>
    void take_from(M& mix) const {
        for (auto* parameter : {&mix.diag, &mix.left, &mix.right}) *parameter = parameter->items(head, heads);
        mix.gate = mix.gate.heads(head, heads);
    }
};

}  // namespace hypermlp
