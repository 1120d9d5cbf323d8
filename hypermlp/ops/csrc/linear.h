// How all threads share the products of activations [N, inputs] with weights [outputs, inputs]: by row blocks
// of the activations, or, if these are few, by panels of the weights. The gradients of the weights are shared
// by parts of a weight.
#pragma once

#include <vector>

#include "gemm.h"
#include "parallel.h"
#include "scratch.h"

namespace hypermlp {

// N rows in blocks of whole tiles. The blocks depend on N alone; sums over blocks are added in order.
struct RowBlocks {
    int64_t rows, tiles, count;

    explicit RowBlocks(int64_t rows_) : rows(rows_), tiles((rows + kTile - 1) / kTile) {
        const int64_t least = (rows + kRows - 1) / kRows, most = (rows + kFewRows - 1) / kFewRows;
        count = std::min((std::max(least, std::min<int64_t>(most, 16)) + 3) / 4 * 4, tiles);
    }
    int64_t begin(int64_t block) const { return std::min(rows, tiles * block / count * kTile); }
    // The rows of the largest block.
    int64_t most() const { return std::min(rows, (tiles + count - 1) / count * kTile); }

  private:
    static constexpr int64_t kFewRows = 72;
};

constexpr int64_t kPanelDepth = 256;  // rows of a panel that are packed at a time

// The room for `panel` of multiply_panel().
template <typename T>
constexpr int64_t kPanelRoom = kPanelDepth* kPanel<T>;

// Buffers of `count` elements, one for each worker.
template <typename T>
std::vector<T*> for_workers(Arena& arena, int64_t workers, int64_t count) {
    std::vector<T*> found;
    for (int64_t worker = 0; worker < workers; ++worker) found.push_back(arena.take<T>(count));
    return found;
}

// c[rows, columns] from a[rows, depth] and one panel of columns, packed piece by piece: fill(k, count, panel)
// writes its rows [k, k + count).
template <typename T, Into into = Into::kNew, typename Fill>
void multiply_panel(int64_t rows, int64_t columns, int64_t depth, View<T> a, const Fill& fill, T* panel, T* c,
                    int64_t ldc) {
    for (int64_t k = 0; k < depth; k += kPanelDepth) {
        const int64_t count = std::min(kPanelDepth, depth - k);
        const View<T> part{a.data + k * a.column, a.row, a.column};
        fill(k, count, panel);
        if (k == 0)
            multiply<T, into>(rows, columns, count, part, panel, 0, c, ldc);
        else
            multiply<T, Into::kAdd>(rows, columns, count, part, panel, 0, c, ldc);
    }
}

// Whether rows of activations are few: panel after panel of the weights is then packed in the L1 cache of the
// worker that uses it for all rows. With more rows it pays to pack the weights once for all threads
// (weights.h), and to finish a block of rows while it is in the cache.
inline bool are_few(int64_t rows) { return rows <= 512; }

// c[rows, columns], the sum over terms of a[rows, depth] times a matrix [depth, columns] read in place.
template <typename T>
struct Product {
    struct Term {
        const T* a;
        int64_t depth;
        View<T> right;
    };
    T* c;
    int64_t columns;
    std::vector<Term> terms;
};

// Compute products of few rows. A task is a panel of columns of one product.
template <typename T>
void multiply_few_rows(int64_t rows, const std::vector<Product<T>>& products, int64_t threads,
                       const std::vector<T*>& panels) {
    std::vector<std::pair<const Product<T>*, int64_t>> tasks;
    for (const Product<T>& product : products)
        for (int64_t j = 0; j < product.columns; j += kPanel<T>) tasks.emplace_back(&product, j);
    for_each(threads, static_cast<int64_t>(tasks.size()), [&](int64_t i, int64_t worker) {
        const Product<T>& product = *tasks[i].first;
        const int64_t j = tasks[i].second, count = std::min(product.columns - j, kPanel<T>);
        for (const auto& term : product.terms) {
            const View<T>& right = term.right;
            const View<T> a{term.a, term.depth, 1};
            const auto fill = [&](int64_t k, int64_t depth, T* panel) {
                const View<T> part{right.data + k * right.row, right.row, right.column};
                pack_panel<T>(depth, product.columns, part, j, panel);
            };
            T* panel = panels[worker];
            if (&term == product.terms.data())
                multiply_panel<T>(rows, count, term.depth, a, fill, panel, product.c + j, product.columns);
            else
                multiply_panel<T, Into::kAdd>(rows, count, term.depth, a, fill, panel, product.c + j,
                                              product.columns);
        }
    });
}

// The gradient of a weight, to[outputs, inputs] = grad[N, outputs]^T input[N, inputs], as tasks for several
// threads. A task computes a panel of columns for some of the rows.
template <typename T>
struct WeightTask {
    const T* grad;
    int64_t outputs, first, rows;  // of which it computes `rows` from `first` on
    int64_t inputs, column;
    int64_t input;  // which input, as `fill` knows it
    T* to;
};

template <typename T>
void add_weight_tasks(std::vector<WeightTask<T>>& tasks, const T* grad, int64_t outputs, int64_t input,
                      int64_t inputs, T* to) {
    constexpr int64_t kMost = 264;  // rows of a task, a multiple of kTile
    const int64_t parts = (outputs + kMost - 1) / kMost, tiles = (outputs + kTile - 1) / kTile;
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t first = tiles * part / parts * kTile;
        const int64_t last = std::min(tiles * (part + 1) / parts * kTile, outputs);
        for (int64_t j = 0; j < inputs; j += kPanel<T>)
            tasks.push_back({grad, outputs, first, last - first, inputs, j, input, to});
    }
}

// Run all tasks, those with most rows first. fill(input, column, count, k, depth, panel) writes `count`
// columns of an input, from `column` on, for its rows [k, k + depth), into a panel.
template <typename T, typename Fill>
void run_weight_tasks(std::vector<WeightTask<T>>& tasks, int64_t n, int64_t threads, const Fill& fill,
                      const std::vector<T*>& panels) {
    std::stable_sort(tasks.begin(), tasks.end(),
                     [](const WeightTask<T>& a, const WeightTask<T>& b) { return a.rows > b.rows; });
    for_each(threads, static_cast<int64_t>(tasks.size()), [&](int64_t i, int64_t worker) {
        const WeightTask<T>& task = tasks[i];
        const int64_t columns = std::min(task.inputs - task.column, kPanel<T>);
        multiply_panel<T>(
            task.rows, columns, n, {task.grad + task.first, 1, task.outputs},
            [&](int64_t k, int64_t depth, T* panel) {
                fill(task.input, task.column, columns, k, depth, panel);
            },
            panels[worker], task.to + task.first * task.inputs + task.column, task.inputs);
    });
}

}  // namespace hypermlp
