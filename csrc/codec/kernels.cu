// The codec kernels for CUDA. launch_geometry.h describes how they are launched; the CPU reference (run_on_cpu)
// defines what they compute, bit for bit.
//
// Every kernel has two loops. The wide loop moves 16 bytes of the wider side per iteration of a thread and runs only if
// both sides are aligned for it; memory from torch's allocator always is. The narrow loop handles the remaining
// elements (the tail, or all of them) with reads and writes of single bytes. All threads of a launch take the same
// path.

#include <cstdint>
#include <cstring>

#include "codec/bit_bytes.h"
#include "codec/content_hash.h"
#include "codec/kernel_call.h"

namespace {

using std::uint16_t;
using std::uint64_t;
using std::uint8_t;
using vdnn::KernelCall;

constexpr unsigned wide_bytes = 16;
constexpr unsigned warp_threads = 32;
constexpr unsigned most_warps = 32;  // in a block: CUDA allows at most 1024 threads per block

template <typename Integer, unsigned count>
struct Lanes {
  Integer lane[count];
};

__device__ uint64_t first_turn() {
  return static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ uint64_t turn_stride() {
  return static_cast<uint64_t>(gridDim.x) * blockDim.x;
}
__device__ bool aligned(uint64_t address, unsigned bytes) {
  return address % bytes == 0;
}

// The type that one load or store instruction of `bytes` bytes moves.
template <unsigned bytes>
struct Raw;
template <>
struct Raw<2> {
  using Type = unsigned short;
};
template <>
struct Raw<16> {
  using Type = ulonglong2;
};

// One load or store of sizeof(T) bytes, at an address that the caller has found to be aligned. It bypasses the L1
// cache, because every byte is touched once, but uses the L2 cache: a copy to or from the host follows or preceded the
// kernel.
template <typename T>
__device__ T load_aligned(uint64_t address) {
  const auto raw = __ldcg(reinterpret_cast<const typename Raw<sizeof(T)>::Type*>(address));
  T value;
  memcpy(&value, &raw, sizeof(T));
  return value;
}
template <typename T>
__device__ void store_aligned(uint64_t address, const T& value) {
  typename Raw<sizeof(T)>::Type raw;
  memcpy(&raw, &value, sizeof(T));
  __stcg(reinterpret_cast<typename Raw<sizeof(T)>::Type*>(address), raw);
}

// A load or store at any address: memcpy from a byte pointer compiles to loads and stores of single bytes.
template <typename T>
__device__ T load_bytes(uint64_t address) {
  T value;
  memcpy(&value, reinterpret_cast<const uint8_t*>(address), sizeof(T));
  return value;
}
template <typename T>
__device__ void store_bytes(uint64_t address, T value) {
  memcpy(reinterpret_cast<uint8_t*>(address), &value, sizeof(T));
}

// Loads up to 8 bytes as a word, padded with zeros, and never reads beyond them.
__device__ uint64_t load_word(uint64_t address, uint64_t bytes) {
  if (bytes >= 8) return load_bytes<uint64_t>(address);
  uint64_t word = 0;
  for (unsigned i = 0; i < bytes; ++i) word |= static_cast<uint64_t>(load_bytes<uint8_t>(address + i)) << (8 * i);
  return word;
}

// Reduces the sums of a block's threads and adds the total to the hash: one atomic addition per block.
__device__ void add_sums_of_block(uint64_t sum, uint64_t target) {
  __shared__ uint64_t sum_of_warp[most_warps];
  for (unsigned distance = warp_threads / 2; distance > 0; distance /= 2) {
    sum += __shfl_down_sync(0xffffffffu, sum, distance);
  }
  if (threadIdx.x % warp_threads == 0) sum_of_warp[threadIdx.x / warp_threads] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (unsigned warp = 1; warp < blockDim.x / warp_threads; ++warp) sum += sum_of_warp[warp];
  atomicAdd(reinterpret_cast<unsigned long long*>(target), static_cast<unsigned long long>(sum));
}

}  // namespace

// A thread writes whole bytes of the target, so no two threads write the same byte.
extern "C" __global__ void vdnn_pack_bits(vdnn::KernelCall call) {
  using Words = Lanes<uint64_t, 2>;
  const bool wide = aligned(call.source, wide_bytes) && aligned(call.target, 2);
  const uint64_t wide_turns = wide ? call.count / wide_bytes : 0;
  for (uint64_t turn = first_turn(); turn < wide_turns; turn += turn_stride()) {
    const auto words = load_aligned<Words>(call.source + turn * wide_bytes);
    const unsigned bits = vdnn::gather_bits(words.lane[0]) | vdnn::gather_bits(words.lane[1]) << 8;
    store_aligned(call.target + turn * 2, static_cast<uint16_t>(bits));
  }
  const uint64_t all_bytes = vdnn::eighths(call.count);
  for (uint64_t i = wide_turns * 2 + first_turn(); i < all_bytes; i += turn_stride()) {
    store_bytes(call.target + i, vdnn::gather_bits(load_word(call.source + i * 8, call.count - i * 8)));
  }
}

extern "C" __global__ void vdnn_unpack_bits(vdnn::KernelCall call) {
  using Words = Lanes<uint64_t, 2>;
  const bool wide = aligned(call.source, 2) && aligned(call.target, wide_bytes);
  const uint64_t wide_turns = wide ? call.count / wide_bytes : 0;
  for (uint64_t turn = first_turn(); turn < wide_turns; turn += turn_stride()) {
    const auto bits = load_aligned<uint16_t>(call.source + turn * 2);
    Words words;
    words.lane[0] = vdnn::spread_bits(static_cast<uint8_t>(bits));
    words.lane[1] = vdnn::spread_bits(static_cast<uint8_t>(bits >> 8));
    store_aligned(call.target + turn * wide_bytes, words);
  }
  for (uint64_t i = wide_turns * wide_bytes + first_turn(); i < call.count; i += turn_stride()) {
    const uint8_t bits = load_bytes<uint8_t>(call.source + i / 8);
    store_bytes(call.target + i, static_cast<uint8_t>(bits >> (i % 8) & 1));
  }
}

// Adds to the target, which must be zero when the kernel starts.
extern "C" __global__ void vdnn_content_hash(vdnn::KernelCall call) {
  using Words = Lanes<uint64_t, 2>;
  uint64_t sum = first_turn() == 0 ? vdnn::hash_length_term(call.count) : 0;
  const uint64_t wide_turns = aligned(call.source, wide_bytes) ? call.count / wide_bytes : 0;
  for (uint64_t turn = first_turn(); turn < wide_turns; turn += turn_stride()) {
    const auto words = load_aligned<Words>(call.source + turn * wide_bytes);
    sum += vdnn::hash_term(words.lane[0], 2 * turn) + vdnn::hash_term(words.lane[1], 2 * turn + 1);
  }
  const uint64_t all_words = vdnn::eighths(call.count);
  for (uint64_t i = wide_turns * 2 + first_turn(); i < all_words; i += turn_stride()) {
    sum += vdnn::hash_term(load_word(call.source + i * 8, call.count - i * 8), i);
  }
  add_sums_of_block(sum, call.target);
}
