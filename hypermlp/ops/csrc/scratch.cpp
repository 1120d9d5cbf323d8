// The one count of scratch memory.
#include "scratch.h"

namespace hypermlp {

Meter meter;

}  // namespace hypermlp

// Return the peak of the scratch memory in bytes since the last call, and reset it. ops/native.py calls this.
extern "C" int64_t hypermlp_scratch_peak() {
    const int64_t peak = hypermlp::meter.peak;
    hypermlp::meter.reset();
    return peak;
}
