// Runs every kernel with 1, 2, 4 and 8 threads and requires the same bits each time. Prints "ok", or what
// differs and exits with 1. `make sanitize-threads` builds it with the thread sanitizer.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "layer.h"
#include "workers.h"

using hypermlp::Activation;
using hypermlp::Layout;
using hypermlp::Strided;
using Numbers = std::vector<float>;

Numbers random_numbers(int64_t count) {
    Numbers numbers(count);
    for (float& x : numbers) x = 2.0f * static_cast<float>(std::rand()) / static_cast<float>(RAND_MAX) - 1;
    return numbers;
}

// A tensor [batch, tokens, heads, width], contiguous.
struct Tensor {
    int64_t tokens, heads, width;
    Numbers numbers;

    Tensor(int64_t batch, int64_t tokens_, int64_t heads_, int64_t width_)
        : tokens(tokens_),
          heads(heads_),
          width(width_),
          numbers(random_numbers(batch * tokens * heads * width)) {}
    Strided<float> strided() { return {numbers.data(), tokens * heads * width, heads * width, width}; }
    Strided<const float> read_only() { return strided().read_only(); }
};

struct Shape {
    int64_t batch, heads, queries, keys, qk_dim, vo_dim, rank;
};

struct MixTensors {
    Numbers diag, left, right;
    Tensor gate;

    MixTensors(const Shape& s, int64_t heads)
        : diag(random_numbers(heads * s.keys)),
          left(random_numbers(heads * s.keys * s.rank)),
          right(random_numbers(heads * s.keys * s.rank)),
          gate(s.batch, s.queries, heads, s.rank) {}
    hypermlp::Mix<float> mix(const Shape& s) {
        const int64_t matrix = s.keys * s.rank;
        return {Strided<const float>{diag.data(), s.keys, 1},
                Strided<const float>{left.data(), matrix, s.rank},
                Strided<const float>{right.data(), matrix, s.rank},
                s.keys,
                s.rank,
                gate.read_only()};
    }
    hypermlp::MixGradients<float> gradients(const Shape& s) {
        const int64_t matrix = s.keys * s.rank;
        return {{diag.data(), s.keys, 1},
                {left.data(), matrix, s.rank},
                {right.data(), matrix, s.rank},
                gate.strided()};
    }
    void append(Numbers& all) const {
        for (const Numbers* numbers : {&diag, &left, &right, &gate.numbers})
            all.insert(all.end(), numbers->begin(), numbers->end());
    }
};

// The outputs and gradients of the operator.
Numbers attention(const Shape& s, Activation activation, Layout layout, const int64_t* starts,
                  int64_t threads) {
    std::srand(0);
    const int64_t branches = activation == Activation::kGlu ? 2 * s.heads : s.heads;
    Tensor q(s.batch, s.queries, branches, s.qk_dim), k(s.batch, s.keys, branches, s.qk_dim);
    Tensor v(s.batch, s.keys, s.heads, s.vo_dim), out(s.batch, s.queries, s.heads, s.vo_dim);
    MixTensors mix1(s, branches), mix2(s, s.heads);
    hypermlp::Problem<float> p;
    p.batch = s.batch;
    p.heads = s.heads;
    p.queries = s.queries;
    p.keys = s.keys;
    p.qk_dim = s.qk_dim;
    p.vo_dim = s.vo_dim;
    p.threads = threads;
    p.activation = activation;
    p.layout = layout;
    p.eps = 1e-12;
    p.starts = starts;
    p.q = q.read_only();
    p.k = k.read_only();
    p.v = v.read_only();
    p.mix1 = mix1.mix(s);
    p.mix2 = mix2.mix(s);
    Tensor kept(s.batch, s.queries, s.heads, hypermlp::kept_width(p));
    Numbers all;
    const auto keep = [&](const Numbers& numbers) { all.insert(all.end(), numbers.begin(), numbers.end()); };
    hypermlp::decode<float>(p, {out.strided(), kept.strided()});
    keep(out.numbers);
    hypermlp::forward<float>(p, {out.strided(), kept.strided(), true});
    keep(out.numbers);

    Tensor grad_out(s.batch, s.queries, s.heads, s.vo_dim), grad_q = q, grad_k = k, grad_v = v;
    MixTensors grad1 = mix1, grad2 = mix2;
    hypermlp::Gradients<float> grads;
    grads.q = grad_q.strided();
    grads.k = grad_k.strided();
    grads.v = grad_v.strided();
    grads.mix1 = grad1.gradients(s);
    grads.mix2 = grad2.gradients(s);
    hypermlp::backward<float>(p, {grad_out.read_only(), kept.read_only(), true}, grads);
    for (const Tensor* grad : {&grad_q, &grad_k, &grad_v}) keep(grad->numbers);
    grad1.append(all);
    grad2.append(all);
    return all;
}

