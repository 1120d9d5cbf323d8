// Sequence mixes in the kernels' order of slots, which is that of the aligned columns of a block: newest slot
// last in layout "lag", oldest first in layout "forward".
#pragma once

#include <algorithm>

#include "block.h"
#include "parallel.h"
#include "scratch.h"

namespace hypermlp {

// The product that a mix is used for: y R or y R^T.
enum class Direction { kStraight, kTransposed };
enum class Directions { kStraight, kTransposed, kBoth };

inline Direction opposite(Direction direction) {
    return direction == Direction::kStraight ? Direction::kTransposed : Direction::kStraight;
}

// The packed parameters of all heads, for the slots that the keys can reach. The slots are filled up with
// rows of zeros to whole panels, in front for layout "lag", behind for "forward".
template <typename T>
struct PackedMix {
    int64_t rank, length = 0, used = 0;
    bool lag;
    T* scale = nullptr;                       // 1 + diag, [heads, length]
    T *left = nullptr, *right = nullptr;      // in panels of rank, by heads: [by_rank(rank, length)]
    T *left_t = nullptr, *right_t = nullptr;  // in panels of slots, by heads: [by_slots(rank, length)]

    // A low rank, as is usual, has panels of one vector.
    static bool thin(int64_t rank) { return rank <= kLanes<T>; }
    static int64_t by_rank(int64_t rank, int64_t length) {
        return length * (thin(rank) ? kLanes<T> : padded<T>(rank));
    }
    static int64_t by_slots(int64_t rank, int64_t length) { return length * rank; }
    static size_t need(const Mix<T>& mix, int64_t heads, int64_t keys, Directions directions) {
        if (!mix.exists()) return 0;
        const int64_t length = padded<T>(std::min(mix.slots, keys));
        const int64_t pairs = directions == Directions::kBoth ? 2 : 1;
        return Arena::need<T>(heads * length) + pairs * (Arena::need<T>(heads * by_rank(mix.rank, length)) +
                                                         Arena::need<T>(heads * by_slots(mix.rank, length)));
    }

    PackedMix(const Mix<T>& mix, int64_t heads, int64_t keys, Layout layout, Directions directions,
              Arena& arena)
        : rank(mix.rank), lag(layout == Layout::kLag) {
        if (!mix.exists()) return;
        used = std::min(mix.slots, keys);
        length = padded<T>(used);
        scale = arena.take<T>(heads * length);
        const int64_t rows = heads * by_rank(rank, length), columns = heads * by_slots(rank, length);
        if (directions != Directions::kTransposed) {
            left = arena.take<T>(rows);
            right_t = arena.take<T>(columns);
        }
        if (directions != Directions::kStraight) {
            right = arena.take<T>(rows);
            left_t = arena.take<T>(columns);
        }
    }

    // Fill the matrices of all heads.
    void pack(const Mix<T>& mix, int64_t heads, int64_t threads) const {
        if (!mix.exists()) return;
        const int64_t panels = length / kPanel<T>;
        for_ranges(threads, heads * panels, [&](int64_t i) {
            const int64_t head = i / panels, first = i % panels * kPanel<T>;
            mix.diag.visit([&](const auto& diag) {
                for (int64_t row = first; row < first + kPanel<T>; ++row)
                    scale[head * length + row] =
                        slot(row) < used ? 1 + widen(*diag.at(head, slot(row))) : T(0);
            });
            pack(mix.left, head, first, left, left_t);
            pack(mix.right, head, first, right, right_t);
        });
    }

    int64_t slot(int64_t row) const { return lag ? length - 1 - row : row; }

