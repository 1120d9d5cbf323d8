// Keys and values in panels (gemm.h), packed once per call by all threads.
#pragma once

#include "gemm.h"
#include "kernels.h"
#include "parallel.h"
#include "scratch.h"

namespace hypermlp {

// Which dimension of a tensor [batch, tokens, heads, width] gives the rows of a packed matrix; the other one
// is cut into panels.
enum class PanelRows { kTokens, kWidth };

// One packed matrix for each (batch, head) of a tensor.
template <typename T>
struct Panels {
    int64_t heads, rows, columns;
    T* data;

    static size_t need(int64_t matrices, int64_t rows, int64_t columns) {
        return Arena::need<T>(matrices * rows * padded<T>(columns));
    }
    Panels(int64_t batch, int64_t heads_, int64_t rows_, int64_t columns_, Arena& arena)
        : heads(heads_),
          rows(rows_),
          columns(columns_),
          data(arena.take<T>(batch * heads * rows * padded<T>(columns))) {}
    int64_t step() const { return rows * kPanel<T>; }
    const T* of(int64_t batch, int64_t head) const {
        return data + (batch * heads + head) * rows * padded<T>(columns);
    }

    // Fill all matrices from x, and widen its numbers.
    void pack(const Source<T>& source, int64_t batch, PanelRows panel_rows, int64_t threads) const {
        const int64_t panels = in_panels<T>(columns);
        for_ranges(threads, batch * heads * panels, [&](int64_t i) {
            const int64_t matrix = i / panels, j = i % panels;
            source.visit([&](const auto& x) {
                const auto* from = x.at(matrix / heads, 0, matrix % heads);
                using S = std::remove_const_t<std::remove_reference_t<decltype(*from)>>;
                const View<S> view =
                    panel_rows == PanelRows::kWidth ? View<S>{from, 1, x.token} : View<S>{from, x.token, 1};
                pack_panel<T>(rows, columns, view, j * kPanel<T>, data + i * step());
            });
        });
    }
};

// Pack `count` tokens of one head, from token `first` on, into panels of the width.
template <typename T>
void pack_tokens(const Source<T>& source, int64_t batch, int64_t first, int64_t head, int64_t count,
                 int64_t width, T* panels) {
    source.visit([&](const auto& x) {
        const auto* from = x.at(batch, first, head);
        using S = std::remove_const_t<std::remove_reference_t<decltype(*from)>>;
        for (int64_t j = 0; j < width; j += kPanel<T>)
            pack_panel<T>(count, width, View<S>{from, x.token, 1}, j, panels + j * count);
    });
}

// Return `count` rows of one head, from token `first` on, as a matrix: x itself if it is stored in T, a copy
// in `room`, [count, width], otherwise.
template <typename T>
View<T> widened_rows(const Source<T>& x, int64_t batch, int64_t first, int64_t head, int64_t count,
                     int64_t width, T* room) {
    const Strided<const T> same = x.in_place();
    if (same.data) return {same.at(batch, first, head), same.token, 1};
    for (int64_t row = 0; row < count; ++row) x.read(batch, first + row, head, width, room + row * width);
    return {room, width, 1};
}

}  // namespace hypermlp
