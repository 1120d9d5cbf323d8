// The kernels as PyTorch operators, on PyTorch's stable ABI, so that this file compiles in seconds. Python
// defines their schemas, fakes and derivatives. float16 and bfloat16 are read as they are stored and computed
// in float32. The operator of a gradient takes the gradients of the outputs and what the forward kept, each
// as a list, and then the arguments of the forward; it returns a gradient for each float tensor among these.
#include "attention_ops.h"
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

template <typename T>
Convolutions<T> convolutions(Inputs<T>& inputs, const Tensor& x, const Tensors& weights, int64_t length,
                             const Optional& reach) {
    Convolutions<T> c;
    check_floats("x", x, {kAny, kAny, kAny});
    c.batch = x.size(0);
    c.length = length;
    c.past = x.size(1) - length;
    c.width = x.size(2);
    c.threads = torch::stable::get_num_threads();
    require(c.length >= 1 && c.past >= 0, "length must be between 1 and the number of positions of x");
    c.kernel = kAny;
    for (const Tensor& weight : weights) {
        check_floats("weights", weight, {c.width, c.kernel});
        c.kernel = weight.size(1);
        c.weights.push_back(inputs.source(weight));
    }
    require(!weights.empty(), "weights must not be empty");
    c.reach = inputs.integers("reach", reach, c.batch, c.length);
    c.x = inputs.source(x);
    return c;
}

// Return the dtype that decides the computation: float64 if x or the weights are float64.
ScalarType conv_dtype(const Tensor& x, const Tensors& weights) {
    const bool is_double = x.scalar_type() == ScalarType::Double || weights.empty();
    return is_double ? ScalarType::Double : weights[0].scalar_type();
}

Tensors native_conv(const Tensor& x, const Tensors& weights, int64_t length, const Optional& reach) {
    return with_type(conv_dtype(x, weights), [&](auto zero) {
        using T = decltype(zero);
        Inputs<T> inputs;
        const Convolutions<T> c = convolutions(inputs, x, weights, length, reach);
        Tensors outs;
        std::vector<T*> memory;
        for (size_t which = 0; which < weights.size(); ++which)
            memory.push_back(data<T>(outs.emplace_back(fresh<T>({c.batch, length, c.width}))));
        conv_forward(c, memory);
        for (Tensor& out : outs) out = stored(out, x.scalar_type());
        return outs;
    });
}

Tensors native_conv_gradients(const Tensors& grads_of_outputs, const Tensors&, const Tensor& x,
                              const Tensors& weights, int64_t length, const Optional& reach) {
    require(grads_of_outputs.size() == weights.size(), "there must be one gradient for each weight");
    return with_type(conv_dtype(x, weights), [&](auto zero) {
        using T = decltype(zero);
        Inputs<T> inputs;
        const Convolutions<T> c = convolutions(inputs, x, weights, length, reach);
        GradientTensors<T> tensors;
        ConvGradients<T> grads;
        grads.x = data<T>(tensors.add(x));
        for (size_t which = 0; which < weights.size(); ++which) {
            check_floats("grads", grads_of_outputs[which], {c.batch, c.length, c.width});
            grads.outs.push_back(inputs.strided(grads_of_outputs[which]));
            grads.weights.push_back(data<T>(tensors.add(weights[which])));
        }
        conv_backward(c, grads);
        return tensors.stored();
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
    m.impl("native_gradients", hypermlp::guarded<TORCH_BOX(&hypermlp::native_gradients)>);
    m.impl("native_conv", hypermlp::guarded<TORCH_BOX(&hypermlp::native_conv)>);
    m.impl("native_conv_gradients", hypermlp::guarded<TORCH_BOX(&hypermlp::native_conv_gradients)>);
    m.impl("native_layer", hypermlp::guarded<TORCH_BOX(&hypermlp::native_layer)>);
    m.impl("native_layer_gradients", hypermlp::guarded<TORCH_BOX(&hypermlp::native_layer_gradients)>);
    m.impl("native_step", hypermlp::guarded<TORCH_BOX(&hypermlp::native_step)>);
}
