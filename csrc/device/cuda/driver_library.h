// The CUDA driver, opened at run time: one struct of entry points, resolved by name.
//
// Loaded once per path and never closed (a driver that is unloaded under live contexts takes the process with it).
// A test passes the path of a fake driver; users get libcuda.so.1.
#pragma once

#include <memory>
#include <string>

#include "device/cuda/driver_api.h"

namespace vdnn {

inline constexpr const char* default_driver_library = "libcuda.so.1";

namespace driver {

// The entry points, under their own names.
struct Calls {
#define VDNN_DECLARE_CALL(symbol, parameters) Result(*symbol) parameters = nullptr;
  VDNN_DRIVER_CALLS(VDNN_DECLARE_CALL)
#undef VDNN_DECLARE_CALL
};

}  // namespace driver

class DriverLibrary final : public driver::Calls {
 public:
  // Throws DriverUnavailable: not found, or an entry point is missing.
  [[nodiscard]] static const DriverLibrary& load(const std::string& path);

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  // "CUDA_ERROR_OUT_OF_MEMORY", or "code 1234" for one the driver does not know.
  [[nodiscard]] std::string name_of(driver::Result result) const;

 private:
  explicit DriverLibrary(std::string path);
  std::string path_;
};

// What `doctor` asks: can the library be opened, and what does it see?
struct DriverStatus {
  std::string library;
  bool loaded = false;
  std::string reason;  // why not, or why no device
  int version = 0;     // 13000 for CUDA 13.0
  int device_count = 0;
};
[[nodiscard]] DriverStatus driver_status(const std::string& library);

}  // namespace vdnn
