// Implements best fit, and coalescing inside a slab.
#include "memory/slab_space.h"

#include <algorithm>
#include <iterator>

namespace vdnn {

void SlabSpace::insert_free(SlabState& slab, Address address, FreeRange range) {
  by_size_.emplace(range.bytes, address);
  slab.free.emplace(address, std::move(range));
}

void SlabSpace::erase_free(SlabState& slab, std::map<Address, FreeRange>::iterator range) {
  by_size_.erase({range->second.bytes, range->first});
  slab.free.erase(range);
}

SlabSpace::Slabs::iterator SlabSpace::slab_of(Address address) {
  return std::prev(slabs_.upper_bound(address));
}

void SlabSpace::add_slab(ByteRange range, LastUses last_uses) {
  SlabState& slab = slabs_[range.address];
  slab.bytes = range.bytes;
  slab.emptied_at = ++emptied_counter_;
  insert_free(slab, range.address, {range.bytes, std::move(last_uses)});
}

std::vector<SlabSpace::Slab> SlabSpace::idle_slabs() const {
  std::vector<Slabs::const_iterator> idle;
  for (auto slab = slabs_.begin(); slab != slabs_.end(); ++slab) {
    if (slab->second.taken_bytes == 0) idle.push_back(slab);
  }
  std::sort(idle.begin(), idle.end(), [](auto a, auto b) { return a->second.emptied_at < b->second.emptied_at; });
  std::vector<Slab> result;
  result.reserve(idle.size());
  for (const auto slab : idle) {
    result.push_back({{slab->first, slab->second.bytes}, slab->second.free.begin()->second.last_uses});
  }
  return result;
}

void SlabSpace::remove_slab(Address address) {
  const auto slab = slabs_.find(address);
  for (const auto& [start, range] : slab->second.free) by_size_.erase({range.bytes, start});
  slabs_.erase(slab);
}

std::vector<Address> SlabSpace::slabs() const {
  std::vector<Address> result;
  for (const auto& [address, slab] : slabs_) result.push_back(address);
  return result;
}

std::optional<SlabSpace::Placement> SlabSpace::take(std::uint64_t bytes) {
  const auto best = by_size_.lower_bound({bytes, 0});
  if (best == by_size_.end()) return std::nullopt;
  const Address address = best->second;
  SlabState& slab = slab_of(address)->second;
  const auto found = slab.free.find(address);
  FreeRange range = found->second;
  erase_free(slab, found);
  slab.taken_bytes += bytes;
  if (range.bytes > bytes) insert_free(slab, address + bytes, {range.bytes - bytes, range.last_uses});
  return Placement{address, std::move(range.last_uses)};
}

void SlabSpace::give_back(ByteRange range, const LastUses& last_uses) {
  SlabState& slab = slab_of(range.address)->second;
  slab.taken_bytes -= range.bytes;
  if (slab.taken_bytes == 0) slab.emptied_at = ++emptied_counter_;
  FreeRange joined{range.bytes, last_uses};
  Address address = range.address;
  auto after = slab.free.lower_bound(address);
  if (after != slab.free.end() && after->first == range.end()) {
    joined.bytes += after->second.bytes;
    joined.last_uses.add(after->second.last_uses);
    const auto next = std::next(after);
    erase_free(slab, after);
    after = next;
  }
  if (after != slab.free.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second.bytes == address) {
      address = before->first;
      joined.bytes += before->second.bytes;
      joined.last_uses.add(before->second.last_uses);
      erase_free(slab, before);
    }
  }
  insert_free(slab, address, std::move(joined));
}

std::uint64_t SlabSpace::largest_free_bytes() const {
  return by_size_.empty() ? 0 : by_size_.rbegin()->first;
}

std::uint64_t SlabSpace::free_bytes_beside_others(std::uint64_t bytes) const {
  std::uint64_t result = 0;
  for (const auto& [address, slab] : slabs_) {
    if (slab.taken_bytes == 0) continue;
    for (const auto& [start, range] : slab.free) {
      if (range.bytes >= bytes) result += range.bytes;
    }
  }
  return result;
}

}  // namespace vdnn
