// Matrix products for the kernels. The left factor is read in place with any strides (also the skewed score
// buffer and its transpose). The right factor lies in panels, which are packed once and used by every row
// block.
//
// A panel is kPanel columns wide and holds its rows one after another, so the innermost loop reads it
// straight through. Element (row, column) of a packed matrix is
//
//     panels[column / kPanel * step + row * kPanel + column % kPanel]
//
// Columns are padded with zeros. Matrices of at most kLanes columns may have panels of half the width. A
// micro-kernel computes a tile in registers: up to kTile rows times a panel, or up to kTallTile rows times
// the first half of one. A right factor whose rows are dense can also be read in place (add_in_place).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "storage.h"

namespace hypermlp {

#ifdef __AVX512F__
constexpr int64_t kVectorBytes = 64;
#else
constexpr int64_t kVectorBytes = 32;  // two registers on machines with 16-byte registers
#endif
constexpr int kTile = 6;       // 6 x 2 sums, 2 panel vectors and 1 factor: 15 of 16 registers
constexpr int kTallTile = 12;  // for panels that are at most half full, and with 32 registers for all
#ifdef __AVX512F__
constexpr bool kManyRegisters = true;
constexpr int kPlaceTile = 8;  // of add_in_place: 8 x 2 sums of 32 registers
#else
constexpr bool kManyRegisters = false;
constexpr int kPlaceTile = 4;
#endif
constexpr int64_t kDepth = 256;    // rows of a panel that stay in the L1 cache
constexpr int64_t kRows = 252;     // rows of the left factor that stay in the L2 cache, a multiple of kTile
constexpr int64_t kColumns = 512;  // columns of a product of more than kDepth that stay in the L2 cache

template <typename T>
constexpr int64_t kLanes = kVectorBytes / sizeof(T);
template <typename T>
constexpr int64_t kPanel = 2 * kLanes<T>;

template <typename T>
int64_t in_panels(int64_t columns) {
    return (columns + kPanel<T> - 1) / kPanel<T>;
}
template <typename T>
int64_t padded(int64_t columns) {
    return in_panels<T>(columns) * kPanel<T>;
}

template <typename T, int64_t bytes = kVectorBytes>
struct Vector {
    static constexpr int64_t kCount = bytes / sizeof(T);
    typedef T type __attribute__((vector_size(bytes)));
    static type load(const T* from) {
        type v;
        std::memcpy(&v, from, sizeof v);
        return v;
    }
    static void store(T* to, type v) { std::memcpy(to, &v, sizeof v); }
};

// Copy a short row. A call of memmove would cost more than the copy.
template <typename T>
void copy_row(const T* from, int64_t count, T* to) {
    using V = Vector<T>;
    int64_t i = 0;
    for (; i + V::kCount <= count; i += V::kCount) V::store(to + i, V::load(from + i));
    for (; i < count; ++i) to[i] = from[i];
}

template <typename T>
using HalfVector = Vector<T, kVectorBytes / 2>;

// A matrix read in place: element (i, j) at data[i * row + j * column].
template <typename T>
struct View {
    const T* data;
    int64_t row, column;
};

enum class Into { kNew, kAdd, kScaled };  // c = ab, c = c + ab, c = base * scale[column] + ab

// The operands of kScaled. base has the row stride of c, and may be c.
template <typename T>
struct Scaled {
    const T *base = nullptr, *scale = nullptr;
};

// Call body(0), body(1) ... with compile-time numbers. A loop would be unrolled too late for the compiler to
// keep an array of sums in registers: it would clear and copy the array in memory, which costs more than a
// thin product.
#define HYPERMLP_INLINE __attribute__((always_inline))
template <int count, typename Body>
HYPERMLP_INLINE inline void unrolled(const Body& body) {
    if constexpr (count > 0) {
        unrolled<count - 1>(body);
        body(std::integral_constant<int, count - 1>());
    }
}

// The product of M rows with N vectors of a panel, whose rows are `step` apart.
template <typename T, Into into, int M, int N = 2, typename V = Vector<T>>
void micro(int64_t depth, View<T> a, const T* panel, int64_t step, T* c, int64_t ldc, Scaled<T> scaled) {
    if (into != Into::kNew)
        for (int i = 0; i < M; ++i)
            for (int n = 0; n < N; ++n)
                __builtin_prefetch((into == Into::kAdd ? c : scaled.base) + i * ldc + n * V::kCount);
    typename V::type sum[M * N];
    unrolled<M * N>([&](auto i) HYPERMLP_INLINE { sum[i] = typename V::type{}; });
    for (int64_t k = 0; k < depth; ++k, panel += step) {
        typename V::type right[N];
        unrolled<N>([&](auto n) HYPERMLP_INLINE { right[n] = V::load(panel + n * V::kCount); });
        unrolled<M>([&](auto i) HYPERMLP_INLINE {
            const T x = a.data[i * a.row + k * a.column];
            unrolled<N>([&](auto n) HYPERMLP_INLINE { sum[i * N + n] += x * right[n]; });
        });
    }
    unrolled<M * N>([&](auto j) HYPERMLP_INLINE {
        constexpr int64_t i = j / N, x = j % N * V::kCount;
        T* out = c + i * ldc + x;
        if (into == Into::kAdd) sum[j] += V::load(out);
        if (into == Into::kScaled) sum[j] += V::load(scaled.base + i * ldc + x) * V::load(scaled.scale + x);
        V::store(out, sum[j]);
    });
}

// The product of `rows` rows, at most kTile or exactly kTallTile, with N vectors of type V of a panel that is
// P whole vectors wide.
template <typename T, Into into, int N, int P, typename V = Vector<T>>
void micro(int64_t rows, int64_t depth, View<T> a, const T* panel, T* c, int64_t ldc, Scaled<T> scaled) {
    constexpr int64_t step = P * kLanes<T>;
    switch (rows) {
        case 6: return micro<T, into, 6, N, V>(depth, a, panel, step, c, ldc, scaled);
        case 5: return micro<T, into, 5, N, V>(depth, a, panel, step, c, ldc, scaled);
        case 4: return micro<T, into, 4, N, V>(depth, a, panel, step, c, ldc, scaled);
        case 3: return micro<T, into, 3, N, V>(depth, a, panel, step, c, ldc, scaled);
        case 2: return micro<T, into, 2, N, V>(depth, a, panel, step, c, ldc, scaled);
        case 1: return micro<T, into, 1, N, V>(depth, a, panel, step, c, ldc, scaled);
        default:
            if constexpr (N == 1 || kManyRegisters)
                micro<T, into, kTallTile, N, V>(depth, a, panel, step, c, ldc, scaled);
    }
}

// The product with the first `count` columns of a panel of P vectors, of which nothing beyond is stored.
template <typename T, Into into, int P>
void partly(int64_t rows, int64_t count, int64_t depth, View<T> a, const T* panel, T* c, int64_t ldc,
            Scaled<T> scaled) {
    T whole[kTallTile * kPanel<T>];
    if (count > kLanes<T>)
        micro<T, Into::kNew, P, P>(rows, depth, a, panel, whole, kPanel<T>, {});
    else
        micro<T, Into::kNew, 1, P>(rows, depth, a, panel, whole, kPanel<T>, {});
    for (int64_t y = 0; y < rows; ++y)
        for (int64_t x = 0; x < count; ++x) {
            T& cell = c[y * ldc + x];
            T before = 0;
            if (into == Into::kAdd) before = cell;
            if (into == Into::kScaled) before = scaled.base[y * ldc + x] * scaled.scale[x];
            cell = before + whole[y * kPanel<T> + x];
        }
}

// The part of a product that can be skipped because queries do not see later keys. i counts rows of the left
// factor, j columns of the product, k the depth between them.
enum class Causal {
    kNot,
    kLeft,        // rows of the left factor are queries: it is zero unless k <= i + slack
    kTransposed,  // rows of the left factor are keys: it is zero unless i <= k + slack
    kProduct,     // rows of the product are queries: it is needed where j <= i + slack
    kLagLeft,     // like kLeft, with columns that are aligned by lag: zero unless k >= slack - i
    kLagProduct,  // like kProduct, with columns that are aligned by lag: needed where j >= slack - i
};

// A block of multiply(): at most kRows rows, and a depth of at most kDepth.
template <typename T, Into into, Causal causal, int P>
void multiply_block(int64_t rows, int64_t columns, int64_t depth, View<T> a, const T* panels, int64_t step,
                    T* c, int64_t ldc, int64_t slack, Scaled<T> scaled) {
    constexpr int64_t width = P * kLanes<T>;
    // Take as many panels at a time as stay in the L1 cache: short ones side by side, so that c is walked
    // along its rows.
    const int64_t chunk = width * (kDepth / std::max<int64_t>(depth, 16));
    const bool tall = kManyRegisters || columns <= kLanes<T>;
    for (int64_t from = 0; from < columns; from += chunk)
        for (int64_t i = 0, tile; i < rows; i += tile) {
            tile = tall && rows - i >= kTallTile ? kTallTile : std::min<int64_t>(kTile, rows - i);
            const int64_t last = i + tile - 1;
            const int64_t begin = causal == Causal::kTransposed ? std::clamp<int64_t>(i - slack, 0, depth)
                                  : causal == Causal::kLagLeft  ? std::clamp<int64_t>(slack - last, 0, depth)
                                                                : 0;
            const int64_t end =
                causal == Causal::kLeft ? std::clamp<int64_t>(last + slack + 1, 0, depth) : depth;
            const View<T> left{a.data + i * a.row + begin * a.column, a.row, a.column};
            for (int64_t j = from; j < std::min(from + chunk, columns); j += width) {
                if (causal == Causal::kProduct && j > last + slack) break;
                if (causal == Causal::kLagProduct && j + width <= slack - last) continue;
                // If only one half of the panel is needed, compute only that half.
                const int64_t skipped =
                    causal == Causal::kLagProduct && P == 2 && j + kLanes<T> <= slack - last ? kLanes<T> : 0;
                const int64_t needed =
                    causal == Causal::kProduct && P == 2 && j + kLanes<T> > last + slack ? kLanes<T> : width;
                const T* panel = panels + j / width * step + begin * width + skipped;
                T* out = c + i * ldc + j + skipped;
                const int64_t count = std::min(columns - j, needed) - skipped;
                const Scaled<T> own = into == Into::kScaled ? Scaled<T>{scaled.base + i * ldc + j + skipped,
                                                                        scaled.scale + j + skipped}
                                                            : Scaled<T>{};
                if (count == width)
                    micro<T, into, P, P>(tile, end - begin, left, panel, out, ldc, own);
                else if (count == kLanes<T>)
                    micro<T, into, 1, P>(tile, end - begin, left, panel, out, ldc, own);
                else if (count == HalfVector<T>::kCount)
                    micro<T, into, 1, P, HalfVector<T>>(tile, end - begin, left, panel, out, ldc, own);
                else
                    partly<T, into, P>(tile, count, end - begin, left, panel, out, ldc, own);
            }
        }
}

// Compute c[rows, columns] from a[rows, depth] times panels[depth, columns], as `into` says. Nothing is
// stored beyond the last column, even if it does not end a panel. Panels are P vectors wide.
template <typename T, Into into = Into::kNew, Causal causal = Causal::kNot, int P = 2>
void multiply(int64_t rows, int64_t columns, int64_t depth, View<T> a, const T* panels, int64_t step, T* c,
              int64_t ldc, int64_t slack = 0, Scaled<T> scaled = {}) {
    constexpr int64_t width = P * kLanes<T>;
    // How a block at row i, column j and depth k moves the border of what can be skipped.
    constexpr bool forwards = causal == Causal::kLeft || causal == Causal::kProduct;
    constexpr bool product = causal == Causal::kProduct || causal == Causal::kLagProduct;
    constexpr bool left = causal == Causal::kLeft || causal == Causal::kLagLeft;
    const int64_t part = depth > kDepth ? kColumns : std::max<int64_t>(columns, 1);
    for (int64_t i = 0; i < rows; i += kRows)
        for (int64_t j = 0; j < columns; j += part)
            for (int64_t k = 0; k == 0 || k < depth; k += kDepth) {
                const int64_t moved = slack + (forwards ? i : -i) - (product ? j : 0) - (left ? k : 0) +
                                      (causal == Causal::kTransposed ? k : 0);
                const int64_t m = std::min(kRows, rows - i), n = std::min(part, columns - j),
                              count = std::min(kDepth, depth - k);
                const View<T> block{a.data + i * a.row + k * a.column, a.row, a.column};
                const T* from = panels + j / width * step + k * width;
                T* to = c + i * ldc + j;
                const Scaled<T> own = into == Into::kScaled
                                          ? Scaled<T>{scaled.base + i * ldc + j, scaled.scale + j}
                                          : Scaled<T>{};
                if (k == 0)
                    multiply_block<T, into, causal, P>(m, n, count, block, from, step, to, ldc, moved, own);
                else
                    multiply_block<T, Into::kAdd, causal, P>(m, n, count, block, from, step, to, ldc, moved,
                                                             {});
            }
}

// c[rows, columns] += a[rows, depth] b[depth, columns] for columns that fill one panel or less. b is read in
// place, from rows that are `step` apart. Whole panels are read and stored, so both need room for them, and
// what b has beyond its columns must be zero.
template <typename T>
void add_in_place(int64_t rows, int64_t depth, View<T> a, const T* b, int64_t step, T* c, int64_t ldc) {
    int64_t i = 0;
    for (; i + kPlaceTile <= rows; i += kPlaceTile)
        micro<T, Into::kAdd, kPlaceTile>(depth, {a.data + i * a.row, a.row, a.column}, b, step, c + i * ldc,
                                         ldc, {});
    for (; i < rows; ++i)
        micro<T, Into::kAdd, 1>(depth, {a.data + i * a.row, a.row, a.column}, b, step, c + i * ldc, ldc, {});
}

// Exchange the rows and columns of kLanes vectors. In each round, the vectors of the first half interleave
// with those of the second; after as many rounds as the number of a lane has bits, lane and vector are
// exchanged.
#if defined(__clang__) || __GNUC__ >= 12
constexpr bool kShuffles = true;
template <typename V, size_t... i>
HYPERMLP_INLINE inline void interleave(V a, V b, V& low, V& high, std::index_sequence<i...>) {
    constexpr int n = sizeof...(i);
    low = __builtin_shufflevector(a, b, (i % 2 * n + i / 2)...);
    high = __builtin_shufflevector(a, b, (i % 2 * n + i / 2 + n / 2)...);
}
template <typename T>
void transpose(typename Vector<T>::type* rows) {
    constexpr int n = kLanes<T>;
    typename Vector<T>::type next[n];
    for (int round = 1; round < n; round *= 2) {
        unrolled<n / 2>([&](auto i) HYPERMLP_INLINE {
            interleave(rows[i], rows[i + n / 2], next[2 * i], next[2 * i + 1], std::make_index_sequence<n>());
        });
        std::copy_n(next, n, rows);
    }
}
#else
constexpr bool kShuffles = false;
template <typename T>
void transpose(typename Vector<T>::type*) {}
#endif

// Pack columns [first, first + kPanel) of a[rows, columns] into one panel, with zeros beyond the last column.
template <typename T, typename S>
void pack_panel(int64_t rows, int64_t columns, View<S> a, int64_t first, T* panel) {
    const int64_t count = std::min(kPanel<T>, columns - first);
    constexpr int64_t kAhead = 8;  // the rows or vectors to prefetch: processors do not see such patterns
    const S* from = a.data + first * a.column;
    int64_t i = 0;
    if constexpr (kShuffles && std::is_same_v<T, S>) {
        // Whole squares of a transposed matrix.
        using V = Vector<T>;
        for (; a.row == 1 && count == kPanel<T> && i + kLanes<T> <= rows; i += kLanes<T>)
            for (int64_t j = 0; j < kPanel<T>; j += kLanes<T>) {
                typename V::type square[kLanes<T>];
                for (int64_t x = 0; x < kLanes<T>; ++x) {
                    const T* row = from + (j + x) * a.column + i;
                    square[x] = V::load(row);
                    __builtin_prefetch(row + kAhead * kLanes<T>);
                }
                transpose<T>(square);
                for (int64_t y = 0; y < kLanes<T>; ++y) V::store(panel + (i + y) * kPanel<T> + j, square[y]);
            }
    }
    from += i * a.row;
    panel += i * kPanel<T>;
    for (; i < rows; ++i, from += a.row, panel += kPanel<T>) {
        if (a.column == 1 && count == kPanel<T>) {
            __builtin_prefetch(from + kAhead * a.row);
            __builtin_prefetch(from + kAhead * a.row + kLanes<T>);
            if constexpr (std::is_same_v<T, S>)
                copy_row(from, kPanel<T>, panel);
            else
                convert(from, kPanel<T>, panel);
            continue;
        }
        for (int64_t j = 0; j < count; ++j) panel[j] = widen(from[j * a.column]);
        for (int64_t j = count; j < kPanel<T>; ++j) panel[j] = T(0);
    }
}

}  // namespace hypermlp
