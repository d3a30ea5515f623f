// One call of an operation on the accelerator: what comes out at once, and what runs later.
//
// The shape of what comes out is asked of torch's meta kernels, so the caller gets its tensors at once; their memory is
// written when the stream gets there. What has no meta kernel, or a shape that depends on data, waits for everything
// and runs at once, counted by name. Views share storage and run nothing.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/MemoryFormat.h>

#include <optional>

namespace vdnn::deferred {

// Takes the arguments off the stack and leaves the results on it. `format`: of the results, where the CPU's kernel
// chooses one that the meta kernel knows nothing of.
void make_deferred_call(const c10::OperatorHandle& operation, torch::jit::Stack& stack,
                        std::optional<at::MemoryFormat> format = std::nullopt);

}  // namespace vdnn::deferred
