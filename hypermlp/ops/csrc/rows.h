// Products of a vector with the rows of a matrix, for decoding. Each row is read once, in the type that it is
// stored in, and widened in registers; sums are kept in T. All sums have an order that depends on the shape
// alone. Long rows are read one after another, as they lie: the processor fetches one stream ahead better
// than several.
#pragma once

#include <utility>

#include "gemm.h"
#include "storage.h"

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace hypermlp {

// The table of loads: how a vector of T is read from memory that holds S. Products of two bfloat16 vectors
// (AVX512-BF16, AMX) belong here too, as specialisations of add_products for S = BFloat16; there are none
// yet.
template <typename T, typename S>
struct Load {
    using Lanes = typename Vector<T>::type;
    static Lanes whole(const S* from) {
        Lanes lanes;
        for (int64_t i = 0; i < kLanes<T>; ++i) lanes[i] = widen(from[i]);
        return lanes;
    }
};
template <typename T>
struct Load<T, T> {
    static typename Vector<T>::type whole(const T* from) { return Vector<T>::load(from); }
};
template <>
struct Load<float, BFloat16> {
    static Vector<float>::type whole(const BFloat16* from) {
#ifdef __AVX512F__  // GCC 12 converts half a vector at a time
        const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        return _mm512_castsi512_ps(
            _mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, narrow), 16));
#else
        typedef uint16_t Narrow __attribute__((vector_size(kVectorBytes / 2)));
        typedef uint32_t Wide __attribute__((vector_size(kVectorBytes)));
        Narrow narrow;
        std::memcpy(&narrow, from, sizeof narrow);
        return with_bits_of<Vector<float>::type>(__builtin_convertvector(narrow, Wide) << 16);
#endif
    }
};
#ifdef __F16C__
template <>
struct Load<float, Float16> {
    static Vector<float>::type whole(const Float16* from) {
#ifdef __AVX512F__
        // The form with a mask: GCC 12 warns about the other one.
        return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
    }
};
#endif

// Read `count` numbers, fewer than a vector, and zeros behind them.
template <typename T, typename S>
typename Vector<T>::type load_part(const S* from, int64_t count) {
    T part[kLanes<T>] = {};
    for (int64_t i = 0; i < count; ++i) part[i] = widen(from[i]);
    return Vector<T>::load(part);
}

// Fetch what comes soon after a place in a row that is read straight on.
template <typename S>
void prefetch(const S* from) {
    constexpr int64_t kBytes = 1024;
    __builtin_prefetch(from + kBytes / static_cast<int64_t>(sizeof(S)));
}

template <typename V, int... lanes>
V shuffle(V a, V b) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, lanes...);
#else
    typedef std::conditional_t<sizeof(a[0]) == 4, int32_t, int64_t> Index
        __attribute__((vector_size(sizeof(V))));
    return __builtin_shuffle(a, b, Index{lanes...});
#endif
}

// Lane i of the result is a[i] + a[i ^ distance], or the same of b where i has the bit `distance`.
template <typename T, int distance, int... i>
typename Vector<T>::type fold(typename Vector<T>::type a, typename Vector<T>::type b,
                              std::integer_sequence<int, i...>) {
    constexpr int kCount = sizeof...(i);
    using V = typename Vector<T>::type;
    return shuffle<V, (i & distance ? kCount + i : i)...>(a, b) +
           shuffle<V, (i & distance ? kCount + (i ^ distance) : i ^ distance)...>(a, b);
}

// Lane i of the result is the sum of the lanes of sums[i % count]. count is a power of two.
template <typename T, int count, int distance = 1>
typename Vector<T>::type add_lanes(const typename Vector<T>::type* sums) {
    using V = typename Vector<T>::type;
    using Indices = std::make_integer_sequence<int, kLanes<T>>;
    if constexpr (distance == kLanes<T>) {
        return sums[0];
    } else {
        constexpr int kHalf = count > 1 ? count / 2 : 1;
        V folded[kHalf];
        for (int i = 0; i < kHalf; ++i)
            folded[i] = fold<T, distance>(sums[2 * i], sums[count > 1 ? 2 * i + 1 : 0], Indices());
        return add_lanes<T, kHalf, 2 * distance>(folded);
    }
}