// The outputs and gradients of the convolutions.
Numbers convolutions(int64_t batch, int64_t length, int64_t width, int64_t threads) {
    std::srand(0);
    constexpr int64_t kKernel = 4;
    Tensor x(batch, length, 1, width), out0 = x, out1 = x, grad = x;
    Numbers weights[2] = {random_numbers(width * kKernel), random_numbers(width * kKernel)}, all;
    hypermlp::Convolutions<float> c;
    c.batch = batch;
    c.length = length;
    c.width = width;
    c.kernel = kKernel;
    c.threads = threads;
    c.x = x.read_only();
    for (const Numbers& weight : weights)
        c.weights.push_back(Strided<const float>{weight.data(), kKernel, 1});
    hypermlp::conv_forward(c, {out0.numbers.data(), out1.numbers.data()});
    Numbers grad_weights[2] = {weights[0], weights[1]};
    hypermlp::ConvGradients<float> grads;
    grads.outs = {out0.read_only(), out1.read_only()};
    grads.x = grad.numbers.data();
    grads.weights = {grad_weights[0].data(), grad_weights[1].data()};
    hypermlp::conv_backward(c, grads);
    for (const Numbers* numbers :
         {&out0.numbers, &out1.numbers, &grad.numbers, &grad_weights[0], &grad_weights[1]})
        all.insert(all.end(), numbers->begin(), numbers->end());
    return all;
}

// The numbers of a tensor in another type.
template <typename S>
std::vector<S> stored(const Numbers& numbers) {
    std::vector<S> out(numbers.size());
    hypermlp::convert(numbers.data(), static_cast<int64_t>(numbers.size()), out.data());
    return out;
}

