// The CPU reference of each kernel, one function a kernel; run_on_cpu chooses among them.
//
// All take a call that check() accepts, at any alignment of source and target.
#pragma once

#include "codec/kernel_call.h"

namespace vdnn {

// The addresses of a call, as memory of this process.
// NOLINTBEGIN(performance-no-int-to-ptr): an address by the layout of KernelCall
inline const unsigned char* source_of(const KernelCall& call) noexcept {
  return reinterpret_cast<const unsigned char*>(call.source);
}
inline unsigned char* target_of(const KernelCall& call) noexcept {
  return reinterpret_cast<unsigned char*>(call.target);
}
// NOLINTEND(performance-no-int-to-ptr)

void narrow_integers(const KernelCall& call) noexcept;
void widen_integers(const KernelCall& call) noexcept;
void pack_bits(const KernelCall& call) noexcept;
void unpack_bits(const KernelCall& call) noexcept;
void content_hash(const KernelCall& call) noexcept;

}  // namespace vdnn
