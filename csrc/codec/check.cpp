// The check of a kernel call's arguments: everything that can be known without touching the memory.
//
// It is made before a call reaches any device, because a kernel that runs into bad memory loses the whole context.

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

bool moves_integers(Kernel kernel) {
  return kernel == Kernel::NarrowIntegers || kernel == Kernel::WidenIntegers;
}

void check_kernel(Kernel kernel) {
  const auto number = static_cast<std::uint64_t>(kernel);
  if (number < kernel_count) return;
  throw InvalidArgument("kernel", "a kernel's number, 0 to " + std::to_string(kernel_count - 1),
                        std::to_string(number));
}

void check_width(const char* name, std::uint64_t width, Kernel kernel) {
  if (moves_integers(kernel)) {
    if (width == 1 || width == 2 || width == 4 || width == 8) return;
    throw InvalidArgument(name, "1, 2, 4 or 8", std::to_string(width));
  }
  if (width == 1) return;
  throw InvalidArgument(name, std::string("1, as ") + kernel_symbol(kernel) + " counts single elements",
                        std::to_string(width));
}

void check_order_of_widths(const KernelCall& call) {
  const std::string than_source = "than source_width, " + std::to_string(call.source_width);
  if (call.kernel == Kernel::NarrowIntegers && call.target_width >= call.source_width) {
    throw InvalidArgument("target_width", "less " + than_source, std::to_string(call.target_width));
  }
  if (call.kernel == Kernel::WidenIntegers && call.target_width <= call.source_width) {
    throw InvalidArgument("target_width", "more " + than_source, std::to_string(call.target_width));
  }
}

void check_range(const Range& range) {
  if (range.bytes == 0) return;
  if (range.address == 0) {
    throw InvalidArgument(range.name, "an address, as " + std::to_string(range.bytes) + " bytes are there", "0");
  }
  if (range.bytes - 1 > std::numeric_limits<std::uint64_t>::max() - range.address) {
    throw InvalidArgument(range.name, "a range that ends within the address space", to_string(range));
  }
}

void check_apart(const Range& source, const Range& target) {
  if (source.bytes == 0 || target.bytes == 0) return;
  // Differences, not ends: a range may reach the very end of the address space, where its end would be 0.
  const bool overlap = source.address < target.address ? target.address - source.address < source.bytes
                                                       : source.address - target.address < target.bytes;
  if (!overlap) return;
  throw InvalidArgument("target", "a range apart from the source, " + to_string(source), to_string(target));
}

void check_alignment_of_hash(const Range& target) {
  if (target.address % 8 == 0) return;
  throw InvalidArgument(target.name, "an address divisible by 8, as blocks of a GPU add to the hash atomically",
                        to_string(target));
}

}  // namespace

void check(const KernelCall& call) {
  check_kernel(call.kernel);
  check_width("source_width", call.source_width, call.kernel);
  check_width("target_width", call.target_width, call.kernel);
  check_order_of_widths(call);
  const Range source{"source", call.source, source_bytes(call)};
  const Range target{"target", call.target, target_bytes(call)};
  check_range(source);
  check_range(target);
  check_apart(source, target);
  if (call.kernel == Kernel::ContentHash) check_alignment_of_hash(target);
}

}  // namespace vdnn
