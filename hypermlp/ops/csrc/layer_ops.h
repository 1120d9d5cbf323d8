// A whole layer, and its decoding step, as PyTorch operators; a part of ops.cpp.
#pragma once

#include <array>

#include "attention_ops.h"
#include "layer.h"
#include "tensors.h"

#pragma GCC visibility push(hidden)

namespace hypermlp {

// The parameters of a layer, as LayerWeights of ops/layer.py lists them. q_gate ... mix2_gate: the first row
// of each gate in gate_weight, or -1 if it is absent.
struct LayerTensors {
    const Optional &k_conv, &v_conv;
    const Tensor &q_weight, &k_weight, &v_weight, &o_weight;
    const Optional &gate_weight, &gate_bias, &diag1, &left1, &right1, &diag2, &left2, &right2;
    int64_t q_gate, output_gate, mix1_gate, mix2_gate;
    const std::string &activation, &layout;
    double eps;
};
#define LAYER_PARAMETERS                                                                                 \
    const Optional &k_conv, const Optional &v_conv, const Tensor &q_weight, const Tensor &k_weight,      \
        const Tensor &v_weight, const Tensor &o_weight, const Optional &gate_weight,                     \
        const Optional &gate_bias, const Optional &diag1, const Optional &left1, const Optional &right1, \
        const Optional &diag2, const Optional &left2, const Optional &right2, int64_t q_gate,            \
        int64_t output_gate, int64_t mix1_gate, int64_t mix2_gate, const std::string &activation,        \
        const std::string &layout, double eps
#define LAYER_TENSORS                                                                                        \
    LayerTensors {                                                                                           \
        k_conv, v_conv, q_weight, k_weight, v_weight, o_weight, gate_weight, gate_bias, diag1, left1,        \
            right1, diag2, left2, right2, q_gate, output_gate, mix1_gate, mix2_gate, activation, layout, eps \
    }

// Check a tensor whose dtype and shape must be exact, and return its contiguous memory.
template <typename T>
const T* exact(Inputs<T>& inputs, const Name& name, const Tensor& x, Sizes shape) {
    check_exact(name, x, kDtype<T>, shape);
    return inputs.contiguous(x);
}

// Return the rows of gate_weight of a gate that begins at `first`, which is -1 if the gate is absent.
inline GateRange gate_range(const Name& name, int64_t first, int64_t width, int64_t gate_width) {
    if (first < -1 || (first >= 0 && first + width > gate_width))
        fail(name.text() + " is " + std::to_string(first) + "; it must be -1, or the first of " +
             std::to_string(width) + " of the " + std::to_string(gate_width) + " rows of gate_weight");
    return first < 0 ? GateRange{} : GateRange{first, width};
}

// The arguments of the kernels of a layer, from its checked tensors.
template <typename T>
class LayerCall {
  public:
    Projections<T> p;
    int64_t hidden = 0;

    LayerCall(const Tensor& x, const LayerTensors& t, const Optional& starts, const Optional& reach,
              int64_t heads) {
        Convolutions<T>& c = p.conv;
        check_exact("x", x, kDtype<T>, {kAny, kAny, kAny});
        c.batch = x.size(0);
        c.length = x.size(1);
        c.width = hidden = x.size(2);
        c.threads = torch::stable::get_num_threads();
        c.x = Strided<const T>{inputs_.contiguous(x), c.length * c.width, c.width, 0};
        require(t.k_conv.has_value() == t.v_conv.has_value(), "k_conv and v_conv must be given together");
        if (t.k_conv) {
            const T* k_conv = exact(inputs_, "k_conv", *t.k_conv, {c.width, kAny});
            c.kernel = t.k_conv->size(1);
            const T* v_conv = exact(inputs_, "v_conv", *t.v_conv, {c.width, c.kernel});
            c.weights = {Strided<const T>{k_conv, c.kernel, 1}, Strided<const T>{v_conv, c.kernel, 1}};
        }
        c.reach = inputs_.integers("reach", reach, c.batch, c.length);
        set_attention(t, starts, heads);
        set_weights(t);
    }