// The output and the caches of a decoding step of a layer that is stored as S, with registers and rotations.
template <typename S>
Numbers layer_step(const Shape& s, Activation activation, int64_t threads) {
    std::srand(0);
    constexpr int64_t kKernel = 4, kRegisters = 3, kRoom = 3;
    const int64_t branches = activation == Activation::kGlu ? 2 * s.heads : s.heads, hidden = 2 * s.vo_dim;
    const int64_t queries = std::min<int64_t>(s.queries, 2), room = s.keys + kRoom, width = 2 * s.qk_dim;
    const int64_t qk = branches * width, vo = s.heads * s.vo_dim, slots = s.keys + kRegisters;
    const int64_t gates = qk + vo + (branches + s.heads) * s.rank;
    const auto make = [](int64_t count) { return stored<S>(random_numbers(count)); };
    std::vector<S> keys = make(s.batch * room * qk), values = make(s.batch * room * vo);
    std::vector<S> history = make(s.batch * room * hidden), out = make(s.batch * queries * hidden);
    const std::vector<S> x = make(s.batch * queries * hidden), registers = make(kRegisters * hidden);
    const std::vector<S> k_conv = make(hidden * kKernel), v_conv = make(hidden * kKernel);
    const std::vector<S> q_weight = make(qk * hidden), k_weight = make(qk * hidden);
    const std::vector<S> v_weight = make(vo * hidden), o_weight = make(hidden * vo);
    const std::vector<S> gate_weight = make(gates * hidden), gate_bias = make(gates);
    const std::vector<S> diags = make((branches + s.heads) * slots);
    const std::vector<S> lefts = make((branches + s.heads) * slots * s.rank);
    const std::vector<S> rights = make((branches + s.heads) * slots * s.rank);
    const Numbers angles = random_numbers(s.batch * queries * (1 + kRegisters) * s.qk_dim);
    const auto mix = [&](int64_t first) {
        hypermlp::Mix<float> m;
        m.diag = Strided<const S>{diags.data() + first * slots, slots, 1};
        m.left = Strided<const S>{lefts.data() + first * slots * s.rank, slots * s.rank, s.rank};
        m.right = Strided<const S>{rights.data() + first * slots * s.rank, slots * s.rank, s.rank};
        m.slots = slots;
        m.rank = s.rank;
        return m;
    };
    hypermlp::Step<float, S> step;
    hypermlp::Problem<float>& p = step.problem;
    p.batch = s.batch;
    p.heads = s.heads;
    p.queries = queries;
    p.keys = s.keys;
    p.qk_dim = width;
    p.vo_dim = s.vo_dim;
    p.threads = threads;
    p.activation = activation;
    p.eps = 1e-12;
    p.mix1 = mix(0);
    p.mix2 = mix(branches);
    step.keys = {keys.data(), room * qk, qk, width};
    step.values = {values.data(), room * vo, vo, s.vo_dim};
    step.history = {history.data(), room * hidden, hidden};
    step.x = {x.data(), queries * hidden, hidden};
    step.hidden = hidden;
    step.out = out.data();
    step.past_inputs = s.keys - queries;
    step.kernel = kKernel;
    step.k_conv = k_conv.data();
    step.v_conv = v_conv.data();
    step.registers = registers.data();
    step.num_registers = kRegisters;
    step.cos = {angles.data(), queries * (1 + kRegisters) * s.qk_dim, (1 + kRegisters) * s.qk_dim, s.qk_dim};
    step.sin = step.cos;
    step.q_weight = q_weight.data();
    step.k_weight = k_weight.data();
    step.v_weight = v_weight.data();
    step.o_weight = o_weight.data();
    step.gate_weight = gate_weight.data();
    step.gate_bias = gate_bias.data();
    step.gate_width = gates;
    step.q_gate = 0;
    step.output_gate = qk;
    step.mix1_gate = qk + vo;
    step.mix2_gate = qk + vo + branches * s.rank;
    hypermlp::step(step);
    Numbers all;
    for (const std::vector<S>* numbers : {&out, &keys, &values, &history})
        for (const S number : *numbers) all.push_back(hypermlp::widen(number));
    return all;
}

// The outputs and gradients of the kernels around the operator, with gates of all kinds.
Numbers layer(int64_t batch, int64_t length, int64_t hidden, int64_t threads) {
    std::srand(0);
    constexpr int64_t kKernel = 4, kQueries = 5, kValues = 9, kMix1 = 4, kMix2 = 3;
    constexpr int64_t kGates = kQueries + kValues + kMix1 + kMix2;
    const int64_t rows = batch * length;
    Numbers x = random_numbers(rows * hidden), out = x, grad_x = x, bias = random_numbers(kGates), all;
    Numbers convs[2] = {random_numbers(hidden * kKernel), random_numbers(hidden * kKernel)};
    Numbers q_weight = random_numbers(kQueries * hidden), k_weight = random_numbers(kQueries * hidden),
            v_weight = random_numbers(kValues * hidden), gate_weight = random_numbers(kGates * hidden),
            o_weight = random_numbers(kValues * hidden);
    Numbers q = random_numbers(rows * kQueries), k = q, v = random_numbers(rows * kValues),
            gates = random_numbers(rows * kGates), grad_o = v, mix1 = random_numbers(rows * kMix1),
            mix2 = random_numbers(rows * kMix2);
    const auto keep = [&](const Numbers& numbers) { all.insert(all.end(), numbers.begin(), numbers.end()); };

    hypermlp::Projections<float> p;
    p.conv.batch = batch;
    p.conv.length = length;
    p.conv.width = hidden;
    p.conv.kernel = kKernel;
    p.conv.threads = threads;
    p.conv.x = Strided<const float>{x.data(), length * hidden, hidden, 0};
    for (const Numbers& conv : convs) p.conv.weights.push_back(Strided<const float>{conv.data(), kKernel, 1});
    p.q_width = kQueries;
    p.v_width = kValues;
    p.gate_width = kGates;
    p.q_gate = {0, kQueries};
    p.output_gate = {kQueries, kValues};
    p.mix1_gate = {kQueries + kValues, kMix1};
    p.mix2_gate = {kQueries + kValues + kMix1, kMix2};
    p.q_weight = q_weight.data();
    p.k_weight = k_weight.data();
    p.v_weight = v_weight.data();
    p.gate_weight = gate_weight.data();
    p.gate_bias = bias.data();
    hypermlp::project<float>(p, {q.data(), k.data(), v.data(), gates.data()});
    for (const Numbers* numbers : {&q, &k, &v, &gates}) keep(*numbers);

    hypermlp::Readout<float> r;
    r.rows = rows;
    r.hidden = hidden;
    r.width = kValues;
    r.gate_width = kGates;
    r.threads = threads;
    r.gate = p.output_gate;
    r.o = v.data();
    r.gates = gates.data();
    r.weight = o_weight.data();
    Numbers grad_o_weight = o_weight;
    hypermlp::read_out<float>(r, out.data());
    hypermlp::read_out_gradients<float>(r, x.data(), grad_o.data(), grad_o_weight.data());
    for (const Numbers* numbers : {&out, &grad_o, &grad_o_weight}) keep(*numbers);

    Numbers grad_q = q, grads[] = {convs[0], convs[1], q_weight, k_weight, v_weight, gate_weight, bias};
    const hypermlp::ProjectionInputs<float> in{q.data(),      gates.data(), v.data(),
                                               k.data(),      v.data(),     grad_q.data(),
                                               grad_o.data(), mix1.data(),  mix2.data()};
    hypermlp::project_gradients<float>(p, in,
                                       {grad_x.data(),
                                        {grads[0].data(), grads[1].data()},
                                        grads[2].data(),
                                        grads[3].data(),
                                        grads[4].data(),
                                        grads[5].data(),
                                        grads[6].data()});
    keep(grad_x);
    for (const Numbers& numbers : grads) keep(numbers);
    return all;
}

