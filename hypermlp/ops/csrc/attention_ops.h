// The operator as PyTorch operators; a part of ops.cpp.
#pragma once

#include <tuple>

#include "tensors.h"

#pragma GCC visibility push(hidden)

namespace hypermlp {

// A mix as the schemas list it; `index` is "1" or "2".
struct MixTensors {
    const char* index;
    const Optional &diag, &left, &right, &gate;
};

template <typename T>
void set_options(Problem<T>& p, const std::string& activation, const std::string& layout, double eps) {
    require(activation == "relu" || activation == "glu", "activation must be 'relu' or 'glu'");
    require(layout == "lag" || layout == "forward", "layout must be 'lag' or 'forward'");
    p.activation = activation == "glu" ? Activation::kGlu : Activation::kRelu;
    p.layout = layout == "lag" ? Layout::kLag : Layout::kForward;
    p.eps = eps;
    p.threads = torch::stable::get_num_threads();
}

// Check the parameters of a mix and return them, without the gate. `p` must have its starts.
template <typename T>
Mix<T> mix_parameters(Inputs<T>& inputs, const MixTensors& mix, int64_t heads, const Problem<T>& p) {
    Mix<T> m;
    const bool exists = mix.diag.has_value();
    require(exists == mix.left.has_value() && exists == mix.right.has_value(),
            "diag, left and right of a mix must be given together");
    if (!exists) return m;
    check_floats({"left", mix.index}, *mix.left, {heads, kAny, kAny});
    m.slots = mix.left->size(1);
    m.rank = mix.left->size(2);
    check_floats({"diag", mix.index}, *mix.diag, {heads, m.slots});
    check_floats({"right", mix.index}, *mix.right, {heads, m.slots, m.rank});
    require(p.starts != nullptr || p.keys <= m.slots,
            "a mix has fewer slots than there are keys; pass starts");
    m.diag = inputs.source(*mix.diag);
    m.left = inputs.source(*mix.left);
    m.right = inputs.source(*mix.right);
    return m;
}

template <typename T>
Mix<T> gated_mix(Inputs<T>& inputs, const MixTensors& mix, int64_t heads, const Problem<T>& p) {
    Mix<T> m = mix_parameters(inputs, mix, heads, p);
    require(m.exists() == mix.gate.has_value(), "a mix and its gate must be given together");
    if (!m.exists()) return m;
    check_floats({"gate", mix.index}, *mix.gate, {p.batch, p.queries, heads, m.rank});
    m.gate = inputs.source(*mix.gate);
    return m;
}

template <typename T>
Problem<T> problem(Inputs<T>& inputs, const Tensor& q, const Tensor& k, const Tensor& v,
                   const MixTensors& mix1, const MixTensors& mix2, const Optional& starts,
                   const std::string& activation, const std::string& layout, double eps) {
    Problem<T> p;
    set_options(p, activation, layout, eps);
    check_floats("v", v, {kAny, kAny, kAny, kAny});
    p.batch = v.size(0);
    p.keys = v.size(1);
    p.heads = v.size(2);
    p.vo_dim = v.size(3);
    check_floats("q", q, {p.batch, kAny, p.branches(), kAny});
    p.queries = q.size(1);
    p.qk_dim = q.size(3);
    check_floats("k", k, {p.batch, p.keys, p.branches(), p.qk_dim});
    require(p.queries <= p.keys, "there are more queries than keys; the queries are the last positions");
    p.starts = inputs.integers("starts", starts, p.batch, p.queries);
    p.q = inputs.source(q);
    p.k = inputs.source(k);
    p.v = inputs.source(v);
    p.mix1 = gated_mix(inputs, mix1, p.branches(), p);
    p.mix2 = gated_mix(inputs, mix2, p.heads, p);
    return p;
}

// Run the kernel for this number of queries.
template <typename T>
void attend(const Problem<T>& p, const Output<T>& output) {
    if (p.queries <= kDecodeQueries)
        decode<T>(p, output);
    else
        forward<T>(p, output);
}

inline std::tuple<Tensor, Tensor> native(const Tensor& q, const Tensor& k, const Tensor& v,
                                         const Optional& diag1, const Optional& left1, const Optional& right1,
                                         const Optional& gate1, const Optional& diag2, const Optional& left2,
                                         const Optional& right2, const Optional& gate2,
                                         const Optional& starts, const std::string& activation,
                                         const std::string& layout, double eps) {
    return with_type(q.scalar_type(), [&](auto zero) -> std::tuple<Tensor, Tensor> {
        using T = decltype(zero);
        Inputs<T> inputs;
        const MixTensors mix1{"1", diag1, left1, right1, gate1}, mix2{"2", diag2, left2, right2, gate2};
        const Problem<T> p = problem(inputs, q, k, v, mix1, mix2, starts, activation, layout, eps);
        const Tensor out = fresh<T>({p.batch, p.queries, p.heads, p.vo_dim});
        const Tensor kept = fresh<T>({p.batch, p.queries, p.heads, kept_width(p)});
        const Output<T> output{strided<T>(out), strided<T>(kept), true};
        attend(p, output);
        return {stored(out, q.scalar_type()), kept};
    });
}

// The gradients of one call: computed in T, stored in the dtypes of their tensors.
template <typename T>
class GradientTensors {
  public:
    const Tensor& add(const Tensor& x) {
        dtypes_.push_back(x.scalar_type());
        return grads_.emplace_back(fresh<T>(shape(x)));
    }
    MixGradients<T> add(const MixTensors& mix) {
        MixGradients<T> m;
        if (!mix.diag) return m;
        m.diag = strided<T>(add(*mix.diag));
        m.left = strided<T>(add(*mix.left));
        m.right = strided<T>(add(*mix.right));
        m.gate = strided<T>(add(*mix.gate));
        return m;
    }
    std::vector<Tensor> stored() {
        for (size_t i = 0; i < grads_.size(); ++i) grads_[i] = hypermlp::stored(grads_[i], dtypes_[i]);
        return std::move(grads_);
    }