// sums[m * N + n] += x[m] * rows[n], lane by lane, over `depth` numbers.
template <typename T, typename S, int M, int N>
__attribute__((always_inline)) inline void add_products(const T* x, int64_t x_step, const S* rows,
                                                        int64_t step, int64_t depth,
                                                        typename Vector<T>::type* sums) {
    using V = typename Vector<T>::type;
    int64_t d = 0;
    for (; d + kLanes<T> <= depth; d += kLanes<T>) {
        V left[M];
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) left[m] = Vector<T>::load(x + m * x_step + d);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
            if (N == 1)
                prefetch(rows + d);
            else
                __builtin_prefetch(rows + (n + N) * step + d);  // the next block
            const V right = Load<T, S>::whole(rows + n * step + d);
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) sums[m * N + n] += left[m] * right;
        }
    }
    if (d == depth) return;
    for (int n = 0; n < N; ++n)
        for (int m = 0; m < M; ++m)
            sums[m * N + n] +=
                load_part<T>(x + m * x_step + d, depth - d) * load_part<T>(rows + n * step + d, depth - d);
}

// out[m * out_step + n] = <x[m], rows[n]> for M vectors, x_step apart, and N rows, `step` apart.
template <typename T, typename S, int M, int N>
void products(const T* x, int64_t x_step, const S* rows, int64_t step, int64_t depth, T* out,
              int64_t out_step) {
    typename Vector<T>::type sums[M * N] = {};
    add_products<T, S, M, N>(x, x_step, rows, step, depth, sums);
    const auto lanes = add_lanes<T, M * N>(sums);
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) out[m * out_step + n] = lanes[m * N + n];
}

// out[i] = <x, row i> for `count` rows, which are `step` apart.
template <typename T, typename S>
void dots(const T* x, int64_t depth, const S* rows, int64_t step, int64_t count, T* out) {
    constexpr int kBlock = kLanes<T>;
    int64_t i = 0;
    for (; i + kBlock <= count; i += kBlock)
        products<T, S, 1, kBlock>(x, 0, rows + i * step, step, depth, out + i, 0);
    for (; i < count; ++i) products<T, S, 1, 1>(x, 0, rows + i * step, step, depth, out + i, 0);
}

// sums[d] += weights[0] * row 0 [d] + ... for N rows, which are `step` apart.
template <typename T, typename S, int N>
__attribute__((always_inline)) inline void add_rows(const T* weights, const S* rows, int64_t step,
                                                    int64_t depth, T* sums) {
    using V = typename Vector<T>::type;
    int64_t d = 0;
    for (; d + kLanes<T> <= depth; d += kLanes<T>) {
        V sum = {};
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            if (N == 1) prefetch(rows + n * step + d);
            sum += weights[n] * Load<T, S>::whole(rows + n * step + d);
        }
        Vector<T>::store(sums + d, Vector<T>::load(sums + d) + sum);
    }
    for (; d < depth; ++d) {
        T sum = 0;
        for (int n = 0; n < N; ++n) sum += weights[n] * widen(rows[n * step + d]);
        sums[d] += sum;
    }
}

// sums[d] += weights[i] * row i [d] over `count` rows, which are `step` apart.
template <typename T, typename S>
void add_rows(const T* weights, const S* rows, int64_t step, int64_t count, int64_t depth, T* sums) {
    constexpr int kBlock = 8;
    int64_t i = 0;
    if (depth <= kBlock * kLanes<T>)  // else a row is long enough to hide the latency of its sums
        for (; i + kBlock <= count; i += kBlock)
            add_rows<T, S, kBlock>(weights + i, rows + i * step, step, depth, sums);
    for (; i < count; ++i) add_rows<T, S, 1>(weights + i, rows + i * step, step, depth, sums);
}

// Products by head: out[h * out_step + i] = <x[h], part h of row i> for `count` rows, at most kLanes, which
// are `step` apart. x is [heads, depth]; the parts of a row are head_step apart.
template <typename T, typename S>
void head_dots(const T* x, int64_t heads, int64_t depth, const S* rows, int64_t step, int64_t head_step,
               int64_t count, T* out, int64_t out_step) {
    constexpr int64_t kHeads = 4;  // at a time
    for (int64_t first = 0; first < heads; first += kHeads) {
        const int64_t last = std::min(first + kHeads, heads);
        typename Vector<T>::type sums[kHeads][kLanes<T>] = {};
        for (int64_t i = 0; i < count; ++i)
            for (int64_t h = first; h < last; ++h) {
                const S* row = rows + i * step + h * head_step;
                add_products<T, S, 1, 1>(x + h * depth, 0, row, 0, depth, &sums[h - first][i]);
            }
        for (int64_t h = first; h < last; ++h) {
            T all[kLanes<T>];
            Vector<T>::store(all, add_lanes<T, kLanes<T>>(sums[h - first]));
            std::copy_n(all, count, out + h * out_step);
        }
    }
}

}  // namespace hypermlp
