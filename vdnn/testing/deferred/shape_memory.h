// What meta kernels answered, by operation and arguments: most calls of a training step have been made before, and many
// meta kernels are written in Python.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string>
#include <vector>

namespace vdnn::deferred {

// Tensors without data where the operation returns tensors; nothing if there is no answer, because there is no kernel
// for it or a shape depends on data. `arguments` are those of the call. From any thread.
[[nodiscard]] std::optional<std::vector<c10::IValue>> shapes_of(const c10::OperatorHandle& operation,
                                                                const std::vector<c10::IValue>& arguments);

}  // namespace vdnn::deferred
