// A segment tree of least room, with additions that are not pushed down.
#include "planning/room_tree.h"

#include <algorithm>
#include <limits>

namespace vdnn {

RoomTree::RoomTree(const std::vector<std::int64_t>& room) {
  while (leaves_ < static_cast<std::int32_t>(room.size())) leaves_ *= 2;
  const auto leaves = static_cast<std::size_t>(leaves_);
  added_.assign(2 * leaves, 0);
  least_.assign(2 * leaves, std::numeric_limits<std::int64_t>::max() / 2);  // beyond the step there is room
  std::copy(room.begin(), room.end(), least_.begin() + leaves_);
  for (std::size_t node = leaves - 1; node > 0; --node) least_[node] = std::min(least_[2 * node], least_[2 * node + 1]);
}

void RoomTree::add(std::int32_t begin, std::int32_t end, std::int64_t bytes) {
  if (begin < end) add_in(1, 0, leaves_, begin, end, bytes);
}

std::int32_t RoomTree::last_below(std::int32_t end, std::int64_t bytes) const {
  return end <= 0 ? -1 : last_in(1, 0, leaves_, end, bytes);
}

std::int32_t RoomTree::take_down(std::int32_t highest, std::int32_t lowest, std::int64_t bytes) {
  const std::int32_t below = std::min(highest, std::max(last_below(highest + 1, bytes), lowest - 1));
  add(below + 1, highest + 1, -bytes);
  return below;
}

// NOLINTNEXTLINE(misc-no-recursion): as deep as the tree is high
void RoomTree::add_in(std::size_t node, std::int32_t node_begin, std::int32_t node_end, std::int32_t begin,
                      std::int32_t end, std::int64_t bytes) {
  if (end <= node_begin || node_end <= begin) return;
  if (begin <= node_begin && node_end <= end) {
    added_[node] += bytes;
    least_[node] += bytes;
    return;
  }
  const std::int32_t middle = (node_begin + node_end) / 2;
  add_in(2 * node, node_begin, middle, begin, end, bytes);
  add_in(2 * node + 1, middle, node_end, begin, end, bytes);
  least_[node] = std::min(least_[2 * node], least_[2 * node + 1]) + added_[node];
}

// NOLINTNEXTLINE(misc-no-recursion): as deep as the tree is high
std::int32_t RoomTree::last_in(std::size_t node, std::int32_t node_begin, std::int32_t node_end, std::int32_t end,
                               std::int64_t bytes) const {
  if (node_begin >= end || least_[node] >= bytes) return -1;
  if (node_end - node_begin == 1) return node_begin;
  const std::int32_t middle = (node_begin + node_end) / 2;
  const std::int64_t below = bytes - added_[node];
  const std::int32_t right = last_in(2 * node + 1, middle, node_end, end, below);
  return right >= 0 ? right : last_in(2 * node, node_begin, middle, end, below);
}

}  // namespace vdnn
