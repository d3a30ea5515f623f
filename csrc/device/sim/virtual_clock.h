// Time on a simulated device: a clock per stream, one copy engine per direction, and a link that both engines share.
//
// Time depends only on the order of calls, so the same program takes the same time on any machine. Each call fixes its
// times at once: a copy never changes the result of an earlier call. While copies run in both directions, the one
// issued first keeps its rate and the other gets the rest of the link's duplex rate. Not synchronized: the device's
// lock guards it.
#pragma once

#include <cstdint>
#include <vector>

#include "device/device.h"

namespace vdnn {

struct LinkModel {
  double to_host_bytes_per_s = 12.8e9;  // PCIe gen3 x16 as DMA achieves it; hardware profiles have other links
  double to_device_bytes_per_s = 12.8e9;
  double duplex_bytes_per_s = 25.6e9;  // sum of both directions at once
  std::int64_t latency_ns = 10'000;    // per copy
};

class VirtualClock {
 public:
  explicit VirtualClock(const LinkModel& link);

  void add_stream();
  // The stream computes for this long.
  void advance(std::uint32_t stream, std::int64_t duration_ns);
  // The time at which the stream finishes the work issued to it.
  [[nodiscard]] std::int64_t now_ns(std::uint32_t stream) const { return streams_[stream].now_ns; }
  // The stream does nothing before `time_ns`; the time that it idles counts as a stall.
  void wait_until(std::uint32_t stream, std::int64_t time_ns);
  [[nodiscard]] std::int64_t stall_ns(std::uint32_t stream) const { return streams_[stream].stall_ns; }
  void copy(std::uint32_t stream, std::uint64_t bytes, CopyDirection direction);
  // The host has waited until `time_ns`: work issued later cannot start earlier.
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
    double bytes_per_s;         // while the other engine is idle
    double shared_bytes_per_s;  // while the other engine is busy
    std::int64_t free_ns = 0;
    std::vector<Interval> busy;  // in order, disjoint
    std::size_t past = 0;        // so many of them affect no later copy
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
