// Drives the kernels without PyTorch and compares them with plain loops. Prints "ok", or what is wrong and
// exits with 1. Outputs are compared with the definition, gradients with its central differences.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels.h"
#include "workers.h"

using hypermlp::Activation;
using hypermlp::Layout;
using hypermlp::Strided;
using Numbers = std::vector<double>;

constexpr int64_t kBatch = 2, kHeads = 2, kQueries = 7, kKeys = 9, kWidth = 3, kOut = 5, kRank = 2,
                  kSlots = 10;
constexpr double kEps = 1e-6;

// The tensors of one problem, contiguous, in the order of the public operator.
struct Data {
    enum Name { kQ, kK, kV, kDiag1, kLeft1, kRight1, kGate1, kDiag2, kLeft2, kRight2, kGate2, kCount };
    Numbers all[kCount];
    int64_t branches;

    explicit Data(int64_t branches_) : branches(branches_) {
        const int64_t heads[] = {branches, kHeads};
        all[kQ].resize(kBatch * kQueries * branches * kWidth);
        all[kK].resize(kBatch * kKeys * branches * kWidth);
        all[kV].resize(kBatch * kKeys * kHeads * kOut);
        for (int i = 0; i < 2; ++i) {
            const int first = i == 0 ? kDiag1 : kDiag2;
            all[first].resize(heads[i] * kSlots);
            all[first + 1].resize(heads[i] * kSlots * kRank);
            all[first + 2].resize(heads[i] * kSlots * kRank);
            all[first + 3].resize(kBatch * kQueries * heads[i] * kRank);
        }
        std::srand(0);
        for (Numbers& numbers : all)
            for (double& x : numbers) x = 2.0 * std::rand() / RAND_MAX - 1;
    }
};

// One head at one query: y <- y R, or y R^T.
void mix(Numbers& y, const Data& data, int first, int64_t head, int64_t heads, int64_t row, bool transpose) {
    const double* diag = &data.all[first][head * kSlots];
    const double* left = &data.all[first + (transpose ? 2 : 1)][head * kSlots * kRank];
    const double* right = &data.all[first + (transpose ? 1 : 2)][head * kSlots * kRank];
    const double* gate = &data.all[first + 3][(row * heads + head) * kRank];
    const Numbers before = y;
    for (size_t slot = 0; slot < y.size(); ++slot) {
        y[slot] += before[slot] * diag[slot];
        for (int64_t r = 0; r < kRank; ++r)
            for (size_t from = 0; from < y.size(); ++from)
                y[slot] += before[from] * left[from * kRank + r] * gate[r] * right[slot * kRank + r];
    }
}

// The definition of the operator, [batch, queries, heads, width].
Numbers define(const Data& data, Activation activation, Layout layout, const int64_t* starts) {
    Numbers out(kBatch * kQueries * kHeads * kOut, 0.0);
    for (int64_t row = 0; row < kBatch * kQueries; ++row)
        for (int64_t head = 0; head < kHeads; ++head) {
            const int64_t batch = row / kQueries, position = kKeys - kQueries + row % kQueries;
            const int64_t start = starts ? starts[row] : 0, count = position + 1 - start;
            const auto key = [&](int64_t slot) {
                return layout == Layout::kLag ? position - slot : start + slot;
            };
            Numbers scores[2];
            for (int64_t g = head, branch = 0; g < data.branches; g += kHeads, ++branch) {
                for (int64_t slot = 0; slot < count; ++slot) {
                    double sum = 0;
                    for (int64_t d = 0; d < kWidth; ++d)
                        sum += data.all[Data::kQ][(row * data.branches + g) * kWidth + d] *
                               data.all[Data::kK]
                                       [((batch * kKeys + key(slot)) * data.branches + g) * kWidth + d];
                    scores[branch].push_back(sum);
                }
                mix(scores[branch], data, Data::kDiag1, g, data.branches, row, false);
            }
            double squares = kEps;
            for (const double h : scores[0]) squares += h * h;
            for (int64_t slot = 0; slot < count; ++slot) {
                const double scale =
                    activation == Activation::kGlu ? std::log1p(std::exp(scores[1][slot])) : 1;
                scores[0][slot] = scale * std::fmax(scores[0][slot], 0) / std::sqrt(squares);
            }
            mix(scores[0], data, Data::kDiag2, head, kHeads, row, true);
            for (int64_t slot = 0; slot < count; ++slot)
                for (int64_t d = 0; d < kOut; ++d)
                    out[(row * kHeads + head) * kOut + d] +=
                        scores[0][slot] *
                        data.all[Data::kV][((batch * kKeys + key(slot)) * kHeads + head) * kOut + d];
        }
    return out;
}

template <typename T>
Strided<T> strided(T* data, int64_t tokens, int64_t heads, int64_t width) {
    return {data, tokens * heads * width, heads * width, width};
}