  private:
    std::vector<Tensor> grads_;
    std::vector<ScalarType> dtypes_;
};

inline std::vector<Tensor> native_gradients(
    const Tensors& grads_of_outputs, const Tensors& kept, const Tensor& q, const Tensor& k, const Tensor& v,
    const Optional& diag1, const Optional& left1, const Optional& right1, const Optional& gate1,
    const Optional& diag2, const Optional& left2, const Optional& right2, const Optional& gate2,
    const Optional& starts, const std::string& activation, const std::string& layout, double eps) {
    require(grads_of_outputs.size() == 1 && kept.size() == 1, "the operator has one output and keeps one");
    return with_type(q.scalar_type(), [&](auto zero) {
        using T = decltype(zero);
        Inputs<T> inputs;
        const MixTensors mix1{"1", diag1, left1, right1, gate1}, mix2{"2", diag2, left2, right2, gate2};
        const Problem<T> p = problem(inputs, q, k, v, mix1, mix2, starts, activation, layout, eps);
        check_floats("grads", grads_of_outputs[0], {p.batch, p.queries, p.heads, p.vo_dim});
        check_floats("kept", kept[0], {p.batch, p.queries, p.heads, kept_width(p)});
        const Saved<T> saved{inputs.source(grads_of_outputs[0]), inputs.strided(kept[0]),
                             p.queries > kDecodeQueries};
        GradientTensors<T> tensors;
        Gradients<T> grads;
        grads.q = strided<T>(tensors.add(q));
        grads.k = strided<T>(tensors.add(k));
        grads.v = strided<T>(tensors.add(v));
        grads.mix1 = tensors.add(mix1);
        grads.mix2 = tensors.add(mix2);
        backward<T>(p, saved, grads);
        return tensors.stored();
    });
}

}  // namespace hypermlp

#pragma GCC visibility pop
