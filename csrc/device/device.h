// The seam to hardware: streams, events, copies, kernels and memory of one device.
//
// CudaDevice and SimDevice implement it; OrderingChecker wraps either. Everything above (pool, queue, Python)
// speaks to a device only through these calls. All of them may be made from any thread. None takes the GIL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "codec/kernel_call.h"

namespace vdnn {

using Address = std::uintptr_t;

struct ByteRange {
  Address address = 0;
  std::uint64_t bytes = 0;
  [[nodiscard]] Address end() const noexcept { return address + bytes; }
};

// Names a stream of one device. A value: copying it copies no stream.
struct Stream {
  std::uint32_t device_id = 0;  // 0 is no device
  std::uint32_t index = 0;
  friend bool operator==(Stream a, Stream b) noexcept { return a.device_id == b.device_id && a.index == b.index; }
};

enum class CopyDirection { DeviceToHost, HostToDevice };
enum class Timing { Off, On };
// What happens to a range. Release is a write: whoever gets the memory next may write it at once.
enum class Access { Read, Write, Release };

// What an ordering checker knows at a record; opaque to everyone else.
struct ClockSnapshot;

// One record of one stream. Devices subclass it; users hold it through Event.
struct EventRecord {
  Stream stream;
  std::uint64_t position = 0;  // grows along the stream: of two records of one stream the later has the larger
  bool timed = false;
  std::shared_ptr<const ClockSnapshot> clock;
};

// The point that a stream had reached when record() returned this value. Immutable: a wait refers to the record
// that made the event, so a later record can never change what an earlier wait meant. An empty event has happened.
// Dropping one takes no lock and calls no driver.
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
  int compute_capability = 0;  // 90 for 9.0; 0 where it has none
  int numa_node = -1;          // -1: unknown
  bool integrated = false;     // shares the host's memory: offloading gains nothing
  std::string pci_bus_id;
};

class Device {
 public:
  Device() = default;
  // Identity matters (streams and events name their device), so a device is neither copied nor moved.
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  [[nodiscard]] virtual const DeviceInfo& info() const = 0;

  // A new stream that does not synchronise with the legacy default stream. Lives until close().
  [[nodiscard]] virtual Stream create_stream(std::string_view name) = 0;
  // Names a stream that somebody else owns. The same handle gives the same Stream.
  [[nodiscard]] virtual Stream adopt_stream(std::uintptr_t native_handle) = 0;
  [[nodiscard]] virtual std::string stream_name(Stream stream) const = 0;

  // Marks the end of what is on `stream` now. Does not block.
  [[nodiscard]] virtual Event record(Stream stream, Timing timing = Timing::Off) = 0;
  // Whatever is put on `stream` from now on runs after `event`. The host does not block on a GPU.
  virtual void wait(Stream stream, const Event& event) = 0;
  // True if `event` has happened. Does not block.
  [[nodiscard]] virtual bool query(const Event& event) = 0;
  // Blocks the calling thread until `event` has happened.
  virtual void synchronize(const Event& event) = 0;
  // Blocks the calling thread until all that is on `stream` now has run.
  virtual void drain(Stream stream) = 0;
  // From one timed event to another; synchronises with both.
  [[nodiscard]] virtual std::int64_t elapsed_ns(const Event& begin, const Event& end) = 0;

  // Puts a copy on `stream`. The host range must be pinned by this device. Both ranges must stay as they are until
  // an event recorded after this call has happened: nobody else keeps them.
  virtual void copy_async(Address target, Address source, std::uint64_t bytes, CopyDirection direction,
                          Stream stream) = 0;
  // Puts one of the codec's kernels on `stream`, under the same promise.
  virtual void launch(const KernelCall& call, Stream stream) = 0;

  // Page-locked host memory near the device; may take milliseconds. Free blocks until the pages are given back.
  [[nodiscard]] virtual Address allocate_pinned(std::uint64_t bytes) = 0;
  virtual void free_pinned(Address address) = 0;
  // Device memory outside torch's allocator: for probes and tests.
  [[nodiscard]] virtual Address allocate_device(std::uint64_t bytes) = 0;
  virtual void free_device(Address address) = 0;

  // Says that work put on `stream` by somebody else (torch) reads, writes or gives up a range. Simulated devices
  // and checkers act on it; a GPU does not.
  virtual void note_access(ByteRange range, Access access, Stream stream, std::string_view label) = 0;

  // Finishes what is on the device's own streams and gives back all it owns. Idempotent; if it throws, what could
  // not be given back is tried again by the next close(). Where even waiting is refused it stays open.
  virtual void close() = 0;
  // Nothing runs on its own streams any more, and every call is refused.
  [[nodiscard]] virtual bool closed() const = 0;
};

[[nodiscard]] const char* to_string(CopyDirection direction) noexcept;
[[nodiscard]] const char* to_string(Access access) noexcept;
// A number no other device of this process has; never 0.
[[nodiscard]] std::uint32_t next_device_id() noexcept;

}  // namespace vdnn
