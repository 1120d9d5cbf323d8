// PyTorch tensors at the boundary of the kernels: the checks that come before their memory is used, and the
// conversion into the structs of kernels.h. Only this file and guard.h include PyTorch; only ops.cpp and its
// part layer_ops.h include them.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <list>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "poison.h"

#pragma GCC visibility push(hidden)  // like the types of PyTorch that are used here

namespace hypermlp {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;
using Sizes = std::initializer_list<int64_t>;

constexpr int64_t kAny = -1;  // in a shape: any size of at least 1

[[noreturn]] inline void fail(const std::string& message) {
    throw std::runtime_error("hypermlp: " + message);
}

inline void require(bool condition, const char* message) {
    if (!condition) fail(message);
}

// The name of an argument in its schema, such as "left1".
struct Name {
    const char *field, *index;

    Name(const char* field_, const char* index_ = "") : field(field_), index(index_) {}
    std::string text() const { return std::string(field) + index; }
};

inline std::string dtype_text(ScalarType dtype) {
    switch (dtype) {
        case ScalarType::Half: return "float16";
        case ScalarType::BFloat16: return "bfloat16";
        case ScalarType::Float: return "float32";
        case ScalarType::Double: return "float64";
        case ScalarType::Int: return "int32";
        case ScalarType::Long: return "int64";
        default: return torch::headeronly::toString(dtype);
    }
}

template <typename Numbers>
std::string shape_text(const Numbers& sizes) {
    std::string text;
    for (const int64_t size : sizes) {
        if (!text.empty()) text += ", ";
        text += size == kAny ? "at least 1" : std::to_string(size);
    }
    return "[" + text + "]";
}

// Require a CPU tensor of this shape. Like all checks, it compares a few numbers, and only a failure
// builds a message.
inline void check_shape(const Name& name, const Tensor& x, Sizes shape) {
    if (!x.is_cpu()) fail(name.text() + " is not on the CPU; move it there, or use another backend");
    const auto sizes = x.sizes();
    bool same = sizes.size() == shape.size();
    for (size_t i = 0; same && i < shape.size(); ++i) {
        const int64_t expected = shape.begin()[i];
        same = sizes[i] > 0 && (expected == kAny || sizes[i] == expected);
    }
    if (!same) fail(name.text() + " has shape " + shape_text(sizes) + "; it must be " + shape_text(shape));
}

// Require a CPU tensor of this shape, of any dtype that the kernels can take after a cast.
inline void check_floats(const Name& name, const Tensor& x, Sizes shape) {
    const ScalarType dtype = x.scalar_type();
    const bool known = dtype == ScalarType::Float || dtype == ScalarType::Double ||
                       dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
    if (!known)
        fail(name.text() + " is " + dtype_text(dtype) + "; it must be float32, float64, float16 or bfloat16");
    check_shape(name, x, shape);
}

// Require a CPU tensor of this shape and this dtype.
inline void check_exact(const Name& name, const Tensor& x, ScalarType dtype, Sizes shape) {
    if (x.scalar_type() != dtype)
        fail(name.text() + " is " + dtype_text(x.scalar_type()) + "; it must be " + dtype_text(dtype));
    check_shape(name, x, shape);
}

// Require a cache: a tensor that is written in place, so that it cannot be replaced by a dense copy.
inline void check_cache(const Name& name, const Tensor& x, ScalarType dtype, Sizes shape) {
    check_exact(name, x, dtype, shape);
    if (x.stride(x.dim() - 1) != 1) fail(name.text() + " is a cache; its last dimension must have stride 1");
}

template <typename T>
constexpr ScalarType kDtype = ScalarType::Float;
template <>
inline constexpr ScalarType kDtype<double> = ScalarType::Double;
template <>
inline constexpr ScalarType kDtype<BFloat16> = ScalarType::BFloat16;
template <>
inline constexpr ScalarType kDtype<Float16> = ScalarType::Half;

// Call run(T()) with the type that the kernels compute in for tensors of this dtype.
template <typename Run>
auto with_type(ScalarType dtype, const Run& run) {
    return dtype == ScalarType::Double ? run(double()) : run(float());
}

// Call run(T(), S()) with the type that the kernels compute in and the type that the tensors are stored in.
template <typename Run>
auto with_types(ScalarType dtype, const Run& run) {
    switch (dtype) {
        case ScalarType::Double: return run(double(), double());
        case ScalarType::BFloat16: return run(float(), BFloat16());
        case ScalarType::Half: return run(float(), Float16());
        default: return run(float(), float());
    }
}

template <typename T>
T* data(const Tensor& x) {
    return static_cast<T*>(x.data_ptr());
}

// Return the memory of x, of dtype T: [batch, tokens, heads, width], or fewer dimensions.
template <typename T>
Strided<T> strided(const Tensor& x) {
    return {data<T>(x), x.stride(0), x.stride(1), x.dim() == 4 ? x.stride(2) : 0};
}

// The inputs of one call, already checked. Copies, in dtype T or in dense memory, live as long as this
// object.
template <typename T>
class Inputs {
  public:
    const T* contiguous(const Tensor& x) { return data<T>(dense(cast(x))); }

