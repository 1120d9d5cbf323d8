// The kernels' place in PyTorch: operators on its stable ABI, so that this compiles in seconds. Their schemas, fakes and
// derivatives are in ops/library.py, layers/common.py and layers/step.py. Half precision is stored, float32 is computed.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <list>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"

namespace hypermlp {

Meter meter;

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

constexpr int64_t kDecodeQueries = 4;  // up to so many queries are decoded one by one, without blocks

ScalarType computed(ScalarType stored) { return stored == ScalarType::Double ? ScalarType::Double : ScalarType::Float; }

// The arguments of one call: tensors in the computed dtype, kept alive.
struct Arguments {
    ScalarType dtype;
    std::list<Tensor> kept;

    const Tensor& cast(const Tensor& x) {
        kept.push_back(x.scalar_type() == dtype ? x : torch::stable::to(x, dtype));
        return kept.back();
    }
    const Tensor& contiguous(const Tensor& x) {
        const Tensor& y = cast(x);
        if (!y.is_contiguous()) kept.back() = torch::stable::contiguous(y);
        return kept.back();
    }
    // [batch, tokens, width] or [batch, tokens, heads, width]: itself, if the last dimension is dense.
    Strided strided(const Tensor& x) {
        const Tensor& y = cast(x);
        if (y.stride(y.dim() - 1) != 1) kept.back() = torch::stable::contiguous(y);
        const Tensor& z = kept.back();
        return {z.data_ptr(), z.stride(0), z.stride(1), z.dim() == 4 ? z.stride(2) : 0};
    }
};

// A new tensor, without a look-up of the operator that makes one: a step of decoding makes three.
Tensor fresh(const std::vector<int64_t>& shape, ScalarType dtype) {
    std::vector<int64_t> strides(shape.size(), 1);
    for (size_t i = shape.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * shape[i];
    const int32_t kind = dtype == ScalarType::Double ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
    AtenTensorHandle handle;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(), kind,
                                                           aoti_torch_device_type_cpu(), 0, &handle));
    return Tensor(handle);
}

std::vector<int64_t> shape(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }

Tensor stored(const Tensor& x, ScalarType dtype) { return x.scalar_type() == dtype ? x : torch::stable::to(x, dtype); }

Mix mix(Arguments& arguments, const Optional& diag, const Optional& left, const Optional& right, const Optional& gate) {
    Mix m{};
    if (!diag) return m;
    m.diag = arguments.contiguous(*diag).data_ptr();
    m.left = arguments.contiguous(*left).data_ptr();
    m.right = arguments.contiguous(*right).data_ptr();
    if (gate) m.gate = arguments.strided(*gate);
    m.slots = left->size(1);
    m.rank = left->size(2);
    return m;
}

void describe(Problem& p, Arguments& arguments, const Tensor& q, const Tensor& v, const Optional& starts, const std::string& activation,
              const std::string& layout, double eps) {
    p.batch = q.size(0);
    p.queries = q.size(1);
    p.keys = v.size(1);
    p.heads = v.size(2);
    p.vo_dim = v.size(3);
    p.threads = torch::stable::get_num_threads();
    p.glu = activation == "glu";
    p.lag = layout == "lag";
    p.eps = eps;
    if (starts) {
        arguments.kept.push_back(torch::stable::contiguous(*starts));
        p.starts = static_cast<const int64_t*>(arguments.kept.back().data_ptr());
    }
}

Problem problem(Arguments& arguments, const Tensor& q, const Tensor& k, const Tensor& v, const Optional& starts, const std::string& activation,
                const std::string& layout, double eps) {
    Problem p{};
    describe(p, arguments, q, v, starts, activation, layout, eps);
    p.qk_dim = q.size(3);
    p.q = arguments.strided(q);
    p.k = arguments.strided(k);
    p.v = arguments.strided(v);
    return p;
}

std::tuple<Tensor, Tensor> native(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& diag1, const Optional& left1,
                                  const Optional& right1, const Optional& gate1, const Optional& diag2, const Optional& left2,
                                  const Optional& right2, const Optional& gate2, const Optional& starts, const std::string& activation,
                                  const std::string& layout, double eps) {
    Arguments arguments{computed(q.scalar_type()), {}};
    Problem p = problem(arguments, q, k, v, starts, activation, layout, eps);
    p.mix1 = mix(arguments, diag1, left1, right1, gate1);
    p.mix2 = mix(arguments, diag2, left2, right2, gate2);
    const Tensor out = fresh({p.batch, p.queries, p.heads, p.vo_dim}, arguments.dtype);
    const Tensor inverse_norm = fresh({p.heads * p.batch, p.queries, 1}, arguments.dtype);
    p.out = arguments.strided(out);
    p.inverse_norm = inverse_norm.data_ptr();
    const bool few = p.queries <= kDecodeQueries;
    if (arguments.dtype == ScalarType::Double)
        (few ? decode<double> : forward<double>)(p);
    else
        (few ? decode<float> : forward<float>)(p);
    return {stored(out, q.scalar_type()), inverse_norm};
}

