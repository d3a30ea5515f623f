// Stands for torch's caching allocator: "device" memory from malloc, reused along the stream that owned it.
//
// A dropped buffer says so to the device (Access::Release, on its owner stream) and its memory goes to the next
// buffer of the same stream, with nothing to wait for: exactly what makes a missing wait harmful. It never goes to
// another stream, as torch's does not. Where the stream runs on the host's own threads, dropped memory is also
// overwritten and, under AddressSanitizer, poisoned, so that any late access is seen.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "device/device.h"

namespace vdnn::stress {

// Where a stream runs: on the thread that calls (torch's CPU operations, the legacy stream of the fake driver), or
// on its own.
enum class Runs { OnCallers, OnItsOwn };

struct ComputeOrder {
  Stream stream;
  Runs runs = Runs::OnCallers;
};

class DeviceHeap;

// One storage. Whoever drops the last reference releases it.
class Buffer {
 public:
  Buffer(std::shared_ptr<DeviceHeap> heap, Address address, std::uint64_t bytes, ComputeOrder owner)
      : heap_(std::move(heap)), address_(address), bytes_(bytes), owner_(owner) {}
  Buffer(const Buffer&) = delete;  // one allocation, one release
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();
  [[nodiscard]] Address address() const noexcept { return address_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

 private:
  std::shared_ptr<DeviceHeap> heap_;
  Address address_;
  std::uint64_t bytes_;
  ComputeOrder owner_;
};

class DeviceHeap : public std::enable_shared_from_this<DeviceHeap> {
 public:
  // Does not keep the device: some scenarios drop it first.
  explicit DeviceHeap(const std::shared_ptr<Device>& device) : device_(device) { ++live_heaps_; }
  DeviceHeap(const DeviceHeap&) = delete;  // owns its memory
  DeviceHeap& operator=(const DeviceHeap&) = delete;
  // Nothing may be running any more.
  ~DeviceHeap();

  [[nodiscard]] std::shared_ptr<Buffer> allocate(std::uint64_t bytes, ComputeOrder owner);
  // Buffers dropped while their thread was inside a call that promised to drop none.
  [[nodiscard]] std::uint64_t wrongly_dropped() const noexcept { return wrongly_dropped_; }
  [[nodiscard]] std::uint64_t live_buffers() const noexcept { return live_buffers_; }
  // Buffers keep their heap, so none is left once no heap is.
  [[nodiscard]] static std::uint64_t live_heaps() noexcept { return live_heaps_; }

 private:
  friend class Buffer;
  struct Chunk {
    Address address;
    std::uint64_t bytes;
  };
  [[nodiscard]] Chunk take(std::uint64_t bytes, std::uint32_t stream);
  void give_back(ByteRange range, ComputeOrder owner) noexcept;

  static std::atomic<std::uint64_t> live_heaps_;
  const std::weak_ptr<Device> device_;
  std::atomic<std::uint64_t> wrongly_dropped_{0};
  std::atomic<std::uint64_t> live_buffers_{0};
  std::mutex mutex_;                                                            // guards what follows
  std::map<Address, std::uint64_t> bytes_by_address_;                           // of every chunk
  std::map<std::uint32_t, std::multimap<std::uint64_t, Address>> free_chunks_;  // by stream, by bytes
};

// While one lives, a call that promises to drop no reference is running on this thread.
class DropsNothing {
 public:
  DropsNothing() noexcept { active_ = true; }
  DropsNothing(const DropsNothing&) = delete;  // belongs to its scope
  DropsNothing& operator=(const DropsNothing&) = delete;
  ~DropsNothing() { active_ = false; }
  [[nodiscard]] static bool active() noexcept { return active_; }

 private:
  static thread_local bool active_;
};

// Runs one call of the queue, which hands references back and drops none.
template <class Call>
auto dropping_nothing(const Call& call) {
  const DropsNothing promise;
  return call();
}

}  // namespace vdnn::stress