    // Return x itself if it has dtype T and its last dimension has stride 1.
    Strided<const T> strided(const Tensor& x) {
        const Tensor& y = cast(x);
        return hypermlp::strided<T>(y.stride(y.dim() - 1) == 1 ? y : dense(y)).read_only();
    }

    // Return x itself if the kernels can read its dtype and its last dimension has stride 1.
    Source<T> source(const Tensor& x) {
        const Tensor& y = x.stride(x.dim() - 1) == 1 ? x : dense(x);
        if constexpr (std::is_same_v<T, float>) {
            if (y.scalar_type() == ScalarType::BFloat16) return hypermlp::strided<const BFloat16>(y);
            if (y.scalar_type() == ScalarType::Half) return hypermlp::strided<const Float16>(y);
        }
        return hypermlp::strided<const T>(cast(y));
    }

    // Check and return starts or reach, [batch, queries], or null.
    const int64_t* integers(const Name& name, const Optional& x, int64_t batch, int64_t queries) {
        if (!x) return nullptr;
        check_exact(name, *x, ScalarType::Long, {batch, queries});
        return data<int64_t>(dense(*x));
    }

  private:
    const Tensor& dense(const Tensor& x) {
        return x.is_contiguous() ? x : kept_.emplace_back(torch::stable::contiguous(x));
    }
    const Tensor& cast(const Tensor& x) {
        return x.scalar_type() == kDtype<T> ? x : kept_.emplace_back(torch::stable::to(x, kDtype<T>));
    }
    std::list<Tensor> kept_;  // a list keeps references to its elements valid
};

inline std::vector<int64_t> shape(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }

// Return a new contiguous tensor. torch::stable::empty would look up its operator, which costs more than
// the call.
template <typename T>
Tensor fresh(const std::vector<int64_t>& shape) {
    std::vector<int64_t> strides(shape.size(), 1);
    for (size_t i = shape.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * shape[i];
    const int32_t dtype = std::is_same_v<T, double>     ? aoti_torch_dtype_float64()
                          : std::is_same_v<T, BFloat16> ? aoti_torch_dtype_bfloat16()
                          : std::is_same_v<T, Float16>  ? aoti_torch_dtype_float16()
                                                        : aoti_torch_dtype_float32();
    AtenTensorHandle handle;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(),
                                                           strides.data(), dtype,
                                                           aoti_torch_device_type_cpu(), 0, &handle));
    const Tensor tensor(handle);
    if constexpr (kPoison) poison_unwritten(tensor.data_ptr(), tensor.numel() * sizeof(T));
    return tensor;
}

// Return x in the dtype that the caller stores.
inline Tensor stored(const Tensor& x, ScalarType dtype) {
    return x.scalar_type() == dtype ? x : torch::stable::to(x, dtype);
}

}  // namespace hypermlp

#pragma GCC visibility pop
