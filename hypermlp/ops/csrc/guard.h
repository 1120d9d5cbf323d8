// The boundary between PyTorch and the kernels, which no exception of this library may cross: PyTorch and
// this library may have different C++ runtimes (the wheels contain one of their own), and an exception of
// another runtime ends the process.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdio>
#include <exception>

#pragma GCC visibility push(hidden)  // like the types of PyTorch that are used here

namespace hypermlp {

using Boxed = void (*)(StableIValue* stack, uint64_t inputs, uint64_t outputs);

// The message of a failure. It has no destructor: see guarded().
struct Message {
    char text[1024];
};

// Call a boxed kernel. If it throws, write the message and return false.
template <Boxed kernel>
[[gnu::noinline]] bool succeeds(Message& message, StableIValue* stack, uint64_t inputs,
                                uint64_t outputs) noexcept {
    try {
        kernel(stack, inputs, outputs);
        return true;
    } catch (const std::exception& error) {
        std::snprintf(message.text, sizeof message.text, "%s", error.what());
    } catch (...) {
        std::snprintf(message.text, sizeof message.text, "hypermlp: unknown error in a kernel");
    }
    return false;
}

// A boxed kernel for PyTorch. PyTorch itself raises the error, after every object of the kernel is destroyed.
// This frame has nothing to catch or to destroy, so that PyTorch's runtime can unwind it without calling this
// library's; succeeds() must not be inlined here.
template <Boxed kernel>
void guarded(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
    Message message;
    if (!succeeds<kernel>(message, stack, inputs, outputs))
        aoti_torch_check(false, __func__, __FILE__, __LINE__, message.text);
}

}  // namespace hypermlp

#pragma GCC visibility pop
