// Opens a GPU, checks the result codes of its driver and keeps its context current.
#include "device/cuda/cuda_context.h"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <utility>

#include "device/errors.h"

namespace vdnn {
namespace {

int numa_node_of(std::string pci_bus_id) {
  std::transform(pci_bus_id.begin(), pci_bus_id.end(), pci_bus_id.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  std::ifstream file("/sys/bus/pci/devices/" + pci_bus_id + "/numa_node");
  int node = -1;
  return file >> node ? node : -1;
}

}  // namespace

CudaContext::CudaContext(const DriverLibrary& driver, int ordinal) : driver_(driver) {
  check(driver_.cuInit(0), "cuInit");
  int count = 0;
  check(driver_.cuDeviceGetCount(&count), "cuDeviceGetCount");
  if (count == 0) throw DriverUnavailable(driver.path(), "the driver sees no device");
  if (ordinal < 0 || ordinal >= count) {
    throw InvalidArgument("ordinal", "a device number from 0 to " + std::to_string(count - 1), std::to_string(ordinal));
  }
  check(driver_.cuDeviceGet(&device_, ordinal), "cuDeviceGet");
  info_.ordinal = ordinal;
  read_info();
  check(driver_.cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
}

void CudaContext::read_info() {
  char text[256] = "";
  check(driver_.cuDeviceGetName(text, sizeof(text), device_), "cuDeviceGetName");
  info_.kind = "cuda";
  info_.name = text;
  std::size_t bytes = 0;
  check(driver_.cuDeviceTotalMem_v2(&bytes, device_), "cuDeviceTotalMem_v2");
  info_.total_bytes = bytes;
  const auto attribute = [&](int which) {
    int value = 0;
    check(driver_.cuDeviceGetAttribute(&value, which, device_), "cuDeviceGetAttribute");
    return value;
  };
  info_.compute_capability = 10 * attribute(driver::attribute_compute_capability_major) +
                             attribute(driver::attribute_compute_capability_minor);
  info_.integrated = attribute(driver::attribute_integrated) != 0;
  check(driver_.cuDeviceGetPCIBusId(text, sizeof(text), device_), "cuDeviceGetPCIBusId");
  info_.pci_bus_id = text;
  info_.numa_node = numa_node_of(info_.pci_bus_id);
}

void CudaContext::mark_lost(driver::Result result, const char* call) noexcept {
  const std::lock_guard<std::mutex> lock(first_error_mutex_);
  if (first_error_ == driver::success) {
    first_error_ = result;
    first_call_ = call;
  }
  lost_.store(true, std::memory_order_release);
}

void CudaContext::fail(driver::Result result, const char* call, std::uint64_t bytes) {
  if (!driver::is_asynchronous(result)) {
    throw DriverFailure(call, driver_.name_of(result), static_cast<std::uint64_t>(result), bytes);
  }
  mark_lost(result, call);
  throw DeviceLost(call, driver_.name_of(result), static_cast<std::uint64_t>(result), first_call_);
}

void CudaContext::check(driver::Result result, const char* call, std::uint64_t bytes) {
  if (result != driver::success) fail(result, call, bytes);
}

void CudaContext::check_released(driver::Result result, const char* call, std::uint64_t bytes) {
  if (driver::is_asynchronous(result)) {
    mark_lost(result, call);
    return;
  }
  if (result != driver::success && result != driver::deinitialized) fail(result, call, bytes);
}

void CudaContext::throw_if_lost() {
  if (!lost()) return;
  const std::lock_guard<std::mutex> lock(first_error_mutex_);
  throw DeviceLost("an earlier call", driver_.name_of(first_error_), static_cast<std::uint64_t>(first_error_),
                   first_call_);
}

void CudaContext::release() {
  if (context_ == nullptr) return;
  check_released(driver_.cuDevicePrimaryCtxRelease_v2(device_), "cuDevicePrimaryCtxRelease_v2");
  context_ = nullptr;
}

void CudaContext::defer(driver::Result result, const char* call) noexcept {
  if (driver::is_asynchronous(result)) {
    mark_lost(result, call);
    return;
  }
  deferred_result_.store(result, std::memory_order_relaxed);
  deferred_call_.store(call, std::memory_order_release);
}

void CudaContext::throw_deferred() {
  const char* call = deferred_call_.exchange(nullptr, std::memory_order_acquire);
  if (call != nullptr) fail(deferred_result_.load(std::memory_order_relaxed), call, 0);
}

CudaContext::Scope::Scope(CudaContext& context, Capture capture, Purpose purpose)
    : context_(context), purpose_(purpose) {
  context_.throw_deferred();
  if (purpose == Purpose::Work) context_.throw_if_lost();
  const DriverLibrary& driver = context_.driver_;
  driver::Context current = nullptr;
  if (!entered(driver.cuCtxGetCurrent(&current), "cuCtxGetCurrent")) return;
  if (current != context_.context_) {
    pushed_ = entered(driver.cuCtxPushCurrent_v2(context_.context_), "cuCtxPushCurrent_v2");
  }
  if (capture == Capture::Relax) {
    previous_capture_mode_ = driver::capture_mode_relaxed;
    relaxed_ =
        entered(driver.cuThreadExchangeStreamCaptureMode(&previous_capture_mode_), "cuThreadExchangeStreamCaptureMode");
  }
}

// A lost device refuses even this, and close() must continue nevertheless.
bool CudaContext::Scope::entered(driver::Result result, const char* call) {
  if (result == driver::success) return true;
  if (purpose_ == Purpose::Close && driver::is_asynchronous(result)) {
    context_.mark_lost(result, call);
    return false;
  }
  pop();  // the destructor does not run when a constructor throws
  context_.fail(result, call, 0);
}

void CudaContext::Scope::pop() noexcept {
  if (!std::exchange(pushed_, false)) return;
  driver::Context popped = nullptr;
  const driver::Result result = context_.driver_.cuCtxPopCurrent_v2(&popped);
  if (result == driver::success) return;
  context_.defer(result, "cuCtxPopCurrent_v2");
  // Try again: a context left on the stack would stay current for other libraries on this thread.
  context_.driver_.cuCtxPopCurrent_v2(&popped);
}

CudaContext::Scope::~Scope() {
  if (relaxed_) {
    int mode = previous_capture_mode_;
    const driver::Result result = context_.driver_.cuThreadExchangeStreamCaptureMode(&mode);
    if (result != driver::success) {
      context_.defer(result, "cuThreadExchangeStreamCaptureMode");
      mode = previous_capture_mode_;
      context_.driver_.cuThreadExchangeStreamCaptureMode(&mode);
    }
  }
  pop();
}

}  // namespace vdnn