  private:
    // Pack the rows of one panel of slots, which begins at `begin`.
    void pack(const Source<T>& source, int64_t head, int64_t begin, T* rows, T* columns) const {
        T* const own_rows = rows ? rows + head * by_rank(rank, length) : nullptr;
        T* const own_columns = columns ? columns + head * by_slots(rank, length) : nullptr;
        const int64_t width = thin(rank) ? kLanes<T> : kPanel<T>,
                      padding = (rank + width - 1) / width * width;
        source.visit([&](const auto& from) {
            for (int64_t row = begin; row < begin + kPanel<T>; ++row)
                for (int64_t r = 0; r < padding; ++r) {
                    const bool exists = slot(row) < used && r < rank;
                    const T x = exists ? widen(from.at(head, slot(row))[r]) : T(0);
                    if (own_rows) own_rows[r / width * length * width + row * width + r % width] = x;
                    if (own_columns && r < rank)
                        own_columns[row / kPanel<T> * rank * kPanel<T> + r * kPanel<T> + row % kPanel<T>] = x;
                }
        });
    }
};

// The mix of one head, for products with a block. Inner rows, [rows, rank], are padded to whole panels.
template <typename T>
struct HeadMix {
    const T *scale, *left, *right_t;
    Source<T> gate;
    int64_t batch, head, rank, length, used;

    HeadMix(const Mix<T>& mix, const PackedMix<T>& packed, int64_t batch_, int64_t head_, Direction direction)
        : gate(mix.gate),
          batch(batch_),
          head(head_),
          rank(packed.rank),
          length(packed.length),
          used(packed.used) {
        const int64_t rows = packed.by_rank(rank, length), columns = packed.by_slots(rank, length);
        const bool straight = direction == Direction::kStraight;
        scale = packed.scale + head * length;
        left = (straight ? packed.left : packed.right) + head * rows;
        right_t = (straight ? packed.right_t : packed.left_t) + head * columns;
    }

    // Slots beyond the parameters are never visible, so only the columns that have parameters take part.
    int64_t width(const Block<T>& b) const { return std::min(b.columns, used); }
    int64_t first_column(const Block<T>& b) const { return b.lag ? b.columns - width(b) : 0; }
    int64_t first_row(const Block<T>& b) const { return b.lag ? length - width(b) : 0; }
    View<T> view(const Block<T>& b, const T* buffer) const {
        return {b.aligned(buffer) + first_column(b), b.aligned_ld, 1};
    }

    // The aligned columns at the left end that the first row of the block does not see; each row sees one
    // more. In layout "forward" they are at the other end, and no product skips them.
    static int64_t unseen(const Block<T>& b) { return b.lag ? b.rows - 1 : 0; }

    // inner = buffer left; gated = inner * gate
    void inner(const Block<T>& b, const T* buffer, T* inner, T* gated) const {
        const int64_t ld = padded<T>(rank);
        if (PackedMix<T>::thin(rank))
            multiply<T, Into::kNew, Causal::kLagLeft, 1>(b.rows, kLanes<T>, width(b), view(b, buffer),
                                                         left + first_row(b) * kLanes<T>, 0, inner, ld,
                                                         unseen(b) - first_column(b));
        else
            multiply<T, Into::kNew, Causal::kLagLeft>(b.rows, padded<T>(rank), width(b), view(b, buffer),
                                                      left + first_row(b) * kPanel<T>, length * kPanel<T>,
                                                      inner, ld, unseen(b) - first_column(b));
        apply_gate(b, inner, gated);
    }

    // gated = inner * gate
    void apply_gate(const Block<T>& b, const T* inner, T* gated) const {
        const int64_t ld = padded<T>(rank);
        gate.visit([&](const auto& gates) {
            for (int64_t row = 0; row < b.rows; ++row) {
                const auto* g = gates.at(batch, b.first_query + row, head);
                for (int64_t r = 0; r < rank; ++r) gated[row * ld + r] = inner[row * ld + r] * widen(g[r]);
            }
        });
    }

    // to <- from * scale + gated right^T, masked
    void update(const Block<T>& b, const T* from, const T* gated, T* to) const {
        const int64_t step = rank * kPanel<T>;
        const int64_t before = first_row(b) % kPanel<T>, first = first_row(b) - before;
        const int64_t offset = first_column(b) - before;
        multiply<T, Into::kScaled, Causal::kLagProduct>(
            b.rows, padded<T>(before + width(b)), rank, {gated, padded<T>(rank), 1},
            right_t + first / kPanel<T> * step, step, b.aligned(to) + offset, b.aligned_ld,
            unseen(b) - offset, {b.aligned(from) + offset, scale + first});
        b.mask(to);
    }
};

}  // namespace hypermlp
