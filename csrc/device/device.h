// The interface to hardware: streams, events, copies, kernels and memory of one device.
//
// CudaDevice and SimDevice implement it; OrderingChecker and IssueLog wrap either. All other code (pool, queue, Python)
// uses a device only through this interface. Every call may be made from any thread, and none takes the GIL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "codec/kernel_call.h"

namespace vdnn {

using Address = std::uintptr_t;

struct ByteRange {
  Address address = 0;
  std::uint64_t bytes = 0;
  [[nodiscard]] Address end() const noexcept { return address + bytes; }
};

// Names a stream of one device. A value: a copy names the same stream.
struct Stream {
  std::uint32_t device_id = 0;  // 0 means no device
  std::uint32_t index = 0;
  friend bool operator==(Stream a, Stream b) noexcept { return a.device_id == b.device_id && a.index == b.index; }
};

enum class CopyDirection { DeviceToHost, HostToDevice };
enum class Timing { Off, On };
// How an operation accesses a range. A release counts as a write: the next owner may write the memory at once.
enum class Access { Read, Write, Release };

// The clocks that an ordering checker attaches to a record; opaque to all other code.
struct ClockSnapshot;

// One record of one stream. Devices derive from it; users hold it through Event.
struct EventRecord {
  Stream stream;
  std::uint64_t position = 0;  // increases along the stream: of two records, the later has the larger position
  bool timed = false;
  std::shared_ptr<const ClockSnapshot> clock;
};

// The point that a stream had reached when record() returned this value. Immutable: a wait refers to the record that
// created the event, so a later record cannot change the meaning of an earlier wait. An empty event has happened.
// Destroying an event takes no lock and does not call the driver.
class Event {
 public:
  Event() = default;
  explicit Event(std::shared_ptr<const EventRecord> record) : record_(std::move(record)) {}
  [[nodiscard]] bool empty() const noexcept { return record_ == nullptr; }
  [[nodiscard]] const EventRecord& record() const noexcept { return *record_; }

 private:
  std::shared_ptr<const EventRecord> record_;
};

struct DeviceInfo {
  std::string kind;  // "cuda" or "sim"
  std::string name;
  std::uint64_t total_bytes = 0;
  int ordinal = 0;
  int compute_capability = 0;  // 90 for 9.0; 0 for a device without one
  int numa_node = -1;          // -1: unknown
  bool integrated = false;     // shares the host's memory, so offloading saves nothing
  std::string pci_bus_id;
};

class Device {
 public:
  Device() = default;
  // Streams and events name their device, so a device can be neither copied nor moved.
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  [[nodiscard]] virtual const DeviceInfo& info() const = 0;

  // Creates a stream that does not synchronize with the legacy default stream. It lives until close().
  [[nodiscard]] virtual Stream create_stream(std::string_view name) = 0;
  // A stream with this name that nobody uses any more, or a new one. Its earlier work may still run.
  [[nodiscard]] Stream borrow_stream(std::string_view name);
  // For the next borrow_stream(). Does not call the driver, so destructors may call it.
  void give_back(std::string_view name, Stream stream) noexcept;
  // Names a stream that the caller owns. The same handle returns the same Stream.
  [[nodiscard]] virtual Stream adopt_stream(std::uintptr_t native_handle) = 0;
  [[nodiscard]] virtual std::string stream_name(Stream stream) const = 0;

  // Marks the end of the work issued to `stream` so far. Does not block.
  [[nodiscard]] virtual Event record(Stream stream, Timing timing = Timing::Off) = 0;
  // Work issued to `stream` from now on runs after `event`. The host does not block on a GPU.
  virtual void wait(Stream stream, const Event& event) = 0;
  // True if `event` has happened. Does not block.
  [[nodiscard]] virtual bool query(const Event& event) = 0;
  // Blocks the calling thread until `event` has happened.
  virtual void synchronize(const Event& event) = 0;
  // Blocks the calling thread until the work issued to `stream` so far has run.
  virtual void drain(Stream stream) = 0;
  // The time from one timed event to another. Blocks until both have happened.
  [[nodiscard]] virtual std::int64_t elapsed_ns(const Event& begin, const Event& end) = 0;

  // Issues a copy to `stream`. The host range must be pinned by this device. The caller must neither free nor change
  // the ranges until an event recorded after this call has happened; the device does not keep them alive.
  virtual void copy_async(Address target, Address source, std::uint64_t bytes, CopyDirection direction,
                          Stream stream) = 0;
  // Issues a codec kernel to `stream`. The caller keeps its memory as for copy_async().
  virtual void launch(const KernelCall& call, Stream stream) = 0;

  // Allocates page-locked host memory near the device; may take milliseconds. free_pinned() blocks until the pages are
  // unpinned.
  [[nodiscard]] virtual Address allocate_pinned(std::uint64_t bytes) = 0;
  virtual void free_pinned(Address address) = 0;
  // Allocates device memory outside torch's allocator, for probes and tests.
  [[nodiscard]] virtual Address allocate_device(std::uint64_t bytes) = 0;
  virtual void free_device(Address address) = 0;

  // Reports that work which another library (torch) issued to `stream` reads, writes or releases a range. Simulated
  // devices and checkers use this; a GPU ignores it.
  virtual void note_access(ByteRange range, Access access, Stream stream, std::string_view label) = 0;

  // Finishes the work on the device's own streams and frees everything the device owns. Idempotent. If it throws, the
  // next close() retries what could not be freed. If the driver refuses even to wait, the device stays open.
  virtual void close() = 0;
  // True once no work runs on the device's own streams and every call is refused.
  [[nodiscard]] virtual bool closed() const = 0;

 private:
  struct IdleStream {
    std::string name;
    Stream stream;
  };
  std::mutex idle_mutex_;
  std::vector<IdleStream> idle_;  // few: no more than were used at one time
};

[[nodiscard]] const char* to_string(CopyDirection direction) noexcept;
[[nodiscard]] const char* to_string(Access access) noexcept;
// A number that no other device of this process has; never 0.
[[nodiscard]] std::uint32_t next_device_id() noexcept;

}  // namespace vdnn
