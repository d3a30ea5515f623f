// Entry points about memory and the work that reads and writes it: copies, memsets, modules and launches.
//
// Giving memory back waits for all streams first, as the driver does.
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "codec/codec.h"
#include "entry_points.h"
#include "fake_driver.h"

namespace vdnn::driver {

using fake::call;
using fake::FakeDriver;
using fake::Lock;
using fake::Needs;
using fake::StreamPointer;

namespace {

constexpr unsigned known_host_register_flags = 15;
constexpr unsigned block_thread_limit = 1024;

void* device_memory(DevicePointer address) {
  return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr): device addresses are integers
}

// Puts `work` on the stream and logs it as "verb stream detail".
Result issue(FakeDriver& state, Lock& lock, const StreamPointer& stream, const char* verb, const std::string& detail,
             std::function<void()> work) {
  state.issues.add(verb + (" s" + std::to_string(stream->number)) + " " + detail);
  fake::Operation operation;
  operation.work = std::move(work);
  state.streams.issue(lock, stream, std::move(operation));
  return success;
}

bool accepts_ranges(const FakeDriver& state, const void* host, DevicePointer device, std::size_t bytes) {
  return state.memory.accepts_host(reinterpret_cast<std::uintptr_t>(host), bytes) &&
         state.memory.accepts_device(device, bytes);
}

void copy(void* target, const void* source, std::size_t bytes) {
  if (bytes > 0) std::memcpy(target, source, bytes);
}

}  // namespace

Result cuMemcpyDtoHAsync_v2(void* target, DevicePointer source, std::size_t bytes, StreamHandle stream) {
  return call(__func__, Needs::HealthyContext, [&](FakeDriver& state, Lock& lock) -> Result {
    const StreamPointer found = state.streams.find(stream);
    if (found == nullptr) return fake::invalid_handle;
    if (!accepts_ranges(state, target, source, bytes)) return invalid_value;
    return issue(state, lock, found, "copy_d2h", std::to_string(bytes),
                 [=] { copy(target, device_memory(source), bytes); });
  });
}

Result cuMemcpyHtoDAsync_v2(DevicePointer target, const void* source, std::size_t bytes, StreamHandle stream) {
  return call(__func__, Needs::HealthyContext, [&](FakeDriver& state, Lock& lock) -> Result {
    const StreamPointer found = state.streams.find(stream);
    if (found == nullptr) return fake::invalid_handle;
    if (!accepts_ranges(state, source, target, bytes)) return invalid_value;
    return issue(state, lock, found, "copy_h2d", std::to_string(bytes),
                 [=] { copy(device_memory(target), source, bytes); });
  });
}

Result cuMemsetD8Async(DevicePointer target, unsigned char value, std::size_t bytes, StreamHandle stream) {
  return call(__func__, Needs::HealthyContext, [&](FakeDriver& state, Lock& lock) -> Result {
    const StreamPointer found = state.streams.find(stream);
    if (found == nullptr) return fake::invalid_handle;
    if (!state.memory.accepts_device(target, bytes)) return invalid_value;
    return issue(state, lock, found, "memset", std::to_string(bytes), [=] {
      if (bytes > 0) std::memset(device_memory(target), value, bytes);
    });
  });
}

Result cuMemHostRegister_v2(void* address, std::size_t bytes, unsigned flags) {
  return call(__func__, Needs::HealthyContext, [&](FakeDriver& state, Lock&) -> Result {
    if ((flags & ~known_host_register_flags) != 0) return invalid_value;
    return state.memory.register_host(reinterpret_cast<std::uintptr_t>(address), bytes);
  });
}

Result cuMemHostUnregister(void* address) {
  return call(__func__, Needs::Context, [&](FakeDriver& state, Lock& lock) -> Result {
    const bool known = state.memory.unregister_host(reinterpret_cast<std::uintptr_t>(address));
    if (known) state.streams.drain_all(lock);
    if (state.faults.sticky() != success) return state.faults.sticky();
    if (address == nullptr) return invalid_value;
    return known ? success : fake::host_memory_not_registered;
  });
}

Result cuMemAlloc_v2(DevicePointer* address, std::size_t bytes) {
  return call(__func__, Needs::HealthyContext,
              [&](FakeDriver& state, Lock&) -> Result { return state.memory.allocate(address, bytes); });
}

Result cuMemFree_v2(DevicePointer address) {
  return call(__func__, Needs::Context, [&](FakeDriver& state, Lock& lock) -> Result {
    const bool known = state.memory.take(address);
    if (known) {
      state.streams.drain_all(lock);
      fake::MemoryTable::release(address);
    }
    if (state.faults.sticky() != success) return state.faults.sticky();
    return known ? success : invalid_value;
  });
}

Result cuModuleLoadData(Module* module, const void* image) {
  return call(__func__, Needs::HealthyContext, [&](FakeDriver& state, Lock&) -> Result {
    if (module == nullptr || image == nullptr) return invalid_value;
    *module = state.modules.load();
    return success;
  });
}

Result cuModuleUnload(Module module) {
  return call(__func__, Needs::Context, [&](FakeDriver& state, Lock&) -> Result {
    const bool known = state.modules.unload(module);
    if (state.faults.sticky() != success) return state.faults.sticky();
    return known ? success : fake::invalid_handle;
  });
}

Result cuModuleGetFunction(Function* function, Module module, const char* name) {
  return call(__func__, Needs::HealthyContext,
              [&](FakeDriver& state, Lock&) -> Result { return state.modules.find_function(function, module, name); });
}

Result cuLaunchKernel(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned /*shared_bytes*/, StreamHandle stream, void** params,
                      void** extra) {
  return call(__func__, Needs::HealthyContext, [&](FakeDriver& state, Lock& lock) -> Result {
    const StreamPointer found = state.streams.find(stream);
    const std::optional<Kernel> kernel = state.modules.kernel(function);
    if (found == nullptr || !kernel) return fake::invalid_handle;
    const std::uint64_t threads = std::uint64_t{block_x} * block_y * block_z;
    if (grid_x == 0 || grid_y == 0 || grid_z == 0 || threads == 0 || threads > block_thread_limit) return invalid_value;
    if (params == nullptr || params[0] == nullptr || extra != nullptr) return invalid_value;
    KernelCall launched = *static_cast<const KernelCall*>(params[0]);
    launched.kernel = *kernel;  // a GPU runs the function that was launched, whatever its argument says
    return issue(state, lock, found, "launch", kernel_symbol(*kernel), [launched] { fake::run_kernel(launched); });
  });
}

}  // namespace vdnn::driver
