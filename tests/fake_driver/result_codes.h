// The driver's result codes that only a driver returns, and the names of all that tests inject or see.
#pragma once

#include "device/cuda/driver_api.h"

namespace vdnn::fake {

inline constexpr driver::Result not_initialized = 3;
inline constexpr driver::Result no_device = 100;
inline constexpr driver::Result invalid_device = 101;
inline constexpr driver::Result invalid_context = 201;
inline constexpr driver::Result operating_system = 304;
inline constexpr driver::Result invalid_handle = 400;
inline constexpr driver::Result not_found = 500;
inline constexpr driver::Result context_is_destroyed = 709;
inline constexpr driver::Result host_memory_already_registered = 712;
inline constexpr driver::Result host_memory_not_registered = 713;

// "CUDA_ERROR_..."; nullptr for a code that the driver does not have.
[[nodiscard]] const char* result_name(driver::Result result) noexcept;

}  // namespace vdnn::fake
