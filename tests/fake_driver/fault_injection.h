// What the fake driver is told to get wrong: refusals of chosen calls, and asynchronous errors that lose the context.
//
// A refusal is armed for the n-th call from now, of any entry point or of one, and is spent when it fires. An
// asynchronous error is armed for the n-th piece of device work from now; once it has fired the context is lost and
// stays so until clear(). Guarded by the driver's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "device/cuda/driver_api.h"

namespace vdnn::fake {

class FaultPlan final {
 public:
  // `nth` counts from 1, the next call. An empty name is any entry point. A name may go without its "_v2".
  void refuse_call(std::string_view name, std::uint64_t nth, driver::Result code);
  void fail_work(std::uint64_t nth, driver::Result code);
  void clear();

  // Counts one call. Anything but success is what the call must return, having done nothing.
  [[nodiscard]] driver::Result at_call(std::string_view name);
  // Counts one piece of device work, about to run. False if it must not: it is the one that fails, or comes after.
  [[nodiscard]] bool lets_work_run();
  // The asynchronous error that lost the context; success while there is none.
  [[nodiscard]] driver::Result sticky() const noexcept { return sticky_; }
  // Faults armed and not yet fired.
  [[nodiscard]] std::size_t pending() const noexcept { return refusals_.size() + (work_left_ > 0 ? 1 : 0); }

 private:
  struct Refusal {
    std::string name;
    std::uint64_t calls_left = 0;
    driver::Result code = driver::success;
  };

  std::vector<Refusal> refusals_;
  std::uint64_t work_left_ = 0;  // 0 is not armed
  driver::Result work_code_ = driver::success;
  driver::Result sticky_ = driver::success;
};

}  // namespace vdnn::fake
