// Scratch memory of the kernels, kept between calls, and the count of its bytes.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace hypermlp {

// The bytes that all scratches hold now, and their peak since the last reset. A reset starts a new epoch, in
// which every scratch allocates anew when it is next reserved.
struct Meter {
    std::atomic<int64_t> held{0}, peak{0}, epoch{0};

    void add(int64_t bytes) {
        const int64_t now = held += bytes;
        for (int64_t before = peak; before < now && !peak.compare_exchange_weak(before, now);) {
        }
    }
    void reset() {
        held = 0;
        peak = 0;
        ++epoch;
    }
};
extern Meter meter;

// Memory of one thread. It is kept between calls because fresh pages cost more than the arithmetic on them.
class Scratch {
  public:
    ~Scratch() { release(); }

    // Make room for `bytes` and forget what was taken before.
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
        // Rows are far apart, so that small pages would miss the TLB.
        if (bytes >= kHugePage) madvise(memory_, bytes, MADV_HUGEPAGE);
#endif
    }

    // Return room for `count` elements, uninitialised.
    template <typename T>
    T* take(int64_t count) {
        char* start = memory_ + used_;
        used_ += need<T>(count);
        poison(start + count * sizeof(T), memory_ + used_);
        return reinterpret_cast<T*>(start);
    }

    // The bytes that take<T>(count) uses.
    template <typename T>
    static size_t need(int64_t count) {
        return round(count * sizeof(T)) + kRedZone;
    }

  private:
    static constexpr size_t kAlign = 64, kHugePage = 2 << 20;
#ifdef __SANITIZE_ADDRESS__  // guards the end of each buffer, although the next buffer follows at once
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

// Memory that the calling thread shares with the threads of its parallel region. All kernels use the same: a
// thread runs one kernel at a time.
inline Scratch& shared_scratch() {
    static thread_local Scratch scratch;
    return scratch;
}

// Memory of one thread within a parallel region.
inline Scratch& own_scratch() {
    static thread_local Scratch scratch;
    return scratch;
}

}  // namespace hypermlp