std::vector<Tensor> native_backward(const Tensor& grad_out, const Tensor& inverse_norm, const Tensor& q, const Tensor& k, const Tensor& v, const Optional& diag1,
                                    const Optional& left1, const Optional& right1, const Optional& gate1, const Optional& diag2,
                                    const Optional& left2, const Optional& right2, const Optional& gate2, const Optional& starts, const std::string& activation, const std::string& layout, double eps) {
    Arguments arguments{computed(q.scalar_type()), {}};
    Problem p = problem(arguments, q, k, v, starts, activation, layout, eps);
    p.mix1 = mix(arguments, diag1, left1, right1, gate1);
    p.mix2 = mix(arguments, diag2, left2, right2, gate2);
    p.grad_out = arguments.strided(grad_out);
    p.inverse_norm = arguments.contiguous(inverse_norm).data_ptr();
    std::vector<Tensor> grads;
    const auto grad = [&](const Tensor& x) {
        grads.push_back(fresh(shape(x), arguments.dtype));
        return grads.back();
    };
    p.grad_q = arguments.strided(grad(q));
    p.grad_k = arguments.strided(grad(k));
    p.grad_v = arguments.strided(grad(v));
    std::vector<ScalarType> dtypes{q.scalar_type(), k.scalar_type(), v.scalar_type()};
    const auto mix_grads = [&](Mix& m, const Optional& diag, const Optional& left, const Optional& right, const Optional& gate) {
        if (!diag) return;
        m.grad_diag = grad(*diag).data_ptr();
        m.grad_left = grad(*left).data_ptr();
        m.grad_right = grad(*right).data_ptr();
        m.grad_gate = arguments.strided(grad(*gate));
        for (const Optional* x : {&diag, &left, &right, &gate}) dtypes.push_back((*x)->scalar_type());
    };
    mix_grads(p.mix1, diag1, left1, right1, gate1);
    mix_grads(p.mix2, diag2, left2, right2, gate2);
    arguments.dtype == ScalarType::Double ? backward<double>(p) : backward<float>(p);
    for (size_t i = 0; i < grads.size(); ++i) grads[i] = stored(grads[i], dtypes[i]);
    return grads;
}

// Caches are written in place, so they must be what the kernels compute with, and so must all that meets them.
void require_one_kind(const Tensor& cache, std::initializer_list<const Tensor*> others) {
    STD_TORCH_CHECK(cache.scalar_type() == computed(cache.scalar_type()), "hypermlp: caches must be float32 or float64");
    STD_TORCH_CHECK(cache.stride(cache.dim() - 1) == 1, "hypermlp: the last dimension of a cache must be dense");
    for (const Tensor* x : others) STD_TORCH_CHECK(x->scalar_type() == cache.scalar_type(), "hypermlp: all tensors of a step must have one dtype");
}

// x: [batch, queries, hidden]. history, keys, values: the caches, [batch, room, ...], of which past_inputs and past are full.
Tensor native_step(const Tensor& x, const Optional& history, int64_t past_inputs, const Optional& k_conv, const Optional& v_conv, const Tensor& q_weight,
                   const Tensor& k_weight, const Tensor& v_weight, const Tensor& o_weight, const Optional& gate_weight, const Optional& gate_bias,
                   const Tensor& keys, const Tensor& values, int64_t past, const Optional& diag1, const Optional& left1, const Optional& right1,
                   const Optional& diag2, const Optional& left2, const Optional& right2, const Optional& starts, const Optional& reach,
                   const std::string& activation, const std::string& layout, double eps) {
    require_one_kind(keys, {&x, &q_weight, &k_weight, &v_weight, &o_weight});
    require_one_kind(values, {&keys});
    Arguments arguments{x.scalar_type(), {}};
    Step s{};
    Problem& p = s.problem;
    describe(p, arguments, x, values, starts, activation, layout, eps);
    p.keys = past + p.queries;
    p.qk_dim = keys.size(3);
    p.k = arguments.strided(keys);
    p.v = arguments.strided(values);
    p.mix1 = mix(arguments, diag1, left1, right1, std::nullopt);
    p.mix2 = mix(arguments, diag2, left2, right2, std::nullopt);
    s.hidden = x.size(2);
    s.x = arguments.strided(x);
    if (history) {
        require_one_kind(*history, {&*k_conv, &*v_conv});
        s.history = arguments.strided(*history);
        s.past_inputs = past_inputs;
        s.kernel = k_conv->size(1);
        s.k_conv = arguments.contiguous(*k_conv).data_ptr();
        s.v_conv = arguments.contiguous(*v_conv).data_ptr();
    }
    if (reach) {
        arguments.kept.push_back(torch::stable::contiguous(*reach));
        s.reach = static_cast<const int64_t*>(arguments.kept.back().data_ptr());
    }
    s.q_weight = arguments.contiguous(q_weight).data_ptr();
    s.k_weight = arguments.contiguous(k_weight).data_ptr();
    s.v_weight = arguments.contiguous(v_weight).data_ptr();
    s.o_weight = arguments.contiguous(o_weight).data_ptr();
    if (gate_weight) {
        s.gate_weight = arguments.contiguous(*gate_weight).data_ptr();
        s.gate_bias = gate_bias ? arguments.contiguous(*gate_bias).data_ptr() : nullptr;
        s.gate_width = gate_weight->size(0);
        s.feature_gates = s.gate_width > p.branches() * p.mix1.rank + p.heads * p.mix2.rank;
    }
    const Tensor out = fresh(shape(x), arguments.dtype);
    s.out = out.data_ptr();
    arguments.dtype == ScalarType::Double ? step<double>(s) : step<float>(s);
    return out;
}

