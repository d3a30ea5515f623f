// One pool of free blocks for each stream, over one arena.
#include "stream_ordered_memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace vdnn::deferred {

namespace {

constexpr std::uint64_t granularity = 512;
constexpr int release = 2;
constexpr int never_written = 0xFF;  // a NaN in every float type

}  // namespace

StreamOrderedMemory::StreamOrderedMemory(const VdnnSimTable& table, std::vector<std::uint32_t> streams,
                                         std::uint64_t capacity_bytes)
    : table_(table), streams_(std::move(streams)), pools_(streams_.size() + 1) {
  stats_.capacity_bytes = capacity_bytes / granularity * granularity;
  auto arena = std::make_unique<Block>();
  arena->address = table_.allocate(table_.device, stats_.capacity_bytes + granularity);
  arena->address = (arena->address + granularity - 1) / granularity * granularity;
  arena->bytes = stats_.capacity_bytes;
  // An earlier accelerator may have left the correct numbers there, and would hide a read that comes too early.
  std::memset(reinterpret_cast<void*>(arena->address), never_written, arena->bytes);
  Block* whole = arena.get();
  blocks_.emplace(whole->address, std::move(arena));
  put(whole, streams_.size());
}

void* StreamOrderedMemory::address_of(const Block* block) {
  return reinterpret_cast<void*>(block->address);
}

// Also merges the block with free neighbours of the same pool.
void StreamOrderedMemory::put(Block* block, std::size_t pool) {
  block->pool = pool;
  block->in_use = false;
  const auto mergeable = [&](const Block& other) { return !other.in_use && other.pool == pool; };
  auto own = blocks_.find(block->address);
  auto next = std::next(own);
  if (next != blocks_.end() && mergeable(*next->second)) {
    pools_[pool].erase({next->second->bytes, next->second->address});
    block->bytes += next->second->bytes;
    blocks_.erase(next);
  }
  if (own != blocks_.begin()) {
    Block& before = *std::prev(own)->second;
    if (mergeable(before)) {
      pools_[pool].erase({before.bytes, before.address});
      before.bytes += block->bytes;
      blocks_.erase(own);
      block = &before;
    }
  }
  pools_[pool].insert({block->bytes, block->address});
}

StreamOrderedMemory::Block* StreamOrderedMemory::take(std::uint64_t bytes, std::size_t pool) {
  const auto found = pools_[pool].lower_bound({bytes, 0});
  if (found == pools_[pool].end()) return nullptr;
  Block* block = blocks_.at(found->second).get();
  pools_[pool].erase(found);
  block->in_use = true;
  if (block->bytes > bytes) {
    auto rest = std::make_unique<Block>();
    rest->address = block->address + bytes;
    rest->bytes = block->bytes - bytes;
    block->bytes = bytes;
    Block* left = rest.get();
    blocks_.emplace(left->address, std::move(rest));
    put(left, pool);
  }
  return block;
}

// As a GPU's allocator does before it throws: waits for all streams, and then no stream owns the free blocks.
void StreamOrderedMemory::flush() {
  ++stats_.flushes;
  for (const std::uint32_t stream : streams_) table_.drain(table_.device, stream);
  for (std::size_t pool = 0; pool < streams_.size(); ++pool) {
    const auto free_blocks = std::exchange(pools_[pool], {});
    for (const auto& [bytes, address] : free_blocks) blocks_.at(address)->pool = streams_.size() + 1;  // of none
    for (const auto& [bytes, address] : free_blocks) {
      const auto still = blocks_.find(address);
      if (still != blocks_.end()) put(still->second.get(), streams_.size());
    }
  }
}

StreamOrderedMemory::Block* StreamOrderedMemory::allocate(std::uint64_t bytes, std::size_t stream) {
  const std::uint64_t rounded = std::max(granularity, (bytes + granularity - 1) / granularity * granularity);
  const std::lock_guard<std::mutex> lock(mutex_);
  Block* block = take(rounded, stream);
  if (block != nullptr) ++stats_.reused;
  if (block == nullptr) block = take(rounded, streams_.size());
  if (block == nullptr) {
    flush();
    block = take(rounded, streams_.size());
  }
  TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, "the deferred accelerator is out of memory: ", bytes,
                   " bytes asked for, ", stats_.allocated_bytes, " of ", stats_.capacity_bytes, " allocated");
  block->pool = stream;
  block->requested_bytes = bytes;
  ++stats_.allocations;
  stats_.allocated_bytes += bytes;
  stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.allocated_bytes);
  return block;
}

void StreamOrderedMemory::use_on(Block* block, std::size_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& others = block->also_used_on;
  if (stream != block->pool && std::find(others.begin(), others.end(), stream) == others.end()) {
    others.push_back(stream);
  }
}

void StreamOrderedMemory::free(Block* block) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::uint32_t own = streams_[block->pool];
  for (const std::size_t other : std::exchange(block->also_used_on, {})) {
    void* reached = table_.record(table_.device, streams_[other]);
    table_.wait(table_.device, own, reached);
    table_.drop_event(reached);
  }
  table_.note(table_.device, block->address, block->bytes, release, own, "freed");
  stats_.allocated_bytes -= block->requested_bytes;
  put(block, block->pool);
}

MemoryStats StreamOrderedMemory::stats() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

void StreamOrderedMemory::reset_peak() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_.peak_bytes = stats_.allocated_bytes;
}

}  // namespace vdnn::deferred
