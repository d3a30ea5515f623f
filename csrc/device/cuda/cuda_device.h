// A GPU, through the driver API.
//
// Shares the primary context with torch, so torch's pointers and stream handles can be used directly. close() frees
// everything. A device that is destroyed without close() is parked until close_parked(), which the next device that is
// opened calls, because a destructor may run anywhere and must not call the driver.
#pragma once

#include <memory>
#include <string>

#include "device/device.h"

namespace vdnn {

class CudaDevice final : public Device {
 public:
  // Throws DriverUnavailable, InvalidArgument (ordinal) or DriverFailure.
  CudaDevice(int ordinal, const std::string& library);
  ~CudaDevice() override;
  // Closes the devices that were destroyed without close().
  static void close_parked();

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

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace vdnn
