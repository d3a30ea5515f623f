// One call of an operation on the accelerator: it returns tensors at once and runs later.
//
// torch's meta kernels give the shapes of the results, so the caller gets its tensors at once. Their memory is written
// when the stream runs the operation. An operation without a meta kernel, or whose shapes depend on data, waits for all
// streams and runs at once, and is counted by name. Views share storage and run nothing.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/MemoryFormat.h>

#include <optional>

namespace vdnn::deferred {

// Takes the arguments off the stack and leaves the results on it. `format` is the memory format of the results if the
// CPU's kernel chooses another one than the meta kernel.
void make_deferred_call(const c10::OperatorHandle& operation, torch::jit::Stack& stack,
                        std::optional<at::MemoryFormat> format = std::nullopt);

}  // namespace vdnn::deferred
