// The one count of scratch memory, and its limit.
#include "scratch.h"

namespace hypermlp {

Meter meter;

constexpr int64_t kDefaultLimit = 16;  // MiB

size_t scratch_limit() {
    static const size_t limit = [] {
        const char* text = std::getenv("HYPERMLP_SCRATCH_MB");
        const int64_t given = text == nullptr ? kDefaultLimit : std::atoll(text);
        return static_cast<size_t>(given < 0 ? 0 : given) << 20;
    }();
    return limit;
}

}  // namespace hypermlp

// Return the bytes that are held now, for the tests.
extern "C" int64_t hypermlp_scratch_held() { return hypermlp::meter.held; }

// Return the peak of the scratch memory in bytes since the last call, and reset it. ops/native.py calls this.
extern "C" int64_t hypermlp_scratch_peak() {
    const int64_t peak = hypermlp::meter.peak;
    hypermlp::meter.reset();
    return peak;
}
