// Numbers in memory. Kernels compute in T = float or double. Tensors of float kernels may also be stored as
// bfloat16 or float16: they are widened where they are read, and no copy of a whole tensor is made.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace hypermlp {

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

template <typename To, typename From>
To with_bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(BFloat16 x) { return with_bits_of<float>(static_cast<uint32_t>(x.bits) << 16); }
// Without branches, so that the compiler vectorises loops of it.
inline float widen(Float16 x) {
    constexpr uint32_t kRebias = (127 - 15) << 23;
    const uint32_t rest = (x.bits & 0x7fffu) << 13, exponent = rest & (0x1fu << 23);
    const float normal = with_bits_of<float>(rest + (exponent == 0x1fu << 23 ? 2 * kRebias : kRebias));
    const uint32_t one = kRebias + (1 << 23);  // the bits of the smallest normal number, 2^-14
    const float subnormal = with_bits_of<float>(rest + one) - with_bits_of<float>(one);
    const uint32_t magnitude = with_bits_of<uint32_t>(exponent == 0 ? subnormal : normal);
    return with_bits_of<float>(magnitude | (x.bits & 0x8000u) << 16);
}

// Round to the nearest number of type S, ties to even.
template <typename S>
S narrow(float x);
template <>
inline BFloat16 narrow(float x) {
    const uint32_t bits = with_bits_of<uint32_t>(x);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    return {static_cast<uint16_t>(is_nan ? bits >> 16 | 0x40u : rounded)};
}
template <>
inline Float16 narrow(float x) {
    const uint32_t all = with_bits_of<uint32_t>(x), bits = all & 0x7fffffffu, sign = all >> 16 & 0x8000u;
    uint32_t half;
    if (bits > 0x7f800000u) {  // NaN
        half = 0x7e00u;
    } else if (bits >= 0x477ff000u) {  // rounds to 65536 or more
        half = 0x7c00u;
    } else if (bits < 0x38800000u) {  // below the smallest normal number: 0.5 has the spacing of subnormals
        half = with_bits_of<uint32_t>(with_bits_of<float>(bits) + 0.5f) - with_bits_of<uint32_t>(0.5f);
    } else {
        half = (bits - (112u << 23) + 0xfffu + (bits >> 13 & 1)) >> 13;
    }
    return {static_cast<uint16_t>(half | sign)};
}

// Copy `count` numbers and convert them, in either direction.
template <typename From, typename To>
void convert(const From* from, int64_t count, To* to) {
    if constexpr (std::is_same_v<From, To>)
        std::copy_n(from, count, to);
    else if constexpr (sizeof(From) < sizeof(To))
        for (int64_t i = 0; i < count; ++i) to[i] = widen(from[i]);
    else
        for (int64_t i = 0; i < count; ++i) to[i] = narrow<To>(from[i]);
}

// A tensor [batch, tokens, heads, width] whose last dimension is dense. Strides count elements. T is const
// for inputs.
template <typename T>
struct Strided {
    T* data = nullptr;
    int64_t batch = 0, token = 0, head = 0;  // strides

    T* at(int64_t b, int64_t t, int64_t h = 0) const { return data + b * batch + t * token + h * head; }
    // Every `step`-th batch item, or head, from `first` on.
    Strided items(int64_t first, int64_t step) const {
        return {data + first * batch, batch * step, token, head};
    }
    Strided heads(int64_t first, int64_t step) const {
        return {data + first * head, batch, token, head * step};
    }
    Strided<const T> read_only() const { return {data, batch, token, head}; }
};

// An input of a kernel that computes in T: a Strided<const S>, where S is T, or BFloat16 or Float16 if T is
// float.
template <typename T>
class Source {
  public:
    Source() = default;
    template <typename S>
    Source(const Strided<S>& x) : data_(x.data), strides_{nullptr, x.batch, x.token, x.head} {
        using Stored = std::remove_const_t<S>;
        constexpr bool same = std::is_same_v<Stored, T>, half = sizeof(Stored) == 2;
        static_assert(same || (half && std::is_same_v<T, float>));
        storage_ = same ? kSame : std::is_same_v<Stored, BFloat16> ? kBFloat16 : kFloat16;
    }

    bool exists() const { return data_ != nullptr; }

    // Return use(x), where x is the Strided<const S>.
    template <typename Use>
    auto visit(const Use& use) const {
        if constexpr (std::is_same_v<T, float>) {
            if (storage_ == kBFloat16) return use(typed<BFloat16>());
            if (storage_ == kFloat16) return use(typed<Float16>());
        }
        return use(typed<T>());
    }

    // As in Strided.
    Source items(int64_t first, int64_t step) const {
        return visit([&](const auto& x) { return Source(x.items(first, step)); });
    }
    Source heads(int64_t first, int64_t step) const {
        return visit([&](const auto& x) { return Source(x.heads(first, step)); });
    }

    // Return the tensor if it is stored in T; one without data otherwise.
    Strided<const T> in_place() const { return storage_ == kSame ? typed<T>() : Strided<const T>{}; }

    // Copy `count` numbers from (b, t, h) on.
    void read(int64_t b, int64_t t, int64_t h, int64_t count, T* to) const {
        visit([&](const auto& x) { convert(x.at(b, t, h), count, to); });
    }

  private:
    enum Storage { kSame, kBFloat16, kFloat16 };

    template <typename S>
    Strided<const S> typed() const {
        return {static_cast<const S*>(data_), strides_.batch, strides_.token, strides_.head};
    }
    const void* data_ = nullptr;
    Strided<const T> strides_;  // without data
    Storage storage_ = kSame;
};

}  // namespace hypermlp
