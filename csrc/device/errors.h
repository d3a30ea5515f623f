// The errors of the native core, as values.
//
// An Error has a kind (the name of a class in vdnn.errors) and facts (name, value). vdnn/errors.py builds the message
// that a user reads from those facts. what() lists the facts, for programs without Python. This file does not depend on
// any device.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace vdnn {

using FactValue = std::variant<std::string, std::uint64_t>;
using Facts = std::vector<std::pair<const char*, FactValue>>;

class Error : public std::exception {
 public:
  Error(const char* kind, Facts facts);
  [[nodiscard]] const char* what() const noexcept override { return text_.c_str(); }
  [[nodiscard]] const char* kind() const noexcept { return kind_; }
  [[nodiscard]] const Facts& facts() const noexcept { return facts_; }

 private:
  const char* kind_;
  Facts facts_;
  std::string text_;
};

// An argument does not satisfy what the function requires.
struct InvalidArgument final : Error {
  InvalidArgument(std::string_view argument, std::string_view expected, std::string_view got);
};

// A stream or an event of one device was passed to another.
struct DeviceMismatch final : Error {
  DeviceMismatch(std::string_view what, std::string_view device);
};

// An object was used after close(), or in a forked child.
struct Closed final : Error {
  Closed(std::string_view what, std::string_view reason);
};

// The driver refused a call; the device still works. `bytes` is 0 for a call without a size.
struct DriverFailure final : Error {
  DriverFailure(std::string_view call, std::string_view code_name, std::uint64_t code, std::uint64_t bytes);
};

// An asynchronous error: the device's context is lost, and every later call throws this.
struct DeviceLost final : Error {
  DeviceLost(std::string_view call, std::string_view code_name, std::uint64_t code, std::string_view first_call);
};

// There is no driver library or no device, or the library lacks an entry point.
struct DriverUnavailable final : Error {
  DriverUnavailable(std::string_view library, std::string_view reason);
};

// Host memory could not be pinned: the cap is reached or the system refused the pages.
struct PinnedMemoryFull final : Error {
  PinnedMemoryFull(std::uint64_t requested_bytes, std::uint64_t pinned_bytes, std::uint64_t cap_bytes,
                   std::string_view reason);
};

// This build has no device code for the kernel.
struct KernelUnavailable final : Error {
  KernelUnavailable(std::string_view kernel, std::string_view reason);
};

}  // namespace vdnn
