// How a codec kernel is launched: the convention between the kernels and their callers.
//
// A kernel takes one parameter, the KernelCall by value, a one-dimensional grid of `blocks` by `threads`, and no
// dynamic shared memory. Kernels stride over the grid and are correct for any number of blocks and any number of
// threads that is a multiple of 32, up to 1024; launch_geometry() returns a fast choice. ContentHash adds to its
// target: set the 8 bytes to zero before the launch, on the same stream.
#pragma once

#include <algorithm>
#include <cstdint>

#include "codec/codec.h"

namespace vdnn {

struct LaunchGeometry {
  unsigned blocks = 1;
  unsigned threads = 256;
};

// Enough threads that each handles 16 bytes of the wider side. The cap is about 16 blocks per multiprocessor of the
// largest GPUs: further blocks would only queue (and, for the hash, add atomic additions).
[[nodiscard]] inline LaunchGeometry launch_geometry(const KernelCall& call) noexcept {
  constexpr std::uint64_t most_blocks = 2048;
  LaunchGeometry geometry;
  const std::uint64_t bytes_a_block = std::uint64_t{geometry.threads} * 16;
  const std::uint64_t whole_blocks = std::max(source_bytes(call), target_bytes(call)) / bytes_a_block;
  geometry.blocks = static_cast<unsigned>(std::min(whole_blocks + 1, most_blocks));
  return geometry;
}

}  // namespace vdnn
