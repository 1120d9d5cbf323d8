// Scratch memory of the kernels and the count of its bytes.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "poison.h"

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

// The bytes that a thread may keep between calls.
size_t scratch_limit();

// A range of scratch memory that is handed out piece by piece.
class Arena {
  public:
    Arena(char* begin, char* end) : begin_(begin), end_(end), next_(begin) {}

    // Return room for `count` elements, uninitialised.
    template <typename T>
    T* take(int64_t count) {
        char* start = next_;
        next_ += need<T>(count);
        poison(start + count * sizeof(T), next_);
        poison_unwritten(start, count * sizeof(T));
        return reinterpret_cast<T*>(start);
    }

    // Return the next `bytes`, a multiple of the alignment, as an arena of their own.
    Arena part(size_t bytes) {
        char* start = next_;
        next_ += bytes;
        return {start, next_};
    }

    // Forget what was taken before.
    void reset() {
        next_ = begin_;
        unpoison(begin_, end_);
    }

    // The bytes that take<T>(count) uses.
    template <typename T>
    static size_t need(int64_t count) {
        return (count * sizeof(T) + kAlign - 1) / kAlign * kAlign + kRedZone;
    }

    static constexpr size_t kAlign = 64;

  private:
#ifdef __SANITIZE_ADDRESS__  // guards the end of each buffer, although the next buffer follows at once
    static constexpr size_t kRedZone = 128;
    static void poison(char* from, char* to) { __asan_poison_memory_region(from, to - from); }
    static void unpoison(char* from, char* to) { __asan_unpoison_memory_region(from, to - from); }
#else
    static constexpr size_t kRedZone = 0;
    static void poison(char*, char*) {}
    static void unpoison(char*, char*) {}
#endif
    char *begin_, *end_, *next_;
};

// The scratch memory of a thread that calls kernels, for all workers of a call. It is kept between calls,
// because fresh pages cost more than the arithmetic on them, unless it is larger than the limit.
class Scratch {
  public:
    ~Scratch() { release(); }

    // Return `bytes` of memory; what was returned before is lost.
    Arena reserve(size_t bytes) {
        if (epoch_ != meter.epoch || bytes > size_) {
            release();
            const size_t align = bytes < kHugePage ? Arena::kAlign : kHugePage;
            void* memory = nullptr;
            if (posix_memalign(&memory, align, bytes) != 0) throw std::bad_alloc();
            memory_ = static_cast<char*>(memory);
            size_ = bytes;
            epoch_ = meter.epoch;
            meter.add(static_cast<int64_t>(bytes));
#ifdef MADV_HUGEPAGE
            // Rows are far apart, so that small pages would miss the TLB.
            if (bytes >= kHugePage) madvise(memory_, bytes, MADV_HUGEPAGE);
#endif
        }
        Arena arena(memory_, memory_ + size_);
        arena.reset();
        return arena;
    }

    // End the use of the memory: free it if it is larger than the limit.
    void finish() {
        if (size_ > scratch_limit()) release();
    }

  private:
    static constexpr size_t kHugePage = 2 << 20;
    void release() {
        Arena(memory_, memory_ + size_).reset();
        std::free(memory_);
        if (epoch_ == meter.epoch) meter.held -= static_cast<int64_t>(size_);
        memory_ = nullptr;
        size_ = 0;
    }
    char* memory_ = nullptr;
    size_t size_ = 0;
    int64_t epoch_ = 0;
};

// The memory of one call of a kernel. A kernel that calls another one gives it a part of its own arena.
class Lease {
  public:
    explicit Lease(size_t bytes) : arena(scratch().reserve(bytes)) {}
    ~Lease() { scratch().finish(); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    Arena arena;

  private:
    static Scratch& scratch() {
        static thread_local Scratch scratch;
        return scratch;
    }
};

}  // namespace hypermlp