    // Return the arguments of the operator, whose operands and gates have N rows each.
    Problem<T> attention(const T* q, const T* k, const T* v, const T* gates) const {
        Problem<T> a = attention_;
        const int64_t length = p.conv.length;
        const auto by_heads = [&](const T* x, int64_t row, int64_t width) {
            return Strided<const T>{x, length * row, row, width};
        };
        a.q = by_heads(q, p.q_width, a.qk_dim);
        a.k = by_heads(k, p.q_width, a.qk_dim);
        a.v = by_heads(v, p.v_width, a.vo_dim);
        if (a.mix1.exists()) a.mix1.gate = by_heads(gates + p.mix1_gate.first, p.gate_width, a.mix1.rank);
        if (a.mix2.exists()) a.mix2.gate = by_heads(gates + p.mix2_gate.first, p.gate_width, a.mix2.rank);
        return a;
    }
    // Return where the outputs of the operator, or their gradient, are in a matrix of N rows.
    Strided<T> outputs(T* o) const { return {o, p.conv.length * p.v_width, p.v_width, attention_.vo_dim}; }

    Readout<T> readout(const T* o, const T* gates) const {
        return {p.rows(),      hidden, p.v_width, p.gate_width, p.conv.threads,
                p.output_gate, o,      gates,     o_weight_};
    }
    // Check and return a matrix of N rows that the forward has kept, or a gradient of one.
    const T* matrix(const Name& name, const Tensor& x, int64_t width) {
        return width == 0 ? nullptr : exact(inputs_, name, x, {p.rows(), width});
    }

  private:
    void set_attention(const LayerTensors& t, const Optional& starts, int64_t heads) {
        Problem<T>& a = attention_;
        set_options(a, t.activation, t.layout, t.eps);
        a.batch = p.conv.batch;
        a.queries = a.keys = p.conv.length;
        a.heads = heads;
        a.starts = inputs_.integers("starts", starts, a.batch, a.queries);
        const Optional none;
        a.mix1 = mix_parameters(inputs_, {"1", t.diag1, t.left1, t.right1, none}, a.branches(), a);
        a.mix2 = mix_parameters(inputs_, {"2", t.diag2, t.left2, t.right2, none}, heads, a);
    }

    void set_weights(const LayerTensors& t) {
        Problem<T>& a = attention_;
        p.q_weight = exact(inputs_, "q_weight", t.q_weight, {kAny, hidden});
        p.q_width = t.q_weight.size(0);
        p.k_weight = exact(inputs_, "k_weight", t.k_weight, {p.q_width, hidden});
        p.v_weight = exact(inputs_, "v_weight", t.v_weight, {kAny, hidden});
        p.v_width = t.v_weight.size(0);
        o_weight_ = exact(inputs_, "o_weight", t.o_weight, {hidden, p.v_width});
        require(a.heads > 0 && p.q_width % a.branches() == 0 && p.v_width % a.heads == 0,
                "heads must divide the widths of the projections");
        a.qk_dim = p.q_width / a.branches();
        a.vo_dim = p.v_width / a.heads;
        require(t.gate_weight.has_value() == t.gate_bias.has_value(),
                "gate_weight and gate_bias must be given together");
        if (t.gate_weight) {
            p.gate_weight = exact(inputs_, "gate_weight", *t.gate_weight, {kAny, hidden});
            p.gate_width = t.gate_weight->size(0);
            p.gate_bias = exact(inputs_, "gate_bias", *t.gate_bias, {p.gate_width});
        }
        p.q_gate = gate_range("q_gate", t.q_gate, p.q_width, p.gate_width);
        p.output_gate = gate_range("output_gate", t.output_gate, p.v_width, p.gate_width);
        p.mix1_gate = gate_range("mix1_gate", t.mix1_gate, a.branches() * a.mix1.rank, p.gate_width);
        p.mix2_gate = gate_range("mix2_gate", t.mix2_gate, a.heads * a.mix2.rank, p.gate_width);
        require(a.mix1.exists() == (t.mix1_gate >= 0) && a.mix2.exists() == (t.mix2_gate >= 0),
                "a mix and its gate must be given together");
        require(p.q_gate.width + p.output_gate.width + p.mix1_gate.width + p.mix2_gate.width == p.gate_width,
                "gate_weight has rows that belong to no gate");
    }

