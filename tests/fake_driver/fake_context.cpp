// Retain counts and the thread-local context stacks.
#include "fake_context.h"

#include <algorithm>
#include <numeric>

#include "result_codes.h"

namespace vdnn::fake {

namespace {

constexpr std::uintptr_t first_context_handle = 0x50000000;

// Plain arrays on purpose: a thread-local with a destructor would be gone in calls made while the thread ends.
struct ContextStack {
  std::array<driver::Context, 64> entries;
  std::size_t depth;
};
thread_local ContextStack stack{};

driver::Context context_of(driver::DeviceOrdinal device) noexcept {
  const std::uintptr_t handle = first_context_handle + static_cast<std::uintptr_t>(device);
  return reinterpret_cast<driver::Context>(handle);  // NOLINT(performance-no-int-to-ptr): opaque
}

}  // namespace

void ContextTable::set_device_count(int count) noexcept {
  device_count_ = std::clamp(count, 0, device_limit);
}

bool ContextTable::has_device(driver::DeviceOrdinal device) const noexcept {
  return device >= 0 && device < device_count_;
}

std::string ContextTable::pci_bus_id(driver::DeviceOrdinal device) {
  return "0000:0" + std::to_string(device) + ":00.0";
}

driver::Context ContextTable::retain(driver::DeviceOrdinal device) noexcept {
  ++retain_counts_.at(static_cast<std::size_t>(device));
  return context_of(device);
}

bool ContextTable::release(driver::DeviceOrdinal device) noexcept {
  std::uint64_t& count = retain_counts_.at(static_cast<std::size_t>(device));
  if (count == 0) return false;
  --count;
  return true;
}

std::uint64_t ContextTable::retained() const noexcept {
  return std::accumulate(retain_counts_.begin(), retain_counts_.end(), std::uint64_t{0});
}

bool ContextTable::push(driver::Context context) const noexcept {
  if (!alive(context) || stack.depth == stack.entries.size()) return false;
  stack.entries.at(stack.depth++) = context;
  return true;
}

bool ContextTable::pop(driver::Context* context) noexcept {
  if (stack.depth == 0) return false;
  --stack.depth;
  if (context != nullptr) *context = stack.entries.at(stack.depth);
  return true;
}

driver::Context ContextTable::current() noexcept {
  return stack.depth == 0 ? nullptr : stack.entries.at(stack.depth - 1);
}

driver::Result ContextTable::current_state() const noexcept {
  if (current() == nullptr) return invalid_context;
  return alive(current()) ? driver::success : context_is_destroyed;
}

bool ContextTable::alive(driver::Context context) const noexcept {
  for (int device = 0; device < device_limit; ++device) {
    if (context == context_of(device)) return retain_counts_.at(static_cast<std::size_t>(device)) > 0;
  }
  return false;
}

}  // namespace vdnn::fake
