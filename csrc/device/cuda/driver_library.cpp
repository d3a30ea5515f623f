// Implements DriverLibrary with dlopen and dlsym.
#include "device/cuda/driver_library.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

#include "device/errors.h"

namespace vdnn {

DriverLibrary::DriverLibrary(std::string path) : path_(std::move(path)) {
  void* handle = dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    throw DriverUnavailable(path_, why != nullptr ? why : "it could not be opened");
  }
#define VDNN_RESOLVE_CALL(symbol, parameters)                          \
  symbol = reinterpret_cast<decltype(symbol)>(dlsym(handle, #symbol)); \
  if ((symbol) == nullptr) throw DriverUnavailable(path_, "it lacks the entry point " #symbol);
  VDNN_DRIVER_CALLS(VDNN_RESOLVE_CALL)
#undef VDNN_RESOLVE_CALL
}

const DriverLibrary& DriverLibrary::load(const std::string& path) {
  static std::mutex mutex;
  // Leaked on purpose: exit handlers that run after static destructors may close devices.
  static auto* loaded = new std::map<std::string, std::unique_ptr<DriverLibrary>>;
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = loaded->find(path);
  if (found == loaded->end()) {
    found = loaded->emplace(path, std::unique_ptr<DriverLibrary>(new DriverLibrary(path))).first;
  }
  return *found->second;
}

std::string DriverLibrary::name_of(driver::Result result) const {
  const char* name = nullptr;
  if (cuGetErrorName(result, &name) != driver::success || name == nullptr) return "code " + std::to_string(result);
  return name;
}

DriverStatus driver_status(const std::string& library) {
  DriverStatus status;
  status.library = library;
  try {
    const DriverLibrary& driver = DriverLibrary::load(library);
    status.loaded = true;
    if (driver.cuDriverGetVersion(&status.version) != driver::success) status.version = 0;
    driver::Result result = driver.cuInit(0);
    if (result == driver::success) result = driver.cuDeviceGetCount(&status.device_count);
    if (result != driver::success) {
      status.device_count = 0;
      status.reason = "the driver returned " + driver.name_of(result);
    } else if (status.device_count == 0) {
      status.reason = "the driver sees no device";
    }
  } catch (const DriverUnavailable& error) {
    status.reason = std::get<std::string>(error.facts().back().second);
  }
  return status;
}

}  // namespace vdnn
