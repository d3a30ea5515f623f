// Room at every interval of a step: taking some over a range, and finding how far down it holds, in logarithmic time.
//
// A segment tree over blocks of intervals: within a block they are gone through one by one, which is quicker than a
// tree of so few. What is added to a whole node stays there, and nothing recurses: a search for a plan adds and asks a
// million times.
#pragma once

#include <cstddef>
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
  static constexpr std::size_t block = 16;

  void add_in_block(std::size_t begin, std::size_t end, std::int64_t bytes);
  void add_to_blocks(std::size_t begin, std::size_t end, std::int64_t bytes);
  void settle_above(std::size_t first, std::size_t last);
  // In the block, below interval `end`, where so much was added above; -1 if there is none.
  [[nodiscard]] std::int32_t last_in_block(std::size_t end, std::int64_t added_above, std::int64_t bytes) const;

  std::size_t leaves_ = 1;           // blocks, and some more so that they are a power of two
  std::vector<std::int64_t> room_;   // of each interval, without what was added to its block or above
  std::vector<std::int64_t> least_;  // of the node's range, without what was added above it
  std::vector<std::int64_t> added_;  // to the node's whole range
};

}  // namespace vdnn
