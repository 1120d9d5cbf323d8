// One block of score rows of one head, in a buffer that is at once in ordinary order and aligned by slot.
// hypermlp/ops/block.py has the picture; this is its twin for one batch item and one head.
#pragma once

#include "common.h"

namespace hypermlp {

struct Block {
    int64_t rows, columns;      // queries; keys that any of them may see
    int64_t first_query, first_key;
    int64_t ordinary_offset, aligned_offset, aligned_ld;
    const int64_t* starts;      // of these queries, or null
    int64_t first_position;
    bool lag;

    Block(const Problem& p, int64_t batch, int64_t first, int64_t last) {
        rows = last - first;
        first_query = first;
        first_position = p.keys - p.queries + first;
        starts = p.starts ? p.starts + batch * p.queries + first : nullptr;
        // Slots of "forward" count from the start, which all rows share. At least one column, even if nothing is visible.
        first_key = starts ? std::min(starts[0], p.lag ? first_position : first_position + rows - 1) : 0;
        columns = first_position + rows - first_key;
        lag = p.lag;
        ordinary_offset = lag ? rows : 0;
        aligned_offset = lag ? 1 : 0;
        aligned_ld = lag ? columns + 1 : columns;
    }

    static int64_t cells(int64_t rows, int64_t columns) { return rows * (columns + 1); }

    template <typename T>
    T* ordinary(T* buffer) const { return buffer + ordinary_offset; }  // row stride: columns
    template <typename T>
    T* aligned(T* buffer, int64_t row = 0) const { return buffer + aligned_offset + row * aligned_ld; }

    // The visible slots of a row: columns [begin, end) of the aligned view.
    int64_t visible(int64_t row) const {
        return std::max<int64_t>(0, first_position + row + 1 - (starts ? starts[row] : first_key));
    }
    int64_t begin(int64_t row) const { return lag ? columns - visible(row) : 0; }
    int64_t end(int64_t row) const { return lag ? columns : visible(row); }

    // Zero every cell that is no visible key.
    template <typename T>
    void mask(T* buffer) const {
        for (int64_t row = 0; row < rows; ++row) {
            T* cells = aligned(buffer, row);
            std::fill(cells - aligned_offset, cells + begin(row), T(0));
            std::fill(cells + end(row), cells + columns, T(0));
        }
    }
};

// The blocks of one batch item. In layout "forward" slots count from the start, so a block holds queries of one start only.
inline int64_t block_end(const Problem& p, int64_t batch, int64_t first) {
    int64_t last = std::min(first + p.block_rows, p.queries);
    if (p.starts && !p.lag) {
        const int64_t* starts = p.starts + batch * p.queries;
        for (int64_t i = first + 1; i < last; ++i)
            if (starts[i] != starts[first]) return i;
    }
    return last;
}

// A mix of one head, met with one block.
template <typename T>
struct HeadMix {
    const T *scale, *left, *right, *gate;
    int64_t rank, slots, gate_token;

    HeadMix(const Mix& mix, int64_t batch, int64_t head, int64_t heads, int64_t queries, bool transpose) {
        rank = mix.rank;
        slots = mix.slots;
        scale = static_cast<const T*>(mix.scale) + head * slots;
        left = static_cast<const T*>(transpose ? mix.right : mix.left) + head * slots * rank;
        right = static_cast<const T*>(transpose ? mix.left : mix.right) + head * slots * rank;
        gate = static_cast<const T*>(mix.gate) + (batch * queries * heads + head) * rank;
        gate_token = heads * rank;
    }

    // Slots beyond the parameters are never visible: only the columns that have parameters take part.
    int64_t width(const Block& b) const { return std::min(b.columns, slots); }
    int64_t first_column(const Block& b) const { return b.lag ? b.columns - width(b) : 0; }
    int64_t first_row(const Block& b) const { return b.lag ? slots - width(b) : 0; }

    // inner = buffer left, [rows, rank]; gated = inner * gate
    void inner(const Block& b, const T* buffer, T* inner, T* gated) const {
        product_nn<T>(b.rows, rank, width(b), b.aligned(buffer) + first_column(b), b.aligned_ld, left + first_row(b) * rank, rank, 0, inner, rank);
        for (int64_t row = 0; row < b.rows; ++row) {
            const T* g = gate + (b.first_query + row) * gate_token;
            for (int64_t r = 0; r < rank; ++r) gated[row * rank + r] = inner[row * rank + r] * g[r];
        }
    }

    // buffer <- buffer * scale + gated right^T, masked
    void update(const Block& b, T* buffer, const T* gated) const {
        const int64_t n = width(b), skip = first_column(b);
        const T* factor = scale + first_row(b);
        for (int64_t row = 0; row < b.rows; ++row) {
            T* cells = b.aligned(buffer, row) + skip;
            const int64_t from = std::max<int64_t>(b.begin(row) - skip, 0), to = b.end(row) - skip;
#pragma omp simd
            for (int64_t c = from; c < to; ++c) cells[c] *= factor[c];
        }
        product_nt<T>(b.rows, n, rank, gated, rank, right + first_row(b) * rank, rank, 1, b.aligned(buffer) + skip, b.aligned_ld);
        b.mask(buffer);
    }
};

}  // namespace hypermlp