// Run with several numbers of threads and require the bits of one thread, all of them finite.
template <typename Run>
void check(const char* what, const Shape& s, const Run& run) {
    const Numbers expected = run(1);
    for (const int64_t threads : {2, 4, 8}) {
        const Numbers actual = run(threads);
        for (size_t i = 0; i < expected.size(); ++i)
            if (std::memcmp(&actual[i], &expected[i], sizeof(float)) != 0 || !std::isfinite(actual[i])) {
                std::printf("%s, %ld positions, %ld threads: number %zu is %.9g; with one thread %.9g\n",
                            what, static_cast<long>(s.keys), static_cast<long>(threads), i,
                            static_cast<double>(actual[i]), static_cast<double>(expected[i]));
                std::exit(1);
            }
    }
}

int main() {
    const Shape shapes[] = {{1, 1, 1, 1, 3, 5, 2},        {2, 2, 7, 9, 3, 5, 2},
                            {1, 1, 300, 300, 16, 24, 16}, {2, 2, 150, 170, 8, 33, 5},
                            {1, 2, 700, 700, 12, 40, 16}, {4, 1, 65, 65, 4, 8, 3}};
    for (const Shape& s : shapes) {
        std::vector<int64_t> documents;
        for (int64_t row = 0; row < s.batch * s.queries; ++row)
            documents.push_back((s.keys - s.queries + row % s.queries) / 50 * 50);
        for (const Activation activation : {Activation::kRelu, Activation::kGlu})
            for (const Layout layout : {Layout::kLag, Layout::kForward})
                for (const int64_t* starts :
                     {static_cast<const int64_t*>(nullptr), static_cast<const int64_t*>(documents.data())})
                    check("attention", s,
                          [&](int64_t threads) { return attention(s, activation, layout, starts, threads); });
        for (const Activation activation : {Activation::kRelu, Activation::kGlu}) {
            check("step", s, [&](int64_t threads) { return layer_step<float>(s, activation, threads); });
            check("step in bfloat16", s,
                  [&](int64_t threads) { return layer_step<hypermlp::BFloat16>(s, activation, threads); });
            check("step in float16", s,
                  [&](int64_t threads) { return layer_step<hypermlp::Float16>(s, activation, threads); });
        }
        check("convolution", s,
              [&](int64_t threads) { return convolutions(s.batch, s.keys, s.vo_dim, threads); });
        for (const int64_t batch : {s.batch, 513 / s.keys + 1})  // few positions, and more than 512
            check("layer", s, [&](int64_t threads) { return layer(batch, s.keys, s.vo_dim, threads); });
    }
    std::puts("ok");
}
