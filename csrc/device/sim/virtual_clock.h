// Time on a simulated device: streams with clocks, one copy engine each way, and a link that both share.
//
// Time is a function of the order of calls alone, so the same program gives the same times on any machine. Each call
// settles its times at once: a copy never changes what an earlier call was told. Where copies run both ways at once
// the one issued first keeps its rate and the other gets what the link has left; their sum is the link's duplex rate.
// Not synchronised: the device's lock guards it.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "device/device.h"

namespace vdnn {

struct LinkModel {
  double to_host_bytes_per_s = 12.8e9;  // PCIe gen3 x16 as DMA achieves it; the numbers of other machines are data
  double to_device_bytes_per_s = 12.8e9;
  double duplex_bytes_per_s = 25.6e9;  // both ways at once, together
  std::int64_t latency_ns = 10'000;    // of each copy
};

class VirtualClock {
 public:
  explicit VirtualClock(const LinkModel& link);

  void add_stream();
  // The stream is busy with computing for this long.
  void advance(std::uint32_t stream, std::int64_t duration_ns);
  // The time at which the stream has done all it was given.
  [[nodiscard]] std::int64_t now_ns(std::uint32_t stream) const { return streams_[stream].now_ns; }
  // The stream does nothing before `time_ns`; what it thereby idles is its stall.
  void wait_until(std::uint32_t stream, std::int64_t time_ns);
  [[nodiscard]] std::int64_t stall_ns(std::uint32_t stream) const { return streams_[stream].stall_ns; }
  void copy(std::uint32_t stream, std::uint64_t bytes, CopyDirection direction);
  // The host has waited until `time_ns`: nothing issued later can start earlier.
  void host_waits_until(std::int64_t time_ns);
  [[nodiscard]] std::int64_t host_ns() const { return host_ns_; }

 private:
  struct StreamClock {
    std::int64_t now_ns = 0;
    std::int64_t stall_ns = 0;
  };
  struct Interval {
    std::int64_t begin_ns;
    std::int64_t end_ns;
  };
  struct Engine {
    double bytes_per_s;         // alone
    double shared_bytes_per_s;  // while the other engine is busy
    std::int64_t free_ns = 0;
    std::deque<Interval> busy;  // in order, disjoint
  };
  [[nodiscard]] static std::int64_t end_of_copy(const Engine& engine, const Engine& other, std::int64_t begin_ns,
                                                std::uint64_t bytes);

  LinkModel link_;
  std::int64_t host_ns_ = 0;
  std::vector<StreamClock> streams_;
  Engine to_host_;
  Engine to_device_;
};

}  // namespace vdnn
