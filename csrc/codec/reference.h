// The CPU reference of each kernel, one function per kernel; run_on_cpu() calls the one that a call names.
//
// Each function takes a call that check() accepts, with source and target at any alignment.
#pragma once

#include "codec/kernel_call.h"

namespace vdnn {

// The addresses of a call, as memory of this process.
// NOLINTBEGIN(performance-no-int-to-ptr): KernelCall stores addresses as integers
inline const unsigned char* source_of(const KernelCall& call) noexcept {
  return reinterpret_cast<const unsigned char*>(call.source);
}
inline unsigned char* target_of(const KernelCall& call) noexcept {
  return reinterpret_cast<unsigned char*>(call.target);
}
// NOLINTEND(performance-no-int-to-ptr)

void pack_bits(const KernelCall& call) noexcept;
void unpack_bits(const KernelCall& call) noexcept;
void content_hash(const KernelCall& call) noexcept;

}  // namespace vdnn
