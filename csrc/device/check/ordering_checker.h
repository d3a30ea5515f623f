// Wraps any device and proves, call by call, that accesses to the same bytes are ordered by streams and events.
//
// Each stream and event has a vector clock; every copy, kernel and noted access is checked against the accesses before
// it. The check does not depend on timing: it finds a missing wait even if this run did not hit the race. The calls of
// host threads count as ordered in the order in which they arrive.
//
// [Note: Release is a write] The next owner of released memory may write it at once, so a release must be ordered after
// every reader and writer, exactly like a write.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "device/check/access_log.h"
#include "device/check/vector_clock.h"
#include "device/device.h"

namespace vdnn {

// Two accesses to the same bytes that nothing orders.
struct OrderingViolation {
  ByteRange range;
  std::string first;  // the earlier access, e.g. "write by copy device to host (operation 3)"
  std::string first_stream;
  std::string second;
  std::string second_stream;
  std::string first_issued_at;  // see set_origin(); empty if it was not called
  std::string second_issued_at;
  [[nodiscard]] std::string missing_edge() const;
};

enum class OnViolation { Throw, Collect };

class OrderingChecker final : public Device {
 public:
  OrderingChecker(std::shared_ptr<Device> inner, OnViolation on_violation);

  // Returns the violations collected since the last call.
  [[nodiscard]] std::vector<OrderingViolation> take_violations();
  // Sets the program location of the calling thread from now on; violations report it. Optional.
  void set_origin(std::string_view origin);
  // The number of accesses checked so far, so that a test can assert that it checked any.
  [[nodiscard]] std::uint64_t checked_accesses() const;
  [[nodiscard]] const std::shared_ptr<Device>& inner() const noexcept { return inner_; }

  [[nodiscard]] const DeviceInfo& info() const override { return inner_->info(); }
  [[nodiscard]] Stream create_stream(std::string_view name) override { return inner_->create_stream(name); }
  [[nodiscard]] Stream adopt_stream(std::uintptr_t native_handle) override {
    return inner_->adopt_stream(native_handle);
  }
  [[nodiscard]] std::string stream_name(Stream stream) const override { return inner_->stream_name(stream); }
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
  void close() override { inner_->close(); }
  [[nodiscard]] bool closed() const override { return inner_->closed(); }

 private:
  struct Claim {
    ByteRange range;
    Access access;
  };
  // Checks and logs the next operation of `stream`, which makes these accesses.
  void check_operation(Stream stream, const std::vector<Claim>& claims, const std::string& label);
  void withdraw(const std::vector<ByteRange>& ranges);
  Address remember(Address address, std::uint64_t bytes);
  void forget_and_free(Address address, void (Device::*free)(Address));
  VectorClock& clock_of(Stream stream);
  void host_learns(const Event& event);
  [[nodiscard]] OrderingViolation describe(ByteRange range, const LoggedAccess& first, const LoggedAccess& second);

  const std::shared_ptr<Device> inner_;
  const OnViolation on_violation_;
  mutable std::mutex mutex_;  // guards the members below
  std::uint32_t device_id_ = 0;
  std::map<std::uint32_t, VectorClock> clocks_;  // by stream index
  VectorClock host_clock_;
  AccessLog log_;
  std::map<Address, std::uint64_t> bytes_by_address_;  // of memory allocated through the checker
  std::vector<OrderingViolation> violations_;
  std::uint64_t checked_accesses_ = 0;
  std::map<std::thread::id, std::shared_ptr<const std::string>> origins_;
};

}  // namespace vdnn
