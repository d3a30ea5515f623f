// Checks the arguments of a kernel call as far as that is possible without touching the memory.
//
// The check runs before a call reaches a device, because a kernel that accesses invalid memory loses the whole context.

#include <cstdio>
#include <limits>
#include <string>

#include "codec/codec.h"
#include "device/errors.h"

namespace vdnn {
namespace {

struct Range {
  const char* name;
  std::uint64_t address;
  std::uint64_t bytes;
};

std::string to_string(const Range& range) {
  char text[64];
  std::snprintf(text, sizeof(text), "%llu bytes at 0x%llx", static_cast<unsigned long long>(range.bytes),
                static_cast<unsigned long long>(range.address));
  return text;
}

void check_kernel(Kernel kernel) {
  const auto number = static_cast<std::uint64_t>(kernel);
  if (number < kernel_count) return;
  throw InvalidArgument("kernel", "a kernel number from 0 to " + std::to_string(kernel_count - 1),
                        std::to_string(number));
}

void check_range(const Range& range) {
  if (range.bytes == 0) return;
  if (range.address == 0) {
    throw InvalidArgument(range.name, "a non-null address for " + std::to_string(range.bytes) + " bytes", "0");
  }
  if (range.bytes - 1 > std::numeric_limits<std::uint64_t>::max() - range.address) {
    throw InvalidArgument(range.name, "a range that ends within the address space", to_string(range));
  }
}

void check_apart(const Range& source, const Range& target) {
  if (source.bytes == 0 || target.bytes == 0) return;
  // Compare differences, not ends: the end of a range that reaches the end of the address space would wrap to 0.
  const bool overlap = source.address < target.address ? target.address - source.address < source.bytes
                                                       : source.address - target.address < target.bytes;
  if (!overlap) return;
  throw InvalidArgument("target", "a range that does not overlap the source, " + to_string(source), to_string(target));
}

void check_alignment_of_hash(const Range& target) {
  if (target.address % 8 == 0) return;
  throw InvalidArgument(target.name,
                        "an address divisible by 8, because the blocks of a GPU add to the hash atomically",
                        to_string(target));
}

}  // namespace

void check(const KernelCall& call) {
  check_kernel(call.kernel);
  const Range source{"source", call.source, source_bytes(call)};
  const Range target{"target", call.target, target_bytes(call)};
  check_range(source);
  check_range(target);
  check_apart(source, target);
  if (call.kernel == Kernel::ContentHash) check_alignment_of_hash(target);
}

}  // namespace vdnn
