// Room at every interval of a step: taking some over a range, and finding how far down it holds, in logarithmic time.
#pragma once

#include <cstdint>
#include <vector>

namespace vdnn {

class RoomTree {
 public:
  explicit RoomTree(const std::vector<std::int64_t>& room);

  // From `begin` up to and without `end`.
  void add(std::int32_t begin, std::int32_t end, std::int64_t bytes);
  // The highest interval below `end` with less room than `bytes`; -1 if there is none.
  [[nodiscard]] std::int32_t last_below(std::int32_t end, std::int64_t bytes) const;
  // Takes so much from `highest` on, downwards as long as there is as much, at most to `lowest`. Returns the interval
  // below the last that it was taken from: `highest` itself if that has not enough.
  std::int32_t take_down(std::int32_t highest, std::int32_t lowest, std::int64_t bytes);

 private:
  void add_in(std::size_t node, std::int32_t node_begin, std::int32_t node_end, std::int32_t begin, std::int32_t end,
              std::int64_t bytes);
  [[nodiscard]] std::int32_t last_in(std::size_t node, std::int32_t node_begin, std::int32_t node_end, std::int32_t end,
                                     std::int64_t bytes) const;

  std::int32_t leaves_ = 1;
  std::vector<std::int64_t> least_;  // of the node's range, without what was added above it
  std::vector<std::int64_t> added_;  // to the node's whole range
};

}  // namespace vdnn
