// A device made of host threads, for machines without a GPU: real ordering, virtual time.
//
// Ordinary host memory stands for device memory. Created streams really copy, after the call and in any legal order
// (see sim_streams.h); adopted streams are the calling thread, on which torch's CPU operations run. Released memory is
// overwritten with 0xFF (a NaN in every float type), so that a late read cannot return correct data by luck. A
// VirtualClock keeps the time. With moves_bytes off, the device copies and allocates nothing and only keeps time, for
// tensors without data.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "device/device.h"
#include "device/sim/sim_streams.h"
#include "device/sim/virtual_clock.h"

namespace vdnn {

struct SimOptions {
  Schedule schedule = Schedule::Eager;
  std::uint64_t seed = 0;
  bool poison = true;
  bool moves_bytes = true;
  LinkModel link;
  std::string name = "simulated device";
  std::uint64_t total_bytes = std::uint64_t{16} << 30;
};

class SimDevice final : public Device {
 public:
  explicit SimDevice(const SimOptions& options);
  // Operations that are still queued are dropped, not run: their memory may already be freed.
  ~SimDevice() override;

  [[nodiscard]] const DeviceInfo& info() const override;
  [[nodiscard]] Stream create_stream(std::string_view name) override;
  [[nodiscard]] Stream adopt_stream(std::uintptr_t native_handle) override;
  [[nodiscard]] std::string stream_name(Stream stream) const override;
  [[nodiscard]] Event record(Stream stream, Timing timing) override;
  void wait(Stream stream, const Event& event) override;
  [[nodiscard]] bool query(const Event& event) override;
  void synchronize(const Event& event) override;
  void drain(Stream stream) override;
  [[nodiscard]] std::int64_t elapsed_ns(const Event& begin, const Event& end) override;
  void copy_async(Address target, Address source, std::uint64_t bytes, CopyDirection direction, Stream stream) override;
  void launch(const KernelCall& call, Stream stream) override;
  [[nodiscard]] Address allocate_pinned(std::uint64_t bytes) override;
  void free_pinned(Address address) override;
  [[nodiscard]] Address allocate_device(std::uint64_t bytes) override;
  void free_device(Address address) override;
  void note_access(ByteRange range, Access access, Stream stream, std::string_view label) override;
  void close() override;
  [[nodiscard]] bool closed() const override;

  // Issues arbitrary work to one of the device's own streams.
  void enqueue(Stream stream, std::function<void()> work);
  // Makes one of the device's own streams run at once, or only when needed. Not for the random schedule.
  void set_eager(Stream stream, bool eager);
  [[nodiscard]] std::uint32_t id() const noexcept;
  // Under the lazy schedule, runnable() returns the device's own streams whose next operation may run now. run_one()
  // runs the next operation of a stream and blocks until it has run.
  [[nodiscard]] std::vector<Stream> runnable() const;
  void run_one(Stream stream);

  // Virtual time. advance(): the stream computes for this long. now_ns(): the time at which it finishes the work issued
  // to it. stall_ns(): how long it has waited for other streams.
  void advance(Stream stream, std::int64_t duration_ns);
  [[nodiscard]] std::int64_t now_ns(Stream stream) const;
  [[nodiscard]] std::int64_t stall_ns(Stream stream) const;
  // The virtual time of an event. Unlike elapsed_ns() it does not wait, so it does not change any time.
  [[nodiscard]] std::int64_t event_ns(const Event& event) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace vdnn
