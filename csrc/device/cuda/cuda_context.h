// The primary context of one GPU, shared with torch. Every result code of the driver is turned into an error here.
//
// A refused call throws DriverFailure and leaves the device usable. An asynchronous error marks the device as lost:
// from then on every Scope throws DeviceLost and names the call that reported the error.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include "device/cuda/driver_library.h"
#include "device/device.h"

namespace vdnn {

class CudaContext {
 public:
  // Retains the primary context as the last step, so that a constructor that throws retains nothing.
  CudaContext(const DriverLibrary& driver, int ordinal);
  CudaContext(const CudaContext&) = delete;  // one retain, one release
  CudaContext& operator=(const CudaContext&) = delete;
  ~CudaContext() = default;  // does not call the driver: release() does

  [[nodiscard]] const DriverLibrary& driver() const noexcept { return driver_; }
  [[nodiscard]] const DeviceInfo& info() const noexcept { return info_; }
  [[nodiscard]] bool lost() const noexcept { return lost_.load(std::memory_order_acquire); }

  // Throws unless `result` is success. `bytes` is the size that the call asked for, 0 for a call without a size.
  void check(driver::Result result, const char* call, std::uint64_t bytes = 0);
  [[noreturn]] void fail(driver::Result result, const char* call, std::uint64_t bytes);
  // For calls that free an object. An earlier asynchronous error that such a call reports only marks the device as
  // lost, because the driver has freed the object nevertheless. Throws if the driver kept the object.
  void check_released(driver::Result result, const char* call, std::uint64_t bytes = 0);
  void throw_if_lost();
  void release();

  enum class Purpose { Work, Close };
  enum class Capture { Leave, Relax };

  // Makes the context current on this thread for the lifetime of the Scope. With Capture::Relax, calls that are
  // forbidden during a CUDA-graph capture of another thread do not invalidate that capture.
  class Scope {
   public:
    explicit Scope(CudaContext& context, Capture capture = Capture::Leave, Purpose purpose = Purpose::Work);
    Scope(const Scope&) = delete;  // pops exactly once
    Scope& operator=(const Scope&) = delete;
    // Restores the previous state. A destructor cannot throw, so the next Scope reports a failure to do so.
    ~Scope();

   private:
    [[nodiscard]] bool entered(driver::Result result, const char* call);
    void pop() noexcept;
    CudaContext& context_;
    const Purpose purpose_;
    bool pushed_ = false;
    bool relaxed_ = false;
    int previous_capture_mode_ = 0;
  };

  // Throws the deferred error of a Scope that could not restore the previous state, once.
  void throw_deferred();

 private:
  void defer(driver::Result result, const char* call) noexcept;
  void mark_lost(driver::Result result, const char* call) noexcept;
  void read_info();

  const DriverLibrary& driver_;
  DeviceInfo info_;
  driver::DeviceOrdinal device_ = 0;
  driver::Context context_ = nullptr;
  std::atomic<bool> lost_{false};
  std::mutex first_error_mutex_;
  driver::Result first_error_ = driver::success;
  const char* first_call_ = "";
  std::atomic<driver::Result> deferred_result_{driver::success};
  std::atomic<const char*> deferred_call_{nullptr};
};

}  // namespace vdnn
