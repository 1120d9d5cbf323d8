// What all kernels share: the problem as Python describes it, matrix products, scratch memory, elementary functions.
//
// Matrices are row-major; a row stride is called ld. The GEMM is the one PyTorch was built with: Python hands over its
// address, so that nothing has to be linked. It runs single-threaded here, since it is only called from parallel regions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace hypermlp {

// One sequence mix. Rows are in kernel order: newest last for layout "lag", oldest first for "forward".
struct Mix {
    const void* scale;  // 1 + diag, [heads, slots]; null if there is no mix
    const void* left;   // [heads, slots, rank]
    const void* right;  // [heads, slots, rank]
    const void* gate;   // [batch, queries, heads, rank]
    int64_t slots, rank;
    void* grad_scale;  // gradients, one set per batch item: [batch, heads, ...]
    void* grad_left;
    void* grad_right;
    void* grad_gate;  // [batch, queries, heads, rank]
};

// Tensors are [batch, tokens, heads, width] with unit stride in the last dimension; strides count elements.
struct Strided {
    void* data;
    int64_t batch, token, head;
};

struct Problem {
    int64_t batch, heads, queries, keys, qk_dim, vo_dim, block_rows, threads;
    int32_t glu, lag;
    double eps;
    const int64_t* starts;  // [batch, queries] or null
    Strided q, k, v, out, grad_out, grad_q, grad_k, grad_v;
    void* inverse_norm;  // [heads, batch, queries]
    Mix mix1, mix2;
};

using Sgemm = void (*)(const char*, const char*, const int*, const int*, const int*, const float*, const float*, const int*,
                       const float*, const int*, const float*, float*, const int*);
using Dgemm = void (*)(const char*, const char*, const int*, const int*, const int*, const double*, const double*, const int*,
                       const double*, const int*, const double*, double*, const int*);
extern Sgemm sgemm;
extern Dgemm dgemm;

inline void gemm(char ta, char tb, int m, int n, int k, const float* a, int lda, const float* b, int ldb, float beta, float* c, int ldc) {
    const float one = 1;
    sgemm(&ta, &tb, &m, &n, &k, &one, a, &lda, b, &ldb, &beta, c, &ldc);
}
inline void gemm(char ta, char tb, int m, int n, int k, const double* a, int lda, const double* b, int ldb, double beta, double* c, int ldc) {
    const double one = 1;
    dgemm(&ta, &tb, &m, &n, &k, &one, a, &lda, b, &ldb, &beta, c, &ldc);
}

// BLAS is column-major: the row-major product is asked for transposed.
template <typename T>  // c[m, n] = a[m, k] b[n, k]^T + beta c
void product_nt(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, T beta, T* c, int64_t ldc) {
    gemm('T', 'N', n, m, k, b, ldb, a, lda, beta, c, ldc);
}
template <typename T>  // c[m, n] = a[m, k] b[k, n] + beta c
void product_nn(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, T beta, T* c, int64_t ldc) {
    gemm('N', 'N', n, m, k, b, ldb, a, lda, beta, c, ldc);
}
template <typename T>  // c[m, n] = a[k, m]^T b[k, n] + beta c
void product_tn(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, T beta, T* c, int64_t ldc) {
    gemm('N', 'T', n, m, k, b, ldb, a, lda, beta, c, ldc);
}

// Memory of one thread, kept between calls: fresh pages cost more than the arithmetic on them.
class Scratch {
  public:
    ~Scratch() {
        unpoison(memory_, size_);
        std::free(memory_);
    }
    void reserve(size_t bytes) {
        used_ = 0;
        unpoison(memory_, size_);
        if (bytes <= size_) return;
        std::free(memory_);
        size_ = 0;
        memory_ = static_cast<char*>(std::aligned_alloc(kAlign, round(bytes)));
        if (memory_ == nullptr) throw std::bad_alloc();
        size_ = round(bytes);
    }
    template <typename T>
    T* take(int64_t count) {
        char* start = memory_ + used_;
        used_ += need<T>(count);
        poison(start + count * sizeof(T), memory_ + used_);
        return reinterpret_cast<T*>(start);
    }
    template <typename T>
    static size_t need(int64_t count) {
        return round(count * sizeof(T)) + kRedZone;
    }

  private:
    static constexpr size_t kAlign = 64;
#ifdef __SANITIZE_ADDRESS__  // so that a buffer's end is guarded although its neighbour follows
    static constexpr size_t kRedZone = 128;
    static void poison(char* from, char* to) { __asan_poison_memory_region(from, to - from); }
    static void unpoison(char* from, size_t bytes) { __asan_unpoison_memory_region(from, bytes); }
#else
    static constexpr size_t kRedZone = 0;
    static void poison(char*, char*) {}
    static void unpoison(char*, size_t) {}
#endif
    static size_t round(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
    char* memory_ = nullptr;
    size_t size_ = 0, used_ = 0;
};

// exp for x <= 0 (Cephes' polynomial, within 2 units in the last place), written so that the compiler vectorises it.
inline float exp_negative(float x) {
    x = x > -87.0f ? x : -87.0f;
    const float n = __builtin_rintf(x * 1.44269504088896341f);
    float r = x - n * 0.693359375f;
    r -= n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}
inline double exp_negative(double x) { return std::exp(x); }

// log(1 + y) for 0 <= y <= 1, as 2 atanh(y / (2 + y)): no cancellation near 0.
inline float log1p_unit(float y) {
    const float s = y / (2.0f + y), s2 = s * s;
    float p = 1.0f / 17;
    p = p * s2 + 1.0f / 15;
    p = p * s2 + 1.0f / 13;
    p = p * s2 + 1.0f / 11;
    p = p * s2 + 1.0f / 9;
    p = p * s2 + 1.0f / 7;
    p = p * s2 + 1.0f / 5;
    p = p * s2 + 1.0f / 3;
    return 2 * s * (p * s2 + 1.0f);
}
inline double log1p_unit(double y) { return std::log1p(y); }

// By value: the references of std::max keep the compiler from vectorising.
template <typename T>
inline T positive(T x) {
    return x > 0 ? x : T(0);
}
template <typename T>
inline T softplus(T x) {
    return positive(x) + log1p_unit(exp_negative(-std::abs(x)));
}
template <typename T>
inline T sigmoid(T x) {
    const T e = exp_negative(-std::abs(x));
    return (x >= 0 ? T(1) : e) / (1 + e);
}

}  // namespace hypermlp
