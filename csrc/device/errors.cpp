// Renders the facts of an Error as plain text and defines the kinds, for each of which vdnn/errors.py has a class.
#include "device/errors.h"

namespace vdnn {
namespace {

std::string text_of(std::string_view text) {
  return std::string(text);
}

}  // namespace

Error::Error(const char* kind, Facts facts) : kind_(kind), facts_(std::move(facts)) {
  text_ = kind_;
  const char* separator = ": ";
  for (const auto& [name, value] : facts_) {
    text_ += separator;
    text_ += name;
    text_ += '=';
    if (const auto* number = std::get_if<std::uint64_t>(&value)) {
      text_ += std::to_string(*number);
    } else {
      text_ += std::get<std::string>(value);
    }
    separator = ", ";
  }
}

InvalidArgument::InvalidArgument(std::string_view argument, std::string_view expected, std::string_view got)
    : Error("InvalidArgument",
            {{"argument", text_of(argument)}, {"expected", text_of(expected)}, {"got", text_of(got)}}) {}

DeviceMismatch::DeviceMismatch(std::string_view what, std::string_view device)
    : Error("DeviceMismatch", {{"what", text_of(what)}, {"device", text_of(device)}}) {}

Closed::Closed(std::string_view what, std::string_view reason)
    : Error("Closed", {{"what", text_of(what)}, {"reason", text_of(reason)}}) {}

DriverFailure::DriverFailure(std::string_view call, std::string_view code_name, std::uint64_t code, std::uint64_t bytes)
    : Error("DriverFailure",
            {{"call", text_of(call)}, {"code_name", text_of(code_name)}, {"code", code}, {"bytes", bytes}}) {}

DeviceLost::DeviceLost(std::string_view call, std::string_view code_name, std::uint64_t code,
                       std::string_view first_call)
    : Error("DeviceLost", {{"call", text_of(call)},
                           {"code_name", text_of(code_name)},
                           {"code", code},
                           {"first_call", text_of(first_call)}}) {}

DriverUnavailable::DriverUnavailable(std::string_view library, std::string_view reason)
    : Error("DriverUnavailable", {{"library", text_of(library)}, {"reason", text_of(reason)}}) {}

PinnedMemoryFull::PinnedMemoryFull(std::uint64_t requested_bytes, std::uint64_t pinned_bytes, std::uint64_t cap_bytes,
                                   std::string_view reason)
    : Error("PinnedMemoryFull", {{"requested_bytes", requested_bytes},
                                 {"pinned_bytes", pinned_bytes},
                                 {"cap_bytes", cap_bytes},
                                 {"reason", text_of(reason)}}) {}

KernelUnavailable::KernelUnavailable(std::string_view kernel, std::string_view reason)
    : Error("KernelUnavailable", {{"kernel", text_of(kernel)}, {"reason", text_of(reason)}}) {}

}  // namespace vdnn
