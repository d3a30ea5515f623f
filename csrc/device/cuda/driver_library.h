// The CUDA driver, opened at run time: one struct of entry points, resolved by name.
//
// A library is loaded once per path and never closed (unloading a driver with live contexts crashes the process). Tests
// pass the path of a fake driver; users get libcuda.so.1.
#pragma once

#include <memory>
#include <string>

#include "device/cuda/driver_api.h"

namespace vdnn {

inline constexpr const char* default_driver_library = "libcuda.so.1";

namespace driver {

// Pointers to the entry points, named like them.
struct Calls {
#define VDNN_DECLARE_CALL(symbol, parameters) Result(*symbol) parameters = nullptr;
  VDNN_DRIVER_CALLS(VDNN_DECLARE_CALL)
#undef VDNN_DECLARE_CALL
};

}  // namespace driver

class DriverLibrary final : public driver::Calls {
 public:
  // Throws DriverUnavailable if the library is not found or lacks an entry point.
  [[nodiscard]] static const DriverLibrary& load(const std::string& path);

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  // "CUDA_ERROR_OUT_OF_MEMORY", or "code 1234" for a code that the driver does not know.
  [[nodiscard]] std::string name_of(driver::Result result) const;

 private:
  explicit DriverLibrary(std::string path);
  std::string path_;
};

// The facts that `vdnn doctor` reports: can the library be opened, and how many devices does it see?
struct DriverStatus {
  std::string library;
  bool loaded = false;
  std::string reason;  // why it is not loaded, or why there is no device
  int version = 0;     // 13000 for CUDA 13.0
  int device_count = 0;
};
[[nodiscard]] DriverStatus driver_status(const std::string& library);

}  // namespace vdnn
