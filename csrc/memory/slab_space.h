// Tracks which bytes of which slab are free: best fit, exact sizes, and adjacent free ranges are joined.
//
// This class only does bookkeeping over addresses: it accesses no memory, calls no device and takes no lock. A free
// range keeps the last uses of the blocks that were there, and the next block in it inherits them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "device/device.h"
#include "memory/last_uses.h"

namespace vdnn {

// Every block starts and ends on a multiple of this: an alignment that suits DMA, and small enough to waste little.
inline constexpr std::uint64_t granule_bytes = 256;

class SlabSpace {
 public:
  struct Placement {
    Address address = 0;
    LastUses last_uses;
  };
  struct Slab {
    ByteRange range;
    LastUses last_uses;
  };

  void add_slab(ByteRange range, LastUses last_uses = {});
  // The slabs that are completely free, the least recently emptied first.
  [[nodiscard]] std::vector<Slab> idle_slabs() const;
  // Removes the slab, including the ranges that are taken from it.
  void remove_slab(Address address);
  [[nodiscard]] std::vector<Address> slabs() const;

  // Takes `bytes` (a multiple of the granule) from the smallest free range that holds them; among ranges of equal size,
  // from the one with the lowest address.
  [[nodiscard]] std::optional<Placement> take(std::uint64_t bytes);
  void give_back(ByteRange range, const LastUses& last_uses);
  [[nodiscard]] std::uint64_t largest_free_bytes() const;
  // The bytes of all free ranges of at least `bytes` in slabs that are not idle.
  [[nodiscard]] std::uint64_t free_bytes_beside_others(std::uint64_t bytes) const;

 private:
  struct FreeRange {
    std::uint64_t bytes = 0;
    LastUses last_uses;
  };
  struct SlabState {
    std::uint64_t bytes = 0;
    std::uint64_t taken_bytes = 0;
    std::uint64_t emptied_at = 0;  // a counter, not a time
    std::map<Address, FreeRange> free;
  };
  using Slabs = std::map<Address, SlabState>;
  [[nodiscard]] Slabs::iterator slab_of(Address address);
  void insert_free(SlabState& slab, Address address, FreeRange range);
  void erase_free(SlabState& slab, std::map<Address, FreeRange>::iterator range);

  Slabs slabs_;
  std::set<std::pair<std::uint64_t, Address>> by_size_;  // (bytes, address) of every free range
  std::uint64_t emptied_counter_ = 0;
};

}  // namespace vdnn
