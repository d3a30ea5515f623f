// Fake devices, their primary contexts, and each thread's stack of current contexts.
//
// All devices are alike ("Fake GPU", capability 9.0). Releasing a primary context for the last time leaves the
// objects made in it alive: a test wants to see them as leaks. Guarded by the driver's lock.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "device/cuda/driver_api.h"

namespace vdnn::fake {

class ContextTable final {
 public:
  static constexpr int device_limit = 8;

  void set_device_count(int count) noexcept;
  [[nodiscard]] int device_count() const noexcept { return device_count_; }
  [[nodiscard]] bool has_device(driver::DeviceOrdinal device) const noexcept;
  [[nodiscard]] static std::string pci_bus_id(driver::DeviceOrdinal device);

  void initialize() noexcept { initialized_ = true; }
  [[nodiscard]] bool initialized() const noexcept { return initialized_; }

  [[nodiscard]] driver::Context retain(driver::DeviceOrdinal device) noexcept;
  [[nodiscard]] bool release(driver::DeviceOrdinal device) noexcept;
  [[nodiscard]] std::uint64_t retained() const noexcept;

  // Of the calling thread. push: false if `context` is none that is retained, or the stack is full.
  [[nodiscard]] bool push(driver::Context context) const noexcept;
  [[nodiscard]] static bool pop(driver::Context* context) noexcept;
  [[nodiscard]] static driver::Context current() noexcept;
  // What a call that needs the calling thread's context would say.
  [[nodiscard]] driver::Result current_state() const noexcept;

 private:
  [[nodiscard]] bool alive(driver::Context context) const noexcept;

  bool initialized_ = false;
  int device_count_ = 1;
  std::array<std::uint64_t, device_limit> retain_counts_{};
};

}  // namespace vdnn::fake