template <typename T>
hypermlp::Problem<T> problem(const std::vector<T> (&all)[Data::kCount], Activation activation, Layout layout,
                             const int64_t* starts) {
    hypermlp::Problem<T> p;
    p.batch = kBatch;
    p.heads = kHeads;
    p.queries = kQueries;
    p.keys = kKeys;
    p.qk_dim = kWidth;
    p.vo_dim = kOut;
    p.threads = 2;
    p.activation = activation;
    p.layout = layout;
    p.eps = kEps;
    p.starts = starts;
    p.q = strided(all[Data::kQ].data(), kQueries, p.branches(), kWidth);
    p.k = strided(all[Data::kK].data(), kKeys, p.branches(), kWidth);
    p.v = strided(all[Data::kV].data(), kKeys, kHeads, kOut);
    p.mix1 = {strided(all[Data::kDiag1].data(), kSlots, 1, 1),
              strided(all[Data::kLeft1].data(), kSlots, 1, kRank),
              strided(all[Data::kRight1].data(), kSlots, 1, kRank),
              kSlots,
              kRank,
              strided(all[Data::kGate1].data(), kQueries, p.branches(), kRank)};
    p.mix2 = {strided(all[Data::kDiag2].data(), kSlots, 1, 1),
              strided(all[Data::kLeft2].data(), kSlots, 1, kRank),
              strided(all[Data::kRight2].data(), kSlots, 1, kRank),
              kSlots,
              kRank,
              strided(all[Data::kGate2].data(), kQueries, kHeads, kRank)};
    return p;
}

template <typename T>
void compare(const char* what, const std::vector<T>& actual, const Numbers& expected, double tolerance) {
    for (size_t i = 0; i < expected.size(); ++i)
        if (!(std::fabs(actual[i] - expected[i]) <= tolerance * (1 + std::fabs(expected[i])))) {
            std::printf("%s: element %zu is %.12g; it should be %.12g\n", what, i, double(actual[i]),
                        expected[i]);
            std::exit(1);
        }
}

// Compare forward and decode in T; return 1 / rho.
template <typename T>
std::vector<T> check_outputs(const Data& data, Activation activation, Layout layout, const int64_t* starts,
                             double tolerance) {
    std::vector<T> all[Data::kCount];
    for (int i = 0; i < Data::kCount; ++i) all[i].assign(data.all[i].begin(), data.all[i].end());
    const hypermlp::Problem<T> p = problem(all, activation, layout, starts);
    const Numbers expected = define(data, activation, layout, starts);
    std::vector<T> out(expected.size()), decoded(expected.size()), inverse_norm(kHeads * kBatch * kQueries);
    const Strided<T> kept = strided(inverse_norm.data(), kQueries, kHeads, 1);
    hypermlp::decode<T>(p, {strided(decoded.data(), kQueries, kHeads, kOut), kept});
    hypermlp::forward<T>(p, {strided(out.data(), kQueries, kHeads, kOut), kept});
    compare("decode", decoded, expected, tolerance);
    compare("forward", out, expected, tolerance);
    return inverse_norm;
}

// Compare the gradients of <out, grad_out> with central differences.
void check_gradients(Data data, Activation activation, Layout layout, const int64_t* starts,
                     const Numbers& inverse_norm) {
    const hypermlp::Problem<double> p = problem(data.all, activation, layout, starts);
    Numbers grad_out(kBatch * kQueries * kHeads * kOut);
    for (size_t i = 0; i < grad_out.size(); ++i) grad_out[i] = std::sin(double(i));
    Numbers grads[Data::kCount];
    for (int i = 0; i < Data::kCount; ++i) grads[i].assign(data.all[i].size(), NAN);
    hypermlp::Gradients<double> g;
    g.q = strided(grads[Data::kQ].data(), kQueries, data.branches, kWidth);
    g.k = strided(grads[Data::kK].data(), kKeys, data.branches, kWidth);
    g.v = strided(grads[Data::kV].data(), kKeys, kHeads, kOut);
    const auto by_slots = [&](int index, int64_t width) {
        return Strided<double>{grads[index].data(), kSlots * width, width};
    };
    g.mix1 = {by_slots(Data::kDiag1, 1), by_slots(Data::kLeft1, kRank), by_slots(Data::kRight1, kRank),
              strided(grads[Data::kGate1].data(), kQueries, data.branches, kRank)};
    g.mix2 = {by_slots(Data::kDiag2, 1), by_slots(Data::kLeft2, kRank), by_slots(Data::kRight2, kRank),
              strided(grads[Data::kGate2].data(), kQueries, kHeads, kRank)};
    const double* rows = grad_out.data();
    hypermlp::backward<double>(
        p, {strided(rows, kQueries, kHeads, kOut), strided(inverse_norm.data(), kQueries, kHeads, 1)}, g);

    const auto loss = [&] {
        const Numbers out = define(data, activation, layout, starts);
        double sum = 0;
        for (size_t i = 0; i < out.size(); ++i) sum += out[i] * grad_out[i];
        return sum;
    };
    constexpr double kDelta = 1e-6;
    for (int i = 0; i < Data::kCount; ++i) {
        Numbers expected;
        for (double& x : data.all[i]) {
            const double before = x;
            x = before + kDelta;
            const double above = loss();
            x = before - kDelta;
            expected.push_back((above - loss()) / (2 * kDelta));
            x = before;
        }
        compare("backward", grads[i], expected, 1e-6);
    }
}

int main() {
    std::vector<int64_t> documents;  // each query sees at most three positions, in groups with one start
    for (int64_t row = 0; row < kBatch * kQueries; ++row)
        documents.push_back((kKeys - kQueries + row % kQueries) / 3 * 3);
    for (const Activation activation : {Activation::kRelu, Activation::kGlu})
        for (const Layout layout : {Layout::kLag, Layout::kForward})
            for (const int64_t* starts :
                 {static_cast<const int64_t*>(nullptr), static_cast<const int64_t*>(documents.data())}) {
                const Data data(activation == Activation::kGlu ? 2 * kHeads : kHeads);
                check_outputs<float>(data, activation, layout, starts, 1e-4);
                const Numbers inverse_norm = check_outputs<double>(data, activation, layout, starts, 1e-12);
                check_gradients(data, activation, layout, starts, inverse_norm);
            }
    std::puts("ok");
}
