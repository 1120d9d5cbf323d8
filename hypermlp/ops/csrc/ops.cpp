// The kernels as PyTorch operators, on PyTorch's stable ABI, so that this file compiles in seconds. Python
// defines their schemas, fakes and derivatives. float16 and bfloat16 are read as they are stored and computed
// in float32.
#include <tuple>

#include "guard.h"
#include "layer_ops.h"
#include "parallel.h"
#include "tensors.h"

namespace hypermlp {

void run_workers(int64_t workers, void (*work)(void* context, int64_t worker), void* context) {
    torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
        for (int64_t worker = begin; worker < end; ++worker) work(context, worker);
    });
}

namespace {

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

std::tuple<Tensor, Tensor> native(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& diag1,
                                  const Optional& left1, const Optional& right1, const Optional& gate1,
                                  const Optional& diag2, const Optional& left2, const Optional& right2,
                                  const Optional& gate2, const Optional& starts,
                                  const std::string& activation, const std::string& layout, double eps) {
    return with_type(q.scalar_type(), [&](auto zero) -> std::tuple<Tensor, Tensor> {
        using T = decltype(zero);
        Inputs<T> inputs;
        const MixTensors mix1{"1", diag1, left1, right1, gate1}, mix2{"2", diag2, left2, right2, gate2};
        const Problem<T> p = problem(inputs, q, k, v, mix1, mix2, starts, activation, layout, eps);
        const Tensor out = fresh<T>({p.batch, p.queries, p.heads, p.vo_dim});
        const Tensor kept = fresh<T>({p.batch, p.queries, p.heads, kept_width(p)});
        const Output<T> output{strided<T>(out), strided<T>(kept), true};
        if (p.queries <= kDecodeQueries)
            decode<T>(p, output);
        else
            forward<T>(p, output);
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

std::vector<Tensor> native_grad(const Tensor& grad_out, const Tensor& kept, const Tensor& q, const Tensor& k,
                                const Tensor& v, const Optional& diag1, const Optional& left1,
                                const Optional& right1, const Optional& gate1, const Optional& diag2,
                                const Optional& left2, const Optional& right2, const Optional& gate2,
                                const Optional& starts, const std::string& activation,
                                const std::string& layout, double eps) {
    return with_type(q.scalar_type(), [&](auto zero) {
        using T = decltype(zero);
        Inputs<T> inputs;
        const MixTensors mix1{"1", diag1, left1, right1, gate1}, mix2{"2", diag2, left2, right2, gate2};
        const Problem<T> p = problem(inputs, q, k, v, mix1, mix2, starts, activation, layout, eps);
        check_floats("grad_out", grad_out, {p.batch, p.queries, p.heads, p.vo_dim});
        check_floats("kept", kept, {p.batch, p.queries, p.heads, kept_width(p)});
        const Saved<T> saved{inputs.source(grad_out), inputs.strided(kept), p.queries > kDecodeQueries};
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

template <typename S>
const S* checked_weight(Inputs<S>& inputs, const Name& name, const Tensor& x, Sizes shape) {
    check_exact(name, x, kDtype<S>, shape);
    return inputs.contiguous(x);
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
    s.k_conv = checked_weight(inputs, "k_conv", *k_conv, {s.hidden, kAny});
    s.kernel = k_conv->size(1);
    s.v_conv = checked_weight(inputs, "v_conv", *v_conv, {s.hidden, s.kernel});
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

// Check the first row of a gate in gate_weight.
void check_gate(const Name& name, int64_t first, int64_t width, int64_t gate_width) {
    if (first < -1 || (first >= 0 && first + width > gate_width))
        fail(name.text() + " is " + std::to_string(first) + "; it must be -1, or the first of " +
             std::to_string(width) + " of the " + std::to_string(gate_width) + " rows of gate_weight");
}

template <typename T, typename S>
void set_gates(Inputs<S>& inputs, Step<T, S>& s, const Optional& weight, const Optional& bias) {
    const Problem<T>& p = s.problem;
    if (weight) {
        s.gate_weight = checked_weight(inputs, "gate_weight", *weight, {kAny, s.hidden});
        s.gate_width = weight->size(0);
        if (bias) s.gate_bias = checked_weight(inputs, "gate_bias", *bias, {s.gate_width});
    }
    check_gate("q_gate", s.q_gate, p.branches() * p.qk_dim, s.gate_width);
    check_gate("output_gate", s.output_gate, p.heads * p.vo_dim, s.gate_width);
    check_gate("mix1_gate", s.mix1_gate, p.branches() * p.mix1.rank, s.gate_width);
    check_gate("mix2_gate", s.mix2_gate, p.heads * p.mix2.rank, s.gate_width);
    require(p.mix1.exists() == (s.mix1_gate >= 0) && p.mix2.exists() == (s.mix2_gate >= 0),
            "a mix and its gate must be given together");
}

// x: [batch, queries, hidden]. history, keys, values: caches, [batch, room, ...], whose first `past_inputs`
// and `past` rows are full; the new positions are written behind them. registers: [count, hidden]. cos, sin:
// see checked_angles. q_gate ... mix2_gate: the first row of each gate in gate_weight, or -1 if it is absent.
Tensor native_decoding_step(const Tensor& x, const Optional& history, int64_t past_inputs,
                            const Optional& k_conv, const Optional& v_conv, const Optional& registers,
                            const Optional& cos, const Optional& sin, const Tensor& q_weight,
                            const Tensor& k_weight, const Tensor& v_weight, const Tensor& o_weight,
                            const Optional& gate_weight, const Optional& gate_bias, int64_t q_gate,
                            int64_t output_gate, int64_t mix1_gate, int64_t mix2_gate, const Tensor& keys,
                            const Tensor& values, int64_t past, const Optional& diag1, const Optional& left1,
                            const Optional& right1, const Optional& diag2, const Optional& left2,
                            const Optional& right2, const Optional& starts, const Optional& reach,
                            const std::string& activation, const std::string& layout, double eps) {
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
            s.registers = checked_weight(weights, "registers", *registers, {kAny, s.hidden});
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
        s.q_weight = checked_weight(weights, "q_weight", q_weight, {qk, s.hidden});
        s.k_weight = checked_weight(weights, "k_weight", k_weight, {qk, s.hidden});
        s.v_weight = checked_weight(weights, "v_weight", v_weight, {vo, s.hidden});
        s.o_weight = checked_weight(weights, "o_weight", o_weight, {s.hidden, vo});
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

template <typename T>
ConvPair<T> conv_pair(Inputs<T>& inputs, const Tensor& x, const Tensor& weight1, const Tensor& weight2,
                      int64_t length, const Optional& reach) {
    ConvPair<T> c;
    check_floats("x", x, {kAny, kAny, kAny});
    c.batch = x.size(0);
    c.length = length;
    c.past = x.size(1) - length;
    c.width = x.size(2);
    c.threads = torch::stable::get_num_threads();
    require(c.length >= 1 && c.past >= 0, "length must be between 1 and the number of positions of x");
    check_floats("weight1", weight1, {c.width, kAny});
    c.kernel = weight1.size(1);
    check_floats("weight2", weight2, {c.width, c.kernel});
    c.reach = inputs.integers("reach", reach, c.batch, c.length);
    c.x = inputs.source(x);
    c.weight[0] = inputs.source(weight1);
    c.weight[1] = inputs.source(weight2);
    return c;
}

// Return the dtype that decides the computation: float64 if x or the weights are float64.
ScalarType conv_dtype(const Tensor& x, const Tensor& weight) {
    return x.scalar_type() == ScalarType::Double ? ScalarType::Double : weight.scalar_type();
}

std::tuple<Tensor, Tensor> native_conv_pair(const Tensor& x, const Tensor& weight1, const Tensor& weight2,
                                            int64_t length, const Optional& reach) {
    return with_type(conv_dtype(x, weight1), [&](auto zero) -> std::tuple<Tensor, Tensor> {
        using T = decltype(zero);
        Inputs<T> inputs;
        const ConvPair<T> c = conv_pair(inputs, x, weight1, weight2, length, reach);
        const Tensor out1 = fresh<T>({c.batch, length, c.width}), out2 = fresh<T>({c.batch, length, c.width});
        conv_forward(c, data<T>(out1), data<T>(out2));
        return {stored(out1, x.scalar_type()), stored(out2, x.scalar_type())};
    });
}

std::tuple<Tensor, Tensor, Tensor> native_conv_pair_backward(const Tensor& grad1, const Tensor& grad2,
                                                             const Tensor& x, const Tensor& weight1,
                                                             const Tensor& weight2, int64_t length,
                                                             const Optional& reach) {
    return with_type(conv_dtype(x, weight1), [&](auto zero) -> std::tuple<Tensor, Tensor, Tensor> {
        using T = decltype(zero);
        Inputs<T> inputs;
        const ConvPair<T> c = conv_pair(inputs, x, weight1, weight2, length, reach);
        check_floats("grad1", grad1, {c.batch, c.length, c.width});
        check_floats("grad2", grad2, {c.batch, c.length, c.width});
        const Tensor grad_x = fresh<T>(shape(x));
        const Tensor grad_weight1 = fresh<T>(shape(weight1)), grad_weight2 = fresh<T>(shape(weight2));
        ConvGradients<T> grads;
        grads.out[0] = inputs.strided(grad1);
        grads.out[1] = inputs.strided(grad2);
        grads.x = data<T>(grad_x);
        grads.weight[0] = data<T>(grad_weight1);
        grads.weight[1] = data<T>(grad_weight2);
        conv_backward(c, grads);
        return {stored(grad_x, x.scalar_type()), stored(grad_weight1, weight1.scalar_type()),
                stored(grad_weight2, weight2.scalar_type())};
    });
}

}  // namespace
}  // namespace hypermlp

// ops/native.py calls this.
extern "C" int64_t hypermlp_backward_tasks(int64_t batch, int64_t heads, int64_t queries, int64_t keys) {
    return hypermlp::backward_tasks(batch, heads, queries, keys);
}

STABLE_TORCH_LIBRARY_IMPL(hypermlp, CPU, m) {
    m.impl("native", hypermlp::guarded<TORCH_BOX(&hypermlp::native)>);
    m.impl("native_grad", hypermlp::guarded<TORCH_BOX(&hypermlp::native_grad)>);
    m.impl("native_decoding_step", hypermlp::guarded<TORCH_BOX(&hypermlp::native_decoding_step)>);
    m.impl("native_conv_pair", hypermlp::guarded<TORCH_BOX(&hypermlp::native_conv_pair)>);
    m.impl("native_conv_pair_backward", hypermlp::guarded<TORCH_BOX(&hypermlp::native_conv_pair_backward)>);
    m.impl("native_project", hypermlp::guarded<TORCH_BOX(&hypermlp::native_project)>);
    m.impl("native_project_grad", hypermlp::guarded<TORCH_BOX(&hypermlp::native_project_grad)>);
    m.impl("native_read_out", hypermlp::guarded<TORCH_BOX(&hypermlp::native_read_out)>);
    m.impl("native_read_out_grad", hypermlp::guarded<TORCH_BOX(&hypermlp::native_read_out_grad)>);
}
