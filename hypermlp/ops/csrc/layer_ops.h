// The kernels around the operator (layer.h) as PyTorch operators; a part of ops.cpp.
#pragma once

#include <tuple>

#include "layer.h"
#include "tensors.h"

#pragma GCC visibility push(hidden)

namespace hypermlp {

// Check a tensor whose dtype and shape must be exact, and return its contiguous memory.
template <typename T>
const T* exact(Inputs<T>& inputs, const Name& name, const Tensor& x, Sizes shape) {
    check_exact(name, x, kDtype<T>, shape);
    return inputs.contiguous(x);
}

// The same for a tensor that is written in place.
template <typename T>
T* in_place(const Name& name, const Tensor& x, Sizes shape) {
    check_exact(name, x, kDtype<T>, shape);
    if (!x.is_contiguous()) fail(name.text() + " is written in place; it must be contiguous");
    return data<T>(x);
}

// Return the columns of a gate that begins at `first`, which is -1 if the gate is absent.
inline GateRange gate_range(const Name& name, int64_t first, int64_t width, int64_t gate_width) {
    if (first < -1 || (first >= 0 && first + width > gate_width))
        fail(name.text() + " is " + std::to_string(first) + "; it must be -1, or the first of " +
             std::to_string(width) + " of the " + std::to_string(gate_width) + " gates");
    return first < 0 ? GateRange{} : GateRange{first, width};
}

// The tensors that the projections and their backward share, as the schemas list them.
struct ProjectionTensors {
    const Tensor& x;
    const Optional &k_conv, &v_conv;
    const Tensor &q_weight, &k_weight, &v_weight, &gate_weight, &gate_bias;
    const Optional& reach;
};

template <typename T>
Projections<T> projections(Inputs<T>& inputs, const ProjectionTensors& t, int64_t q_gate) {
    Projections<T> p;
    ConvPair<T>& c = p.conv;
    check_exact("x", t.x, kDtype<T>, {kAny, kAny, kAny});
    c.batch = t.x.size(0);
    c.length = t.x.size(1);
    c.width = t.x.size(2);
    c.threads = torch::stable::get_num_threads();
    c.x = Strided<const T>{inputs.contiguous(t.x), c.length * c.width, c.width, 0};
    require(t.k_conv.has_value() == t.v_conv.has_value(), "k_conv and v_conv must be given together");
    if (t.k_conv) {
        const T* k_conv = exact(inputs, "k_conv", *t.k_conv, {c.width, kAny});
        c.kernel = t.k_conv->size(1);
        const T* v_conv = exact(inputs, "v_conv", *t.v_conv, {c.width, c.kernel});
        c.weight[0] = Strided<const T>{k_conv, c.kernel, 1};
        c.weight[1] = Strided<const T>{v_conv, c.kernel, 1};
    }
    c.reach = inputs.integers("reach", t.reach, c.batch, c.length);
    p.q_weight = exact(inputs, "q_weight", t.q_weight, {kAny, c.width});
    p.q_width = t.q_weight.size(0);
    p.k_weight = exact(inputs, "k_weight", t.k_weight, {p.q_width, c.width});
    p.v_weight = exact(inputs, "v_weight", t.v_weight, {kAny, c.width});
    p.v_width = t.v_weight.size(0);
    p.gate_weight = exact(inputs, "gate_weight", t.gate_weight, {kAny, c.width});
    p.gate_width = t.gate_weight.size(0);
    p.gate_bias = exact(inputs, "gate_bias", t.gate_bias, {p.gate_width});
    p.q_gate = gate_range("q_gate", q_gate, p.q_width, p.gate_width);
    return p;
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> native_project(
    const Tensor& x, const Optional& k_conv, const Optional& v_conv, const Tensor& q_weight,
    const Tensor& k_weight, const Tensor& v_weight, const Tensor& gate_weight, const Tensor& gate_bias,
    const Optional& reach, int64_t q_gate) {
    return with_type(x.scalar_type(), [&](auto zero) -> std::tuple<Tensor, Tensor, Tensor, Tensor> {
        using T = decltype(zero);
        Inputs<T> inputs;
        const Projections<T> p = projections(
            inputs, {x, k_conv, v_conv, q_weight, k_weight, v_weight, gate_weight, gate_bias, reach}, q_gate);
        const Tensor q = fresh<T>({p.rows(), p.q_width}), k = fresh<T>({p.rows(), p.q_width});
        const Tensor v = fresh<T>({p.rows(), p.v_width}), gates = fresh<T>({p.rows(), p.gate_width});
        project<T>(p, {data<T>(q), data<T>(k), data<T>(v), data<T>(gates)});
        return {q, k, v, gates};
    });
}

inline std::vector<Tensor> native_project_grad(
    const Tensor& grad_q, const Tensor& grad_k, const Tensor& grad_v, const Tensor& grad_o,
    const Optional& grad_gate1, const Optional& grad_gate2, const Tensor& q, const Tensor& o,
    const Tensor& gates, const Tensor& x, const Optional& k_conv, const Optional& v_conv,
    const Tensor& q_weight, const Tensor& k_weight, const Tensor& v_weight, const Tensor& gate_weight,
    const Tensor& gate_bias, const Optional& reach, int64_t q_gate, int64_t output_gate, int64_t mix1_gate,
    int64_t mix2_gate) {
    return with_type(x.scalar_type(), [&](auto zero) {
        using T = decltype(zero);
        Inputs<T> inputs;
        Projections<T> p = projections(
            inputs, {x, k_conv, v_conv, q_weight, k_weight, v_weight, gate_weight, gate_bias, reach}, q_gate);
        const int64_t rows = p.rows();
        p.output_gate = gate_range("output_gate", output_gate, p.v_width, p.gate_width);
        ProjectionInputs<T> in{};
        in.q = exact(inputs, "q", q, {rows, p.q_width});
        in.o = exact(inputs, "o", o, {rows, p.v_width});
        in.gates = exact(inputs, "gates", gates, {rows, p.gate_width});
        in.grad_k = exact(inputs, "grad_k", grad_k, {rows, p.q_width});
        in.grad_v = exact(inputs, "grad_v", grad_v, {rows, p.v_width});
        in.grad_q = in_place<T>("grad_q", grad_q, {rows, p.q_width});
        in.grad_o = in_place<T>("grad_o", grad_o, {rows, p.v_width});
        const auto mix = [&](const Name& name, const Optional& grad, int64_t first, GateRange& range) -> T* {
            require(grad.has_value() == (first >= 0),
                    "a gate of a mix and its gradient must be given together");
            if (!grad) return nullptr;
            T* memory = in_place<T>(name, *grad, {rows, kAny});
            range = gate_range(name, first, grad->size(1), p.gate_width);
            return memory;
        };
        in.grad_mix1 = mix("grad_gate1", grad_gate1, mix1_gate, p.mix1_gate);
        in.grad_mix2 = mix("grad_gate2", grad_gate2, mix2_gate, p.mix2_gate);
        require(p.q_gate.width + p.output_gate.width + p.mix1_gate.width + p.mix2_gate.width == p.gate_width,
                "gate_weight has rows that belong to no gate");
        std::vector<Tensor> found;
        const auto add = [&](const Tensor& like) {
            return data<T>(found.emplace_back(fresh<T>(shape(like))));
        };
        ProjectionGradients<T> grads{};
        grads.x = add(x);
        if (k_conv) {
            grads.conv[0] = add(*k_conv);
            grads.conv[1] = add(*v_conv);
        }
        grads.q_weight = add(q_weight);
        grads.k_weight = add(k_weight);
        grads.v_weight = add(v_weight);
        grads.gate_weight = add(gate_weight);
        grads.gate_bias = add(gate_bias);
        project_gradients<T>(p, in, grads);
        return found;
    });
}

template <typename T>
Readout<T> readout(Inputs<T>& inputs, const Tensor& o, const Tensor& gates, const Tensor& weight,
                   int64_t output_gate) {
    Readout<T> r;
    r.o = exact(inputs, "o", o, {kAny, kAny});
    r.rows = o.size(0);
    r.width = o.size(1);
    r.gates = exact(inputs, "gates", gates, {r.rows, kAny});
    r.gate_width = gates.size(1);
    r.weight = exact(inputs, "weight", weight, {kAny, r.width});
    r.hidden = weight.size(0);
    r.gate = gate_range("output_gate", output_gate, r.width, r.gate_width);
    r.threads = torch::stable::get_num_threads();
    return r;
}

inline Tensor native_read_out(const Tensor& o, const Tensor& gates, const Tensor& weight,
                              int64_t output_gate) {
    return with_type(o.scalar_type(), [&](auto zero) {
        using T = decltype(zero);
        Inputs<T> inputs;
        const Readout<T> r = readout(inputs, o, gates, weight, output_gate);
        const Tensor out = fresh<T>({r.rows, r.hidden});
        read_out<T>(r, data<T>(out));
        return out;
    });
}

inline std::tuple<Tensor, Tensor> native_read_out_grad(const Tensor& grad, const Tensor& o,
                                                       const Tensor& gates, const Tensor& weight,
                                                       int64_t output_gate) {
    return with_type(o.scalar_type(), [&](auto zero) -> std::tuple<Tensor, Tensor> {
        using T = decltype(zero);
        Inputs<T> inputs;
        const Readout<T> r = readout(inputs, o, gates, weight, output_gate);
        const T* of_out = exact(inputs, "grad", grad, {r.rows, r.hidden});
        const Tensor grad_o = fresh<T>(shape(o)), grad_weight = fresh<T>(shape(weight));
        read_out_gradients<T>(r, of_out, data<T>(grad_o), data<T>(grad_weight));
        return {grad_o, grad_weight};
    });
}

}  // namespace hypermlp

#pragma GCC visibility pop
