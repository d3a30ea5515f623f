// Just enough of CUDA to compile kernels.cu as C++ and run it without a GPU, thread by thread (fiber_block.h).
//
// Blocks run one after another. A wide access at an address that is not aligned for it ends the program, as it would
// end a GPU's context. What this cannot show: races between threads, and whatever nvcc makes of the source.
#pragma once

#include <cstdint>
#include <cstring>

#include "fiber_block.h"

#define __global__
#define __device__
// Blocks run one after another, so one static is every block's own.
#define __shared__ static

namespace cuda_on_host {

struct Dimension {
  unsigned x = 1;
};
struct alignas(16) TwoWords {
  unsigned long long x, y;
};

}  // namespace cuda_on_host

// The names below are CUDA's own.
inline cuda_on_host::Dimension gridDim, blockDim, blockIdx, threadIdx;
using ulonglong2 = cuda_on_host::TwoWords;

template <typename T>
T __ldcg(const T* source) {
  if (reinterpret_cast<std::uintptr_t>(source) % sizeof(T) != 0) cuda_on_host::fail("misaligned wide load");
  T value;
  std::memcpy(&value, static_cast<const void*>(source), sizeof(T));
  return value;
}

template <typename T>
void __stcg(T* target, T value) {
  if (reinterpret_cast<std::uintptr_t>(target) % sizeof(T) != 0) cuda_on_host::fail("misaligned wide store");
  std::memcpy(static_cast<void*>(target), &value, sizeof(T));
}

inline void atomicAdd(unsigned long long* target, unsigned long long value) {
  __stcg(target, __ldcg(target) + value);
}

inline void __syncthreads() {
  auto& block = cuda_on_host::Block::instance();
  block.meet(&cuda_on_host::Fiber::block_meetings, 0, block.threads());
}

inline std::uint64_t __shfl_down_sync(unsigned mask, std::uint64_t value, unsigned distance) {
  auto& block = cuda_on_host::Block::instance();
  const unsigned me = block.current();
  const unsigned first = me / 32 * 32;
  if (mask != 0xffffffffu || block.threads() % 32 != 0) cuda_on_host::fail("a shuffle that is not of a whole warp");
  const unsigned parity = block.fiber(me).warp_meetings % 2;
  block.fiber(me).offered[parity] = value;
  block.meet(&cuda_on_host::Fiber::warp_meetings, first, 32);
  return me + distance < first + 32 ? block.fiber(me + distance).offered[parity] : value;
}

namespace cuda_on_host {

// kernel<<<blocks, threads>>>(argument)
template <typename Argument>
void launch(void (*kernel)(Argument), const Argument& argument, unsigned blocks, unsigned threads) {
  gridDim.x = blocks;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    Block::instance().run(threads, [&] { kernel(argument); }, [](unsigned thread) { threadIdx.x = thread; });
  }
}

}  // namespace cuda_on_host
