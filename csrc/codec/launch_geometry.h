// How a codec kernel is launched: the convention between the kernels and whoever launches them.
//
// One parameter, the KernelCall by value; `blocks` by `threads` in one dimension; no dynamic shared memory. The
// kernels stride over the grid and are correct for any number of blocks and any number of threads that is a
// multiple of 32, up to 1024; this geometry is only the fast one. ContentHash adds to its target: set the 8 bytes
// to zero before it, on the same stream.
#pragma once

#include <algorithm>
#include <cstdint>

#include "codec/codec.h"

namespace vdnn {

struct LaunchGeometry {
  unsigned blocks = 1;
  unsigned threads = 256;
};

// Enough threads for 16 bytes of the wider side each. The cap is about 16 blocks on each multiprocessor of the
// largest GPUs: more would only add launches of blocks that find no room (and, for the hash, atomic additions).
[[nodiscard]] inline LaunchGeometry launch_geometry(const KernelCall& call) noexcept {
  constexpr std::uint64_t most_blocks = 2048;
  LaunchGeometry geometry;
  const std::uint64_t bytes_a_block = std::uint64_t{geometry.threads} * 16;
  const std::uint64_t whole_blocks = std::max(source_bytes(call), target_bytes(call)) / bytes_a_block;
  geometry.blocks = static_cast<unsigned>(std::min(whole_blocks + 1, most_blocks));
  return geometry;
}

}  // namespace vdnn
