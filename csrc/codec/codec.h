// The codec kernels as seen by the host: names, byte counts, argument checks and the CPU reference.
//
// The reference (run_on_cpu) is kept for ever beside the CUDA kernels: it defines the answer, the simulated device
// and the fake driver run it, and every test compares the other with it, bit for bit.
#pragma once

#include <cstdint>

#include "codec/kernel_call.h"

namespace vdnn {

// The entry's name in the embedded device code, e.g. "vdnn_pack_bits".
[[nodiscard]] const char* kernel_symbol(Kernel kernel) noexcept;
[[nodiscard]] std::uint64_t source_bytes(const KernelCall& call) noexcept;
[[nodiscard]] std::uint64_t target_bytes(const KernelCall& call) noexcept;
// Throws InvalidArgument on an unknown kernel, a width that is not 1, 2, 4 or 8, a wrong order of widths, a null
// pointer with a count, a range that overflows the address space, overlapping source and target, or a hash whose
// target is not aligned to its 8 bytes (a GPU adds to it atomically).
void check(const KernelCall& call);
// The reference. Any alignment, any count including 0; source and target must not overlap.
void run_on_cpu(const KernelCall& call) noexcept;

// The device code embedded in this build; nullptr when it was built without nvcc.
[[nodiscard]] const void* embedded_device_code() noexcept;
// Why there is none, as a sentence; "" when there is.
[[nodiscard]] const char* device_code_missing_reason() noexcept;

}  // namespace vdnn
