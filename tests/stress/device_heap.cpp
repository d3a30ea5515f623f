// Chunks, their reuse, and what happens to a dropped buffer.
#include "device_heap.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "device/errors.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define VDNN_STRESS_UNDER_ASAN
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define VDNN_STRESS_UNDER_ASAN
#endif
#ifdef VDNN_STRESS_UNDER_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace vdnn::stress {
namespace {

constexpr int garbage = 0xFF;

void* pointer(Address address) {
  return reinterpret_cast<void*>(address);
}

void forbid([[maybe_unused]] Address address, [[maybe_unused]] std::uint64_t bytes) {
#ifdef VDNN_STRESS_UNDER_ASAN
  __asan_poison_memory_region(pointer(address), bytes);
#endif
}

void allow([[maybe_unused]] Address address, [[maybe_unused]] std::uint64_t bytes) {
#ifdef VDNN_STRESS_UNDER_ASAN
  __asan_unpoison_memory_region(pointer(address), bytes);
#endif
}

}  // namespace

std::atomic<std::uint64_t> DeviceHeap::live_heaps_{0};
thread_local bool DropsNothing::active_ = false;

Buffer::~Buffer() {
  heap_->give_back({address_, bytes_}, owner_);
}

DeviceHeap::~DeviceHeap() {
  --live_heaps_;
  for (const auto& [address, bytes] : bytes_by_address_) {
    allow(address, bytes);
    std::free(pointer(address));
  }
}

DeviceHeap::Chunk DeviceHeap::take(std::uint64_t bytes, std::uint32_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& free = free_chunks_[stream];
  const auto found = free.lower_bound(bytes);
  // Up to twice as large: exact sizes seldom come again, and reuse is the point.
  if (found != free.end() && found->first <= 2 * bytes) {
    const Chunk chunk{found->second, found->first};
    free.erase(found);
    return chunk;
  }
  const auto address = reinterpret_cast<Address>(std::malloc(bytes));
  if (address == 0) throw std::bad_alloc();
  bytes_by_address_.emplace(address, bytes);
  return {address, bytes};
}

std::shared_ptr<Buffer> DeviceHeap::allocate(std::uint64_t bytes, ComputeOrder owner) {
  const Chunk chunk = take(bytes, owner.stream.index);
  if (owner.runs == Runs::OnCallers) {
    forbid(chunk.address, chunk.bytes);
    allow(chunk.address, bytes);
  }
  ++live_buffers_;
  return std::make_shared<Buffer>(shared_from_this(), chunk.address, bytes, owner);
}

void DeviceHeap::give_back(ByteRange range, ComputeOrder owner) noexcept {
  if (DropsNothing::active()) ++wrongly_dropped_;
  try {
    if (const auto device = device_.lock()) device->note_access(range, Access::Release, owner.stream, "drop");
  } catch (const Error&) {
    // Closed or lost: no work is left to be ordered against.
  }
  if (owner.runs == Runs::OnCallers) std::memset(pointer(range.address), garbage, range.bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::uint64_t bytes = bytes_by_address_.at(range.address);
  if (owner.runs == Runs::OnCallers) forbid(range.address, bytes);
  free_chunks_[owner.stream.index].emplace(bytes, range.address);
  --live_buffers_;
}

}  // namespace vdnn::stress
