// The free bytes ("room") of every interval of a step: changes a range, and finds where room ends, in logarithmic time.
//
// A segment tree over blocks of intervals. Within a block a linear scan is faster than a tree. Bytes added to a whole
// node are stored in that node, and no function recurses, because a search for a plan makes a million calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <vector>

namespace vdnn {

class RoomTree {
 public:
  using Room = std::pmr::vector<std::int64_t>;

  // Takes its memory where `room` has it.
  explicit RoomTree(const Room& room);

  // Adds `bytes` to the intervals [begin, end).
  void add(std::int32_t begin, std::int32_t end, std::int64_t bytes);
  // Returns the highest interval below `end` with less room than `bytes`, or -1.
  [[nodiscard]] std::int32_t last_below(std::int32_t end, std::int64_t bytes) const;
  // Subtracts `bytes` from interval `highest` and downwards, while an interval has that much room, at most to `lowest`.
  // Returns the interval below the last that was reduced: `highest` itself if that one has not enough room.
  std::int32_t take_down(std::int32_t highest, std::int32_t lowest, std::int64_t bytes);

 private:
  static constexpr std::size_t block = 16;

  void add_in_block(std::size_t begin, std::size_t end, std::int64_t bytes);
  void add_to_blocks(std::size_t begin, std::size_t end, std::int64_t bytes);
  void settle_above(std::size_t first, std::size_t last);
  // The same as last_below() within the block of interval end - 1, to whose nodes `added_above` was added; or -1.
  [[nodiscard]] std::int32_t last_in_block(std::size_t end, std::int64_t added_above, std::int64_t bytes) const;

  std::size_t leaves_ = 1;  // the number of blocks, rounded up to a power of two
  Room room_;               // per interval, without the bytes added to its block or above
  Room least_;              // the least room in a node's range, without the bytes added above it
  Room added_;              // bytes added to a node's whole range
};

}  // namespace vdnn
