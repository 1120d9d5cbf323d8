// One block of score rows of one head, in a buffer that can be read in two ways: in ordinary order (one
// column per key) and aligned by slot. docs/performance.md has a picture. hypermlp/ops/score_block.py does
// the same for all heads of a batch.
//
// Between the rows is a gap of one panel, because products store whole panels. What they store beside a row
// falls into the gap, or on keys that the row does not see; mask() zeroes both.
#pragma once

#include <algorithm>

#include "gemm.h"
#include "kernels.h"

namespace hypermlp {

template <typename T>
struct Block {
    int64_t rows, columns;  // queries; keys that any of them may see
    int64_t first_query, first_key, first_position;
    int64_t ld, aligned_ld, ordinary_offset, aligned_offset;
    const int64_t* starts;  // of these queries, or null
    bool lag;

    Block(const Problem<T>& p, int64_t batch, int64_t first, int64_t last) {
        rows = last - first;
        first_query = first;
        first_position = p.keys - p.queries + first;
        starts = p.starts ? p.starts + batch * p.queries + first : nullptr;
        lag = p.lag();
        // In layout "forward" slots count from the start, which all rows share. There is at least one column,
        // even if nothing is visible.
        first_key = starts ? std::min(starts[0], lag ? first_position : first_position + rows - 1) : 0;
        columns = first_position + rows - first_key;
        ld = stride(columns);
        aligned_ld = lag ? ld + 1 : ld;
        const int64_t skew = lag ? rows - 1 : 0;
        ordinary_offset = whole_vectors(kPanel<T> + skew) + first_key % kLanes<T>;
        aligned_offset = ordinary_offset - skew;
    }

    // Rows in ordinary order begin at whole vectors, because a store across two cache lines takes longer.
    static int64_t stride(int64_t columns) { return whole_vectors(columns + kPanel<T>); }
    // The size of a buffer.
    static int64_t cells(int64_t rows, int64_t columns) {
        return rows * (stride(columns) + 1) + 3 * kPanel<T>;
    }
    int64_t cells() const { return cells(rows, columns); }
    int64_t slack() const { return columns - rows; }  // keys before the first query

    T* ordinary(T* buffer) const { return buffer + ordinary_offset; }
    T* aligned(T* buffer, int64_t row = 0) const { return buffer + aligned_offset + row * aligned_ld; }
    const T* aligned(const T* buffer, int64_t row = 0) const {
        return buffer + aligned_offset + row * aligned_ld;
    }

    static int64_t whole_vectors(int64_t cells) { return (cells + kLanes<T> - 1) / kLanes<T> * kLanes<T>; }

    // The visible slots of a row are the columns [begin, end) of the aligned view.
    int64_t visible(int64_t row) const {
        return std::max<int64_t>(0, first_position + row + 1 - (starts ? starts[row] : first_key));
    }
    int64_t begin(int64_t row) const { return lag ? columns - visible(row) : 0; }
    int64_t end(int64_t row) const { return lag ? columns : visible(row); }
    // The end of the last whole vector from begin(row) on. What it has beyond end(row) are zeros: unseen
    // keys, or the gap.
    int64_t vectors_end(int64_t row) const { return begin(row) + whole_vectors(end(row) - begin(row)); }

    // The first row that may see one of the columns [from, to) of the aligned view.
    int64_t first_seeing(int64_t from, int64_t to) const {
        return std::clamp<int64_t>(lag ? rows - to : from - slack(), 0, rows);
    }

    // Zero every cell that is not a visible key.
    void mask(T* buffer) const {
        T* done = buffer;
        for (int64_t row = 0; row < rows; ++row) {
            zero(done, aligned(buffer, row) + begin(row));
            done = aligned(buffer, row) + end(row);
        }
        zero(done, buffer + cells());
    }

    // Zero a range of at least one vector, as every range of mask() is: it contains a gap, or an end of the
    // buffer. Ranges are short, so that a call of memset would cost more than the stores.
    static void zero(T* from, T* to) {
        using V = Vector<T>;
        for (; from + kLanes<T> <= to; from += kLanes<T>) V::store(from, typename V::type{});
        V::store(to - kLanes<T>, typename V::type{});
    }

    // buffer <- a b^T for all keys of the block, masked. `panels` holds b packed by keys, from the first key
    // of the stream.
    void scores(View<T> a, int64_t depth, const T* panels, T* buffer) const {
        const int64_t step = depth * kPanel<T>, before = first_key % kPanel<T>;
        multiply<T, Into::kNew, Causal::kProduct>(rows, padded<T>(before + columns), depth, a,
                                                  panels + first_key / kPanel<T> * step, step,
                                                  ordinary(buffer) - before, ld, before + slack());
        mask(buffer);
    }
};

// The end of the block of queries that begins at `first`. In layout "forward" slots count from the start, so
// a block holds queries of one start only.
template <typename T>
int64_t block_end(const Problem<T>& p, int64_t block_rows, int64_t batch, int64_t first) {
    const int64_t last = std::min(first + block_rows, p.queries);
    if (p.starts && !p.lag()) {
        const int64_t* starts = p.starts + batch * p.queries;
        for (int64_t i = first + 1; i < last; ++i)
            if (starts[i] != starts[first]) return i;
    }
    return last;
}

// The rows of a block, by the number of keys. Found by measuring time and memory.
inline int64_t block_rows(int64_t keys) {
    if (keys <= 1536) return 72;
    return keys <= 4096 ? 96 : 46;
}

}  // namespace hypermlp
