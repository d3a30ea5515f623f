// The accelerator's memory, handed out as a GPU's caching allocator would on its worst day.
//
// What the program frees is given to the next allocation of the same stream at once, the smallest that is large enough;
// nobody waits for what still runs. Freeing is work of the stream: there the bytes are overwritten, and a checker
// learns of it. Capacity is limited; when nothing fits, everything is waited for and put together again before it is
// refused.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "sim_table.h"

namespace vdnn::deferred {

struct MemoryStats {
  std::uint64_t capacity_bytes = 0;
  std::uint64_t allocated_bytes = 0;  // as asked for
  std::uint64_t peak_bytes = 0;
  std::uint64_t allocations = 0;
  std::uint64_t reused = 0;  // allocations that got what somebody had freed on the stream
  std::uint64_t flushes = 0;
};

class StreamOrderedMemory {
 public:
  StreamOrderedMemory(const VdnnSimTable& table, std::vector<std::uint32_t> streams, std::uint64_t capacity_bytes);

  struct Block {
    std::uintptr_t address = 0;
    std::uint64_t bytes = 0;
    std::uint64_t requested_bytes = 0;
    std::size_t pool = 0;  // of the stream that allocated it last, or the unused one
    bool in_use = false;
    std::vector<std::size_t> also_used_on;
  };
  // For the stream of this number, counted from 0. Throws c10::OutOfMemoryError.
  [[nodiscard]] Block* allocate(std::uint64_t bytes, std::size_t stream);
  void free(Block* block);
  // `stream` uses the block too: whoever gets it next waits for that.
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
  std::mutex mutex_;  // guards what follows
  MemoryStats stats_;
  std::map<std::uintptr_t, std::unique_ptr<Block>> blocks_;  // all of the arena, by address
  // Free blocks by size, of each stream; the last pool is of memory that no stream has used.
  std::vector<std::set<std::pair<std::uint64_t, std::uintptr_t>>> pools_;
};

}  // namespace vdnn::deferred
