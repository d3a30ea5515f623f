// Entry points about the driver itself, its devices, and contexts. None of them waits for a stream.
#include <algorithm>
#include <cstring>
#include <string_view>

#include "entry_points.h"
#include "fake_driver.h"

namespace vdnn::driver {

using fake::call;
using fake::FakeDriver;
using fake::Lock;
using fake::Needs;

namespace {

constexpr int driver_version = 12040;
constexpr int capture_mode_count = 3;

Result write_text(char* target, int capacity, std::string_view text) {
  if (target == nullptr || capacity <= 0) return invalid_value;
  const std::size_t length = std::min(text.size(), static_cast<std::size_t>(capacity) - 1);
  std::memcpy(target, text.data(), length);
  target[length] = '\0';
  return success;
}

}  // namespace

Result cuInit(unsigned flags) {
  return call(__func__, Needs::Nothing, [&](FakeDriver& state, Lock&) -> Result {
    if (flags != 0) return invalid_value;
    if (state.contexts.device_count() == 0) return fake::no_device;
    state.contexts.initialize();
    return success;
  });
}

Result cuDriverGetVersion(int* version) {
  return call(__func__, Needs::Nothing, [&](FakeDriver&, Lock&) -> Result {
    if (version == nullptr) return invalid_value;
    *version = driver_version;
    return success;
  });
}

// Outside the gate: error paths call it, and a fault armed for "the next call" must not land there.
Result cuGetErrorName(Result error, const char** name) {
  if (name == nullptr) return invalid_value;
  *name = fake::result_name(error);
  return *name == nullptr ? invalid_value : success;
}

Result cuDeviceGetCount(int* count) {
  return call(__func__, Needs::Driver, [&](FakeDriver& state, Lock&) -> Result {
    if (count == nullptr) return invalid_value;
    *count = state.contexts.device_count();
    return success;
  });
}

Result cuDeviceGet(DeviceOrdinal* device, int ordinal) {
  return call(__func__, Needs::Driver, [&](FakeDriver& state, Lock&) -> Result {
    if (device == nullptr) return invalid_value;
    if (!state.contexts.has_device(ordinal)) return fake::invalid_device;
    *device = ordinal;
    return success;
  });
}

Result cuDeviceGetName(char* name, int capacity, DeviceOrdinal device) {
  return call(__func__, Needs::Driver, [&](FakeDriver& state, Lock&) -> Result {
    if (!state.contexts.has_device(device)) return fake::invalid_device;
    return write_text(name, capacity, "Fake GPU");
  });
}

Result cuDeviceGetAttribute(int* value, int attribute, DeviceOrdinal device) {
  return call(__func__, Needs::Driver, [&](FakeDriver& state, Lock&) -> Result {
    if (!state.contexts.has_device(device)) return fake::invalid_device;
    if (value == nullptr) return invalid_value;
    switch (attribute) {
      case attribute_integrated:
      case attribute_compute_capability_minor:
        *value = 0;
        return success;
      case attribute_compute_capability_major:
        *value = 9;
        return success;
      default:
        return invalid_value;
    }
  });
}

Result cuDeviceTotalMem_v2(std::size_t* bytes, DeviceOrdinal device) {
  return call(__func__, Needs::Driver, [&](FakeDriver& state, Lock&) -> Result {
    if (!state.contexts.has_device(device)) return fake::invalid_device;
    if (bytes == nullptr) return invalid_value;
    *bytes = state.memory.device_capacity_bytes();
    return success;
  });
}

Result cuDeviceGetPCIBusId(char* id, int capacity, DeviceOrdinal device) {
  return call(__func__, Needs::Driver, [&](FakeDriver& state, Lock&) -> Result {
    if (!state.contexts.has_device(device)) return fake::invalid_device;
    return write_text(id, capacity, fake::ContextTable::pci_bus_id(device));
  });
}

Result cuDevicePrimaryCtxRetain(Context* context, DeviceOrdinal device) {
  return call(__func__, Needs::HealthyDriver, [&](FakeDriver& state, Lock&) -> Result {
    if (!state.contexts.has_device(device)) return fake::invalid_device;
    if (context == nullptr) return invalid_value;
    *context = state.contexts.retain(device);
    return success;
  });
}

Result cuDevicePrimaryCtxRelease_v2(DeviceOrdinal device) {
  return call(__func__, Needs::Driver, [&](FakeDriver& state, Lock&) -> Result {
    if (!state.contexts.has_device(device)) return fake::invalid_device;
    return state.contexts.release(device) ? success : fake::invalid_context;
  });
}

Result cuCtxGetCurrent(Context* context) {
  return call(__func__, Needs::Driver, [&](FakeDriver&, Lock&) -> Result {
    if (context == nullptr) return invalid_value;
    *context = fake::ContextTable::current();
    return success;
  });
}

Result cuCtxPushCurrent_v2(Context context) {
  return call(__func__, Needs::Driver, [&](FakeDriver& state, Lock&) -> Result {
    return state.contexts.push(context) ? success : fake::invalid_context;
  });
}

Result cuCtxPopCurrent_v2(Context* context) {
  return call(__func__, Needs::Driver, [&](FakeDriver&, Lock&) -> Result {
    return fake::ContextTable::pop(context) ? success : fake::invalid_context;
  });
}

Result cuThreadExchangeStreamCaptureMode(int* mode) {
  thread_local int current = 0;  // global, the driver's default
  // A setting of the thread and not of the context: a lost context leaves it alone.
  return call(__func__, Needs::Driver, [&](FakeDriver&, Lock&) -> Result {
    if (mode == nullptr || *mode < 0 || *mode >= capture_mode_count) return invalid_value;
    std::swap(*mode, current);
    return success;
  });
}

}  // namespace vdnn::driver