    Inputs<T> inputs_;
    Problem<T> attention_;
    const T* o_weight_ = nullptr;
};

// Return the output [batch, length, hidden] and, if `keep`, what the backward needs: q, k, v, the gates and
// the outputs of the operator, of N rows each, and what the operator keeps of its rows.
//
// Without `keep`, these share one block of memory, which C libraries reuse better than several. If there is
// an output gate and o is as wide as the output, o lies in the output's memory, and the output projection
// overwrites it block by block.
inline Tensors native_layer(const Tensor& x, LAYER_PARAMETERS, const Optional& starts, const Optional& reach,
                            int64_t heads, bool keep) {
    return with_type(x.scalar_type(), [&](auto zero) -> Tensors {
        using T = decltype(zero);
        LayerCall<T> call(x, LAYER_TENSORS, starts, reach, heads);
        const Projections<T>& p = call.p;
        const int64_t rows = p.rows();
        const Tensor out = fresh<T>(shape(x));
        const bool in_place = !keep && p.output_gate.width != 0 && p.v_width == call.hidden;
        const std::array<int64_t, 5> widths{p.q_width, p.q_width, p.v_width, p.gate_width,
                                            in_place ? 0 : p.v_width};
        Tensors results{out};
        std::array<T*, 5> memory;  // of q, k, v, the gates and o
        if (keep) {
            for (size_t i = 0; i < 5; ++i)
                memory[i] = data<T>(results.emplace_back(fresh<T>({rows, widths[i]})));
        }
        const auto aligned = [&](int64_t width) { return (rows * width + 15) / 16 * 16; };
        int64_t size = 0;
        for (const int64_t width : widths) size += aligned(width);
        const Tensor block = fresh<T>({keep ? 0 : size});
        if (!keep) {
            T* next = data<T>(block);
            for (size_t i = 0; i < 5; next += aligned(widths[i++])) memory[i] = next;
            if (in_place) memory[4] = data<T>(out);
        }
        const auto [q, k, v, gates, o] = memory;
        project<T>(p, {q, k, v, gates});
        const Problem<T> attention = call.attention(q, k, v, gates);
        const Tensor kept =
            fresh<T>({attention.batch, attention.queries, heads, keep ? kept_width(attention) : 1});
        attend(attention, Output<T>{call.outputs(o), strided<T>(kept), keep});
        read_out<T>(call.readout(o, gates), data<T>(out));
        if (keep) results.push_back(kept);
        return results;
    });
}

// Memory for the gradients of a layer: of x and its parameters, which are returned, and of the matrices of N
// rows that the projections compute.
template <typename T>
class LayerGradients {
  public:
    Tensors returned;
    ProjectionGradients<T> projections{};
    Gradients<T> attention;
    T* o_weight;
    T *q, *k, *v, *o, *mix1, *mix2;  // of the matrices; those of the mixes are of their gates

    LayerGradients(const LayerCall<T>& call, const Problem<T>& problem, const Tensor& x,
                   const LayerTensors& t)
        : p_(call.p) {
        projections.x = like(x);
        if (t.k_conv) {
            projections.conv[0] = like(*t.k_conv);
            projections.conv[1] = like(*t.v_conv);
        }
        projections.q_weight = like(t.q_weight);
        projections.k_weight = like(t.k_weight);
        projections.v_weight = like(t.v_weight);
        o_weight = like(t.o_weight);
        if (t.gate_weight) {
            projections.gate_weight = like(*t.gate_weight);
            projections.gate_bias = like(*t.gate_bias);
        }
        q = matrix(p_.q_width);
        k = matrix(p_.q_width);
        v = matrix(p_.v_width);
        o = matrix(p_.v_width);
        mix1 = matrix(p_.mix1_gate.width);
        mix2 = matrix(p_.mix2_gate.width);
        attention = {by_heads(q, p_.q_width, problem.qk_dim), by_heads(k, p_.q_width, problem.qk_dim),
                     by_heads(v, p_.v_width, problem.vo_dim),
                     mix({"1", t.diag1, t.left1, t.right1, {}}, mix1, p_.mix1_gate.width),
                     mix({"2", t.diag2, t.left2, t.right2, {}}, mix2, p_.mix2_gate.width)};
    }

  private:
    T* like(const Tensor& x) { return data<T>(returned.emplace_back(fresh<T>(shape(x)))); }
    T* matrix(int64_t width) { return data<T>(matrices_.emplace_back(fresh<T>({p_.rows(), width}))); }
    Strided<T> by_heads(T* x, int64_t width, int64_t head) const {
        return {x, p_.conv.length * width, width, head};
    }
    MixGradients<T> mix(const MixTensors& t, T* gate, int64_t width) {
        MixGradients<T> m;
        if (!t.diag) return m;
        like(*t.diag);
        m.diag = strided<T>(returned.back());
        like(*t.left);
        m.left = strided<T>(returned.back());
        like(*t.right);
        m.right = strided<T>(returned.back());
        m.gate = by_heads(gate, width, t.left->size(2));
        return m;
    }

