// Keys and values in panels, packed once per call by all threads.
#pragma once

#include "mix.h"

namespace hypermlp {

// One matrix per (batch, head) of a tensor [batch, tokens, heads, width]: either tokens are the rows and the width is cut
// into panels, or, transposed, the width gives the rows and the tokens are cut.
template <typename T>
struct Panels {
    int64_t heads, rows, columns;
    T* data;

    static size_t need(int64_t matrices, int64_t rows, int64_t columns) { return Scratch::need<T>(matrices * rows * padded<T>(columns)); }
    Panels(int64_t batch, int64_t heads_, int64_t rows_, int64_t columns_, Scratch& scratch)
        : heads(heads_), rows(rows_), columns(columns_), data(scratch.take<T>(batch * heads * rows * padded<T>(columns))) {}
    int64_t step() const { return rows * kPanel<T>; }
    const T* of(int64_t batch, int64_t head) const { return data + (batch * heads + head) * rows * padded<T>(columns); }

    // Called by every thread of a parallel region.
    void pack(const Strided& x, int64_t batch, bool transpose) const {
        const int64_t panels = in_panels<T>(columns);
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < batch * heads * panels; ++i) {
            const int64_t matrix = i / panels, j = i % panels;
            const T* from = x.at<const T>(matrix / heads, 0, matrix % heads);
            const View<T> view = transpose ? View<T>{from, 1, x.token} : View<T>{from, x.token, 1};
            pack_panel<T>(rows, columns, view, j * kPanel<T>, data + i * step());
        }
    }
};

}  // namespace hypermlp