Conv conv(Arguments& arguments, const Tensor& x, const Tensor& weight1, const Tensor& weight2, int64_t length, const Optional& reach) {
    Conv c{};
    c.batch = x.size(0);
    c.length = length;
    c.past = x.size(1) - length;
    c.width = x.size(2);
    c.kernel = weight1.size(1);
    c.threads = torch::stable::get_num_threads();
    c.x = arguments.strided(x);
    c.weight[0] = arguments.contiguous(weight1).data_ptr();
    c.weight[1] = arguments.contiguous(weight2).data_ptr();
    if (reach) {
        arguments.kept.push_back(torch::stable::contiguous(*reach));
        c.reach = static_cast<const int64_t*>(arguments.kept.back().data_ptr());
    }
    return c;
}

// float32, unless the input or the weights are float64.
ScalarType conv_dtype(const Tensor& x, const Tensor& weight) {
    return x.scalar_type() == ScalarType::Double ? ScalarType::Double : computed(weight.scalar_type());
}

std::tuple<Tensor, Tensor> native_conv_pair(const Tensor& x, const Tensor& weight1, const Tensor& weight2, int64_t length, const Optional& reach) {
    Arguments arguments{conv_dtype(x, weight1), {}};
    Conv c = conv(arguments, x, weight1, weight2, length, reach);
    const std::vector<int64_t> size{c.batch, length, c.width};
    const Tensor out1 = fresh(size, arguments.dtype), out2 = fresh(size, arguments.dtype);
    c.out[0] = out1.data_ptr();
    c.out[1] = out2.data_ptr();
    arguments.dtype == ScalarType::Double ? conv_forward<double>(c) : conv_forward<float>(c);
    return {stored(out1, x.scalar_type()), stored(out2, x.scalar_type())};
}

std::tuple<Tensor, Tensor, Tensor> native_conv_pair_backward(const Tensor& grad1, const Tensor& grad2, const Tensor& x, const Tensor& weight1,
                                                             const Tensor& weight2, int64_t length, const Optional& reach) {
    Arguments arguments{conv_dtype(x, weight1), {}};
    Conv c = conv(arguments, x, weight1, weight2, length, reach);
    c.grad_out[0] = arguments.strided(grad1);
    c.grad_out[1] = arguments.strided(grad2);
    const Tensor grad_x = fresh(shape(x), arguments.dtype);
    const Tensor grad_weight1 = fresh(shape(weight1), arguments.dtype);
    const Tensor grad_weight2 = fresh(shape(weight2), arguments.dtype);
    c.grad_x = grad_x.data_ptr();
    c.grad_weight[0] = grad_weight1.data_ptr();
    c.grad_weight[1] = grad_weight2.data_ptr();
    arguments.dtype == ScalarType::Double ? conv_backward<double>(c) : conv_backward<float>(c);
    return {stored(grad_x, x.scalar_type()), stored(grad_weight1, weight1.scalar_type()), stored(grad_weight2, weight2.scalar_type())};
}

}  // namespace
}  // namespace hypermlp

// The most bytes of scratch held since the last call.
extern "C" int64_t hypermlp_scratch_peak() {
    const int64_t peak = hypermlp::meter.peak;
    hypermlp::meter.reset();
    return peak;
}

STABLE_TORCH_LIBRARY_IMPL(hypermlp, CPU, m) {
    m.impl("native", TORCH_BOX(&hypermlp::native));
    m.impl("native_backward", TORCH_BOX(&hypermlp::native_backward));
    m.impl("native_step", TORCH_BOX(&hypermlp::native_step));
    m.impl("native_conv_pair", TORCH_BOX(&hypermlp::native_conv_pair));
    m.impl("native_conv_pair_backward", TORCH_BOX(&hypermlp::native_conv_pair_backward));
}
