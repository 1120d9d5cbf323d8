// Elementary functions, written so that the compiler vectorises them for float.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace hypermlp {

// exp(x) for x <= 0: the polynomial of Cephes, within 2 units in the last place.
inline float exp_negative(float x) {
    x = x < -87.0f ? -87.0f : x;  // this order of the comparison passes NaN on
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

// log(1 + y) for 0 <= y <= 1: a minimax polynomial of log(1 + y) / y, within 2 units in the last place.
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

// max(x, 0). Arguments go by value: the references of std::max keep the compiler from vectorising.
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

// A power of two by which a row of activations, not yet divided by the norm, is multiplied before the
// readout, so that the readout neither overflows nor underflows where the normalised row would not. It is 1
// for common norms. If the norm is infinite it is 0, like the normalised row.
template <typename T>
T row_scale(T inverse_norm) {
    constexpr T kLarge = T(1 << 20);
    if (!(inverse_norm < 1 / kLarge || inverse_norm > kLarge)) return 1;
    return inverse_norm == 0 ? T(0) : std::ldexp(T(1), std::ilogb(inverse_norm));
}

// What is left of 1 / rho for the output row after row_scale().
template <typename T>
T after_scale(T inverse_norm) {
    const T scale = row_scale(inverse_norm);
    return scale == 0 ? T(0) : inverse_norm / scale;
}

}  // namespace hypermlp
