// The leaves of the tree follow its inner nodes: block 0 is at index leaves_, and a node's parent at half its index.
#include "planning/room_tree.h"

#include <algorithm>
#include <limits>

namespace vdnn {

RoomTree::RoomTree(const Room& room)
    : room_(room.get_allocator()), least_(room.get_allocator()), added_(room.get_allocator()) {
  const std::size_t blocks = room.size() / block + 1;
  while (leaves_ < blocks) leaves_ *= 2;
  constexpr std::int64_t endless = std::numeric_limits<std::int64_t>::max() / 2;  // intervals beyond the step have room
  room_.assign(blocks * block, endless);
  std::copy(room.begin(), room.end(), room_.begin());
  added_.assign(2 * leaves_, 0);
  least_.assign(2 * leaves_, endless);
  for (std::size_t one = 0; one < blocks; ++one) {
    const auto begin = room_.begin() + static_cast<std::ptrdiff_t>(one * block);
    least_[leaves_ + one] = *std::min_element(begin, begin + block);
  }
  for (std::size_t node = leaves_ - 1; node > 0; --node) {
    least_[node] = std::min(least_[2 * node], least_[2 * node + 1]);
  }
}

void RoomTree::add(std::int32_t begin, std::int32_t end, std::int64_t bytes) {
  if (begin >= end) return;
  const auto from = static_cast<std::size_t>(begin);
  const auto to = static_cast<std::size_t>(end);
  const std::size_t first = from / block;
  const std::size_t last = (to - 1) / block;
  if (first == last) {
    add_in_block(from, to, bytes);
  } else {
    add_in_block(from, (first + 1) * block, bytes);
    add_in_block(last * block, to, bytes);
    add_to_blocks(first + 1, last, bytes);
  }
  settle_above(leaves_ + first, leaves_ + last);
}

void RoomTree::add_in_block(std::size_t begin, std::size_t end, std::int64_t bytes) {
  const std::size_t node = leaves_ + begin / block;
  for (std::size_t interval = begin; interval < end; ++interval) room_[interval] += bytes;
  const auto all = room_.begin() + static_cast<std::ptrdiff_t>(begin / block * block);
  least_[node] = *std::min_element(all, all + block) + added_[node];
}

void RoomTree::add_to_blocks(std::size_t begin, std::size_t end, std::int64_t bytes) {
  const auto add_to = [&](std::size_t node) {
    added_[node] += bytes;
    least_[node] += bytes;
  };
  std::size_t low = leaves_ + begin;
  std::size_t high = leaves_ + end;
  for (; low < high; low /= 2, high /= 2) {
    if (low % 2 == 1) add_to(low++);
    if (high % 2 == 1) add_to(--high);
  }
}

// Updates the ancestors of the first and the last block of a range. The blocks between them share those ancestors.
void RoomTree::settle_above(std::size_t first, std::size_t last) {
  const auto settle = [this](std::size_t node) {
    least_[node] = std::min(least_[2 * node], least_[2 * node + 1]) + added_[node];
  };
  while (first > 1) {
    first /= 2;
    last /= 2;
    settle(first);
    if (first != last) settle(last);
  }
}

std::int32_t RoomTree::last_below(std::int32_t end, std::int64_t bytes) const {
  if (end <= 0) return -1;
  std::size_t node = leaves_ + static_cast<std::size_t>(end - 1) / block;
  std::int64_t added = 0;  // bytes added to the ancestors of the node
  for (std::size_t above = node / 2; above > 0; above /= 2) added += added_[above];
  const std::int32_t here = last_in_block(static_cast<std::size_t>(end), added + added_[node], bytes);
  if (here >= 0) return here;
  // Climb until the left sibling contains such an interval, then descend to the rightmost one.
  while (node % 2 == 0 || least_[node - 1] + added >= bytes) {
    node /= 2;
    if (node <= 1) return -1;
    added -= added_[node];
  }
  --node;
  while (node < leaves_) {
    added += added_[node];
    node = 2 * node + (least_[2 * node + 1] + added < bytes ? 1 : 0);
  }
  return last_in_block((node - leaves_ + 1) * block, added + added_[node], bytes);
}

std::int32_t RoomTree::last_in_block(std::size_t end, std::int64_t added_above, std::int64_t bytes) const {
  const std::size_t begin = (end - 1) / block * block;
  for (std::size_t interval = end; interval > begin; --interval) {
    if (room_[interval - 1] + added_above < bytes) return static_cast<std::int32_t>(interval - 1);
  }
  return -1;
}

std::int32_t RoomTree::take_down(std::int32_t highest, std::int32_t lowest, std::int64_t bytes) {
  const std::int32_t below = std::min(highest, std::max(last_below(highest + 1, bytes), lowest - 1));
  add(below + 1, highest + 1, -bytes);
  return below;
}

}  // namespace vdnn