    const Projections<T>& p_;
    Tensors matrices_;
};

// Return the gradients of x and of each parameter that is present.
inline Tensors native_layer_gradients(const Tensors& grads_of_outputs, const Tensors& kept, const Tensor& x,
                                      LAYER_PARAMETERS, const Optional& starts, const Optional& reach,
                                      int64_t heads, bool) {
    require(grads_of_outputs.size() == 1 && kept.size() == 6,
            "the layer has one output and keeps six tensors");
    return with_type(x.scalar_type(), [&](auto zero) {
        using T = decltype(zero);
        const LayerTensors tensors = LAYER_TENSORS;
        LayerCall<T> call(x, tensors, starts, reach, heads);
        const Projections<T>& p = call.p;
        const T *q = call.matrix("q", kept[0], p.q_width), *k = call.matrix("k", kept[1], p.q_width),
                *v = call.matrix("v", kept[2], p.v_width),
                *gates = call.matrix("gates", kept[3], p.gate_width),
                *o = call.matrix("o", kept[4], p.v_width);
        check_exact("grads", grads_of_outputs[0], kDtype<T>, {p.conv.batch, p.conv.length, call.hidden});
        const Problem<T> attention = call.attention(q, k, v, gates);
        check_exact("rows", kept[5], kDtype<T>,
                    {attention.batch, attention.queries, heads, kept_width(attention)});
        Inputs<T> inputs;
        LayerGradients<T> g(call, attention, x, tensors);
        read_out_gradients<T>(call.readout(o, gates), inputs.contiguous(grads_of_outputs[0]), g.o,
                              g.o_weight);
        const Saved<T> saved{call.outputs(g.o).read_only(), inputs.strided(kept[5]),
                             attention.queries > kDecodeQueries};
        backward<T>(attention, saved, g.attention);
        project_gradients<T>(p, {q, gates, o, g.k, g.v, g.q, g.o, g.mix1, g.mix2}, g.projections);
        return std::move(g.returned);
    });
}

// Check the caches of keys and values and describe them, and the sizes that follow from them, in s.
template <typename T, typename S>
void set_caches(Step<T, S>& s, const Tensor& keys, const Tensor& values, int64_t past) {
    Problem<T>& p = s.problem;
    check_cache("values", values, kDtype<S>, {p.batch, kAny, kAny, kAny});
    p.heads = values.size(2);
    p.vo_dim = values.size(3);
    check_cache("keys", keys, kDtype<S>, {p.batch, kAny, p.branches(), kAny});
    p.qk_dim = keys.size(3);
    p.keys = past + p.queries;
    require(past >= 0 && p.keys <= keys.size(1) && p.keys <= values.size(1),
            "keys and values have no room for the new positions after `past`");
    s.keys = strided<S>(keys);
    s.values = strided<S>(values);
}

template <typename T, typename S>
void set_convolutions(Inputs<S>& inputs, Step<T, S>& s, const Optional& history, int64_t past_inputs,
                      const Optional& k_conv, const Optional& v_conv) {
    const bool exists = history.has_value();
    require(exists == k_conv.has_value() && exists == v_conv.has_value(),
            "history, k_conv and v_conv must be given together");
    if (!exists) return;
    check_cache("history", *history, kDtype<S>, {s.problem.batch, kAny, s.hidden});
    require(past_inputs >= 0 && past_inputs + s.problem.queries <= history->size(1),
            "history has no room for the new positions after `past_inputs`");
    s.history = strided<S>(*history);
    s.past_inputs = past_inputs;
    s.k_conv = exact(inputs, "k_conv", *k_conv, {s.hidden, kAny});
    s.kernel = k_conv->size(1);
    s.v_conv = exact(inputs, "v_conv", *v_conv, {s.hidden, s.kernel});
}

// Check the angles of the rotation, [batch or 1, queries, 1 + registers, qk_dim / 2], and return them.
template <typename T>
Strided<const T> checked_angles(Inputs<T>& inputs, const Name& name, const Tensor& x, const Problem<T>& p,
                                int64_t registers) {
    require(p.qk_dim % 2 == 0, "a rotation needs an even width of queries and keys");
    const int64_t batch = x.dim() == 4 && x.size(0) == 1 ? 1 : p.batch;
    check_exact(name, x, kDtype<T>, {batch, p.queries, 1 + registers, p.qk_dim / 2});
    Strided<const T> angles = inputs.strided(x);
    if (batch == 1) angles.batch = 0;
    return angles;
}

template <typename T, typename S>
void set_gates(Inputs<S>& inputs, Step<T, S>& s, const Optional& weight, const Optional& bias) {
    const Problem<T>& p = s.problem;
    if (weight) {
        s.gate_weight = exact(inputs, "gate_weight", *weight, {kAny, s.hidden});
        s.gate_width = weight->size(0);
        if (bias) s.gate_bias = exact(inputs, "gate_bias", *bias, {s.gate_width});
    }
    gate_range("q_gate", s.q_gate, p.branches() * p.qk_dim, s.gate_width);
    gate_range("output_gate", s.output_gate, p.heads * p.vo_dim, s.gate_width);
    gate_range("mix1_gate", s.mix1_gate, p.branches() * p.mix1.rank, s.gate_width);
    gate_range("mix2_gate", s.mix2_gate, p.heads * p.mix2.rank, s.gate_width);
    require(p.mix1.exists() == (s.mix1_gate >= 0) && p.mix2.exists() == (s.mix2_gate >= 0),
            "a mix and its gate must be given together");
}

// x: [batch, queries, hidden]. history, keys, values: caches, [batch, room, ...], whose first `past_inputs`
// and `past` rows are full; the new positions are written behind them. registers: [count, hidden]. cos, sin:
// see checked_angles.
inline Tensor native_step(const Tensor& x, LAYER_PARAMETERS, const Optional& registers, const Optional& cos,
                          const Optional& sin, const Optional& history, int64_t past_inputs,
                          const Tensor& keys, const Tensor& values, int64_t past, const Optional& starts,
                          const Optional& reach) {
    return with_types(x.scalar_type(), [&](auto zero, auto stored_zero) {
        using T = decltype(zero);
        using S = decltype(stored_zero);
        Inputs<T> inputs;
        Inputs<S> weights;
        Step<T, S> s;
        Problem<T>& p = s.problem;
        const Optional none;
        check_exact("x", x, kDtype<S>, {kAny, kAny, kAny});
        p.batch = x.size(0);
        p.queries = x.size(1);
        s.hidden = x.size(2);
        s.x = weights.strided(x);
        set_options(p, activation, layout, eps);
        set_caches(s, keys, values, past);
        require(starts.has_value() == reach.has_value(), "starts and reach must be given together");
        p.starts = inputs.integers("starts", starts, p.batch, p.queries);
        s.reach = inputs.integers("reach", reach, p.batch, p.queries);
        if (registers) {
            s.registers = exact(weights, "registers", *registers, {kAny, s.hidden});
            s.num_registers = registers->size(0);
        }
        require(cos.has_value() == sin.has_value(), "cos and sin must be given together");
        if (cos) {
            s.cos = checked_angles(inputs, "cos", *cos, p, s.num_registers);
            s.sin = checked_angles(inputs, "sin", *sin, p, s.num_registers);
        }
        Problem<T> seen = p;  // with the registers, which occupy slots too
        seen.keys += s.num_registers;
        p.mix1 = mix_parameters(inputs, {"1", diag1, left1, right1, none}, p.branches(), seen);
        p.mix2 = mix_parameters(inputs, {"2", diag2, left2, right2, none}, p.heads, seen);
        set_convolutions(weights, s, history, past_inputs, k_conv, v_conv);
        const int64_t qk = p.branches() * p.qk_dim, vo = p.heads * p.vo_dim;
        s.q_weight = exact(weights, "q_weight", q_weight, {qk, s.hidden});
        s.k_weight = exact(weights, "k_weight", k_weight, {qk, s.hidden});
        s.v_weight = exact(weights, "v_weight", v_weight, {vo, s.hidden});
        s.o_weight = exact(weights, "o_weight", o_weight, {s.hidden, vo});
        s.q_gate = q_gate;
        s.output_gate = output_gate;
        s.mix1_gate = mix1_gate;
        s.mix2_gate = mix2_gate;
        set_gates(weights, s, gate_weight, gate_bias);
        const Tensor out = fresh<S>(shape(x));
        s.out = data<S>(out);
        step(s);
        return out;
    });
}

#undef LAYER_PARAMETERS
#undef LAYER_TENSORS

}  // namespace hypermlp

#pragma GCC visibility pop
