// What all kernels share: the problem as ops.cpp describes it, scratch memory, elementary functions.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace hypermlp {

// Tensors are [batch, tokens, heads, width] with unit stride in the last dimension; strides count elements.
struct Strided {
    void* data;
    int64_t batch, token, head;

    template <typename T>
    T* at(int64_t b, int64_t t, int64_t h) const { return static_cast<T*>(data) + b * batch + t * token + h * head; }
};

// One sequence mix: its parameters as the user has them, and room for their gradients.
struct Mix {
    const void* diag;   // [heads, slots]; null if there is no mix
    const void* left;   // [heads, slots, rank]
    const void* right;  // [heads, slots, rank]
    int64_t slots, rank;
    Strided gate, grad_gate;  // [batch, queries, heads, rank]
    void *grad_diag, *grad_left, *grad_right;
};

struct Problem {
    int64_t batch, heads, queries, keys, qk_dim, vo_dim, threads;
    bool glu, lag;
    double eps;
    const int64_t* starts;  // [batch, queries] or null
    Strided q, k, v, out, grad_out, grad_q, grad_k, grad_v;
    Strided out_gate;  // multiplies out, in decode alone; data is null if there is none
    void* inverse_norm;  // [heads, batch, queries]
    Mix mix1, mix2;

    int64_t branches() const { return glu ? 2 * heads : heads; }
};

// How many bytes all scratches hold, and held at most since the last reset, which makes each of them start anew.
struct Meter {
    std::atomic<int64_t> held{0}, peak{0}, epoch{0};

    void add(int64_t bytes) {
        const int64_t now = held += bytes;
        for (int64_t before = peak; before < now && !peak.compare_exchange_weak(before, now);) {
        }
    }
    void reset() { held = peak = 0, ++epoch; }
};
extern Meter meter;

// Memory that belongs to a thread, kept between calls: fresh pages cost more than the arithmetic on them.
class Scratch {
  public:
    ~Scratch() { release(); }
    void reserve(size_t bytes) {
        used_ = 0;
        unpoison(memory_, size_);
        if (epoch_ != meter.epoch) release();
        if (bytes <= size_) return;
        release();
        const size_t align = bytes < kHugePage ? kAlign : kHugePage;
        bytes = (bytes + align - 1) / align * align;
        memory_ = static_cast<char*>(std::aligned_alloc(align, bytes));
        if (memory_ == nullptr) throw std::bad_alloc();
        size_ = bytes;
        epoch_ = meter.epoch;
        meter.add(static_cast<int64_t>(bytes));
#ifdef MADV_HUGEPAGE
        if (bytes >= kHugePage) madvise(memory_, bytes, MADV_HUGEPAGE);  // rows are far apart: small pages would miss the TLB
#endif
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
    static constexpr size_t kAlign = 64, kHugePage = 2 << 20;
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
    void release() {
        unpoison(memory_, size_);
        std::free(memory_);
        if (epoch_ == meter.epoch) meter.held -= static_cast<int64_t>(size_);
        memory_ = nullptr;
        size_ = 0;
    }
    char* memory_ = nullptr;
    size_t size_ = 0, used_ = 0;
    int64_t epoch_ = 0;
};

// What all threads of a call share, and what each of them has for itself. The same memory for every kernel: no two run at once
// on one thread.
inline Scratch& shared_scratch() {
    static thread_local Scratch scratch;
    return scratch;
}
inline Scratch& own_scratch() {
    static thread_local Scratch scratch;
    return scratch;
}

// exp for x <= 0 (Cephes' polynomial, within 2 units in the last place), written so that the compiler vectorises it.
inline float exp_negative(float x) {
    x = x < -87.0f ? -87.0f : x;  // in this order a NaN stays one
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
    const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}
inline double exp_negative(double x) { return std::exp(x); }

// log(1 + y) for 0 <= y <= 1: minimax polynomial of log(1 + y) / y, within 2 units in the last place.
inline float log1p_unit(float y) {
    float p = 5.232661291e-03f;
    p = p * y - 2.950510676e-02f;
    p = p * y + 7.822573713e-02f;
    p = p * y - 1.366322760e-01f;
    p = p * y + 1.910599822e-01f;
    p = p * y - 2.484298004e-01f;
    p = p * y + 3.331909653e-01f;
    p = p * y - 4.999949313e-01f;
    p = p * y + 9.999999699e-01f;
    return p * y;
}
inline double log1p_unit(double y) { return std::log1p(y); }

// By value: the references of std::max keep the compiler from vectorising.
template <typename T>
inline T positive(T x) {
    return x < 0 ? T(0) : x;
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
