// The codec kernels as the host sees them: names, byte counts, argument checks and the CPU reference.
//
// The reference (run_on_cpu) defines the result of a kernel. The simulated device and the fake driver run it, and the
// tests compare the CUDA kernels with it bit for bit.
#pragma once

#include <cstdint>

#include "codec/kernel_call.h"

namespace vdnn {

// The name of the entry point in the embedded device code, e.g. "vdnn_pack_bits".
[[nodiscard]] const char* kernel_symbol(Kernel kernel) noexcept;
[[nodiscard]] std::uint64_t source_bytes(const KernelCall& call) noexcept;
[[nodiscard]] std::uint64_t target_bytes(const KernelCall& call) noexcept;
// Throws InvalidArgument for an unknown kernel, a null pointer with a count, a range that overflows the address space,
// overlapping source and target, or a hash whose target is not aligned to its 8 bytes (a GPU adds to it atomically).
void check(const KernelCall& call);
// The reference. Accepts any alignment and any count, 0 included; source and target must not overlap.
void run_on_cpu(const KernelCall& call) noexcept;

// The device code embedded in this build; nullptr when it was built without nvcc.
[[nodiscard]] const void* embedded_device_code() noexcept;
// Why the build has no device code, as a sentence; "" when it has.
[[nodiscard]] const char* device_code_missing_reason() noexcept;

}  // namespace vdnn
