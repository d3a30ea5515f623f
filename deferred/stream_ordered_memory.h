// The accelerator's memory: a caching allocator that reuses memory as early as a GPU's may.
//
// The next allocation of the same stream gets the smallest freed block that is large enough, without a wait for
// operations that still run. Freeing is work of the stream: there the bytes are overwritten, and a checker records a
// release. Capacity is limited. If no block fits, the allocator waits for all streams and merges all free blocks before
// it throws.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "bindings/sim_table.h"

namespace vdnn::deferred {

struct MemoryStats {
  std::uint64_t capacity_bytes = 0;
  std::uint64_t allocated_bytes = 0;  // as requested, before rounding
  std::uint64_t peak_bytes = 0;
  std::uint64_t allocations = 0;
  std::uint64_t reused = 0;  // allocations that got a block freed on the same stream
  std::uint64_t flushes = 0;
};

class StreamOrderedMemory {
 public:
  StreamOrderedMemory(const VdnnSimTable& table, std::vector<std::uint32_t> streams, std::uint64_t capacity_bytes);

  struct Block {
    std::uintptr_t address = 0;
    std::uint64_t bytes = 0;
    std::uint64_t requested_bytes = 0;
    std::size_t pool = 0;  // the pool of the stream that allocated it last, or the unused pool
    bool in_use = false;
    std::vector<std::size_t> also_used_on;
  };
  // For the stream of this number, counted from 0. Throws c10::OutOfMemoryError.
  [[nodiscard]] Block* allocate(std::uint64_t bytes, std::size_t stream);
  void free(Block* block);
  // `stream` uses the block too: its next owner waits for that stream.
  void use_on(Block* block, std::size_t stream);
  [[nodiscard]] static void* address_of(const Block* block);

  [[nodiscard]] MemoryStats stats();
  void reset_peak();

 private:
  [[nodiscard]] Block* take(std::uint64_t bytes, std::size_t pool);
  void put(Block* block, std::size_t pool);
  void flush();

  const VdnnSimTable table_;
  const std::vector<std::uint32_t> streams_;
  std::mutex mutex_;  // guards the members below
  MemoryStats stats_;
  std::map<std::uintptr_t, std::unique_ptr<Block>> blocks_;  // the whole arena, by address
  // The free blocks of each stream by size. The last pool holds memory that no stream has used.
  std::vector<std::set<std::pair<std::uint64_t, std::uintptr_t>>> pools_;
};

}  // namespace vdnn::deferred
