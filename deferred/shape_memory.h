// Remembers the results of meta kernels, by operation and arguments. Most calls of a training step repeat earlier ones,
// and many meta kernels are slow because they are written in Python.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string>
#include <vector>

namespace vdnn::deferred {

// The operation's results as tensors without data. Empty if it has no meta kernel or a shape depends on data.
// May be called from any thread.
[[nodiscard]] std::optional<std::vector<c10::IValue>> shapes_of(const c10::OperatorHandle& operation,
                                                                const std::vector<c10::IValue>& arguments);

}  // namespace vdnn::deferred
