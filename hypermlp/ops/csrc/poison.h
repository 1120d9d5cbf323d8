// A test build (-DHYPERMLP_POISON, `make poison`) fills new memory with NaN, so that a value that is read
// before it is written shows in the results. The ordinary build does nothing here.
#pragma once

#include <cstddef>
#include <cstring>

namespace hypermlp {

#ifdef HYPERMLP_POISON
constexpr bool kPoison = true;
#else
constexpr bool kPoison = false;
#endif

// Fill with bytes that are NaN in every floating-point type.
inline void poison_unwritten(void* from, size_t bytes) {
    if constexpr (kPoison) std::memset(from, 0xff, bytes);
}

}  // namespace hypermlp
