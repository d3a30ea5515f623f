// Wraps any device and logs, in order, what is issued to its streams, so that tests can compare two devices.
//
// One line per call: "record s1 e3", "wait s2 e3", "copy_d2h s1 4096", "launch s1 vdnn_content_hash". Streams and
// records are numbered from 1 in the order of their first mention. Queries and waits of the host are not logged.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/device.h"

namespace vdnn {

class IssueLog final : public Device {
 public:
  explicit IssueLog(std::shared_ptr<Device> inner);

  // Returns the lines logged since the last call.
  [[nodiscard]] std::vector<std::string> take_issues();

  [[nodiscard]] const DeviceInfo& info() const override { return inner_->info(); }
  [[nodiscard]] Stream create_stream(std::string_view name) override { return inner_->create_stream(name); }
  [[nodiscard]] Stream adopt_stream(std::uintptr_t native_handle) override {
    return inner_->adopt_stream(native_handle);
  }
  [[nodiscard]] std::string stream_name(Stream stream) const override { return inner_->stream_name(stream); }
  [[nodiscard]] Event record(Stream stream, Timing timing) override;
  void wait(Stream stream, const Event& event) override;
  [[nodiscard]] bool query(const Event& event) override { return inner_->query(event); }
  void synchronize(const Event& event) override { inner_->synchronize(event); }
  void drain(Stream stream) override { inner_->drain(stream); }
  [[nodiscard]] std::int64_t elapsed_ns(const Event& begin, const Event& end) override {
    return inner_->elapsed_ns(begin, end);
  }
  void copy_async(Address target, Address source, std::uint64_t bytes, CopyDirection direction, Stream stream) override;
  void launch(const KernelCall& call, Stream stream) override;
  [[nodiscard]] Address allocate_pinned(std::uint64_t bytes) override { return inner_->allocate_pinned(bytes); }
  void free_pinned(Address address) override { inner_->free_pinned(address); }
  [[nodiscard]] Address allocate_device(std::uint64_t bytes) override { return inner_->allocate_device(bytes); }
  void free_device(Address address) override { inner_->free_device(address); }
  void note_access(ByteRange range, Access access, Stream stream, std::string_view label) override {
    inner_->note_access(range, access, stream, label);
  }
  void close() override;
  [[nodiscard]] bool closed() const override { return inner_->closed(); }

 private:
  void add(const char* verb, Stream stream, const std::string& detail);
  // Requires the mutex.
  [[nodiscard]] std::string event_name(const Event& event);

  const std::shared_ptr<Device> inner_;
  std::mutex mutex_;  // guards the members below, and keeps the lines in the order of the calls
  std::vector<std::string> issues_;
  std::map<std::uint32_t, std::size_t> streams_;
  std::map<const EventRecord*, std::size_t> records_;
  std::vector<Event> seen_;  // kept alive, so that no other record gets the same address
};

}  // namespace vdnn
