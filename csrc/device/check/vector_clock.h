// A vector clock: for each stream, how many of its operations are ordered before a point.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace vdnn {

class VectorClock {
 public:
  [[nodiscard]] std::uint64_t at(std::uint32_t stream) const noexcept {
    return stream < counts_.size() ? counts_[stream] : 0;
  }
  // Counts one more operation of `stream` and returns its number, from 1.
  std::uint64_t tick(std::uint32_t stream) {
    if (stream >= counts_.size()) counts_.resize(stream + 1, 0);
    return ++counts_[stream];
  }
  void join(const VectorClock& other) {
    if (other.counts_.size() > counts_.size()) counts_.resize(other.counts_.size(), 0);
    for (std::size_t stream = 0; stream < other.counts_.size(); ++stream) {
      counts_[stream] = std::max(counts_[stream], other.counts_[stream]);
    }
  }

 private:
  std::vector<std::uint64_t> counts_;
};

// The clock of a stream when an event was recorded on it; carried by the event.
struct ClockSnapshot {
  VectorClock clock;
};

}  // namespace vdnn
