// The fake driver's knobs and counters, from the library that a CudaDevice of this program is given as its driver.
#pragma once

#include <memory>
#include <string>

#include "fake_control.h"

namespace vdnn::stress {

class FakeDriverControls {
 public:
  // Throws Failure if it cannot be opened or lacks a control.
  explicit FakeDriverControls(std::string path);

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  // "context 1, event 3", or nothing when all was given back.
  [[nodiscard]] std::string leaks() const;

  decltype(&fake_set_delays) set_delays;
  decltype(&fake_hold_streams) hold_streams;
  decltype(&fake_fail_nth) fail_nth;
  decltype(&fake_fail_async) fail_async;
  decltype(&fake_faults_pending) faults_pending;
  decltype(&fake_reset) reset;
  decltype(&fake_calls) calls;
  decltype(&fake_call_name) call_name;

 private:
  std::string path_;
  void* library_;  // never closed: its streams' threads outlive it
  decltype(&fake_live) live_;
};

// The one built next to this program; an empty string if there is none.
[[nodiscard]] std::string fake_driver_beside_program();

}  // namespace vdnn::stress
