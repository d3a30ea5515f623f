// Scenario "pool": many threads lease blocks under a cap, and what they write into them stays theirs.
//
// Blocks are written by the host or by copies and dropped while copies still run, so the next tenant has uses to wait
// for. No two live blocks may overlap, the cap holds at every moment, and in the end everything comes back.
#include <map>
#include <vector>

#include "compute_stream.h"
#include "device/errors.h"
#include "noise.h"
#include "rig.h"
#include "together.h"

namespace vdnn::stress {
namespace {

constexpr std::size_t tenants = 4;
constexpr std::uint64_t turns = 150;
constexpr std::uint64_t most_leases = 10;
constexpr std::uint64_t most_block_bytes = 96 << 10;
constexpr std::uint64_t cap_bytes = 1 << 20;

using Block = std::shared_ptr<PinnedBlock>;

// Which bytes are leased now, over all threads.
class Land {
 public:
  void claim(const PinnedBlock& block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto after = end_by_start_.upper_bound(block.address());
    const Address end = block.address() + block.bytes();
    require(after == end_by_start_.end() || after->first >= end, "no two live blocks may overlap");
    require(after == end_by_start_.begin() || std::prev(after)->second <= block.address(),
            "no two live blocks may overlap");
    end_by_start_.emplace(block.address(), end);
  }
  void leave(const PinnedBlock& block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    end_by_start_.erase(block.address());
  }

 private:
  std::mutex mutex_;
  std::map<Address, Address> end_by_start_;
};

class Tenant {
 public:
  Tenant(Run& run, const std::shared_ptr<Device>& device, const std::shared_ptr<PinnedPool>& pool, Land& land,
         std::uint64_t seed)
      : run_(run), device_(device), pool_(pool), land_(land), dice_(seed), stream_(device->create_stream("tenant")) {
    write_noise(source(), most_block_bytes, seed);
    source_content_ = seed;
  }

  void take_turn() {
    const std::uint64_t choice = dice_.below(100);
    if (choice < 3) {
      run_.counts.add("trimmed bytes", pool_->trim());
    } else if (choice < 8) {
      pool_->reserve(dice_.between(1, cap_bytes));
    } else if (choice < 10) {
      pool_->wait_for_growth();
    } else if (choice < 18) {
      pin_and_free();
    } else if (choice < 57 || leases_.size() == most_leases) {
      drop_one();
    } else {
      lease_one();
    }
    const PoolStats stats = pool_->stats();
    require(stats.pinned_bytes <= cap_bytes, "the pool must stay under its cap");
  }
  void drop_all() {
    while (!leases_.empty()) drop_one();
  }

 private:
  struct Lease {
    Block block;
    std::uint64_t content = 0;
    Event written;  // empty where the host wrote
  };
  [[nodiscard]] Address source() { return reinterpret_cast<Address>(source_.data()); }

  // Past the pool: the addresses go at once to whoever pins next, on another stream perhaps.
  void pin_and_free() {
    constexpr std::uint64_t bytes = 4096;
    const Address address = device_->allocate_pinned(bytes);
    device_->copy_async(address, source(), bytes, CopyDirection::DeviceToHost, stream_);
    device_->free_pinned(address);
  }
  void lease_one() {
    Block block;
    try {
      block = pool_->allocate(dice_.between(1, most_block_bytes), dice_.percent(60) ? Growth::Now : Growth::Later);
    } catch (const PinnedMemoryFull&) {
      run_.counts.add("full");
    }
    if (block == nullptr) return;
    land_.claim(*block);
    leases_.push_back(dice_.percent(50) ? write_by_host(block) : write_by_copy(block));
    run_.counts.add("leases");
  }
  Lease write_by_host(const Block& block) {
    for (const Event& use : block->last_uses().events()) device_->synchronize(use);
    const std::uint64_t content = dice_.seed();
    write_noise(block->address(), block->bytes(), content);
    return {block, content, Event()};
  }
  Lease write_by_copy(const Block& block) {
    for (const Event& use : block->last_uses().events()) device_->wait(stream_, use);
    device_->copy_async(block->address(), source(), block->bytes(), CopyDirection::DeviceToHost, stream_);
    const Event written = device_->record(stream_, Timing::Off);
    block->note_use(written);
    return {block, source_content_, written};
  }
  void drop_one() {
    if (leases_.empty()) return;
    std::swap(leases_[dice_.below(leases_.size())], leases_.back());
    const Lease lease = std::move(leases_.back());
    leases_.pop_back();
    // Dropped under a running copy, or looked at first.
    if (lease.written.empty() || dice_.percent(50)) {
      device_->synchronize(lease.written);
      require(is_noise(lease.block->address(), lease.block->bytes(), lease.content),
              "a leased block must keep what was written into it");
    }
    land_.leave(*lease.block);
  }

  Run& run_;
  std::shared_ptr<Device> device_;
  std::shared_ptr<PinnedPool> pool_;
  Land& land_;
  Dice dice_;
  Stream stream_;
  std::vector<unsigned char> source_ = std::vector<unsigned char>(most_block_bytes);
  std::uint64_t source_content_ = 0;
  std::vector<Lease> leases_;
};

std::shared_ptr<PinnedPool> make_pool(const std::shared_ptr<Device>& device, Dice& dice) {
  PoolOptions options;
  options.cap_bytes = cap_bytes;
  options.slab_bytes = dice.between(4 << 10, 128 << 10);
  return PinnedPool::create(device, options);
}

// The cap refuses at last, and what was given back can be had again in one piece.
void fill_up(Run& run, PinnedPool& pool) {
  constexpr std::uint64_t piece_bytes = 32 << 10;
  std::vector<Block> blocks;
  bool refused = false;
  while (!refused && blocks.size() <= cap_bytes / piece_bytes) {
    try {
      blocks.push_back(pool.allocate(piece_bytes, Growth::Now));
    } catch (const PinnedMemoryFull&) {
      refused = true;
    }
  }
  require(refused, "the cap must refuse");
  // What is left at the end of a slab is less than a piece, and every slab holds one at least.
  require(blocks.size() * piece_bytes * 2 >= cap_bytes, "the cap must not refuse before half of it is in use");
  require(pool.allocate(piece_bytes, Growth::Later) == nullptr, "without room, Later must give nothing");
  blocks.clear();
  pool.wait_for_growth();
  require(pool.allocate(cap_bytes, Growth::Now) != nullptr, "idle slabs must make room for a block of the cap's size");
  run.counts.add("filled up");
}

void require_empty(PinnedPool& pool) {
  pool.trim();
  const PoolStats stats = pool.stats();
  require(stats.live_bytes == 0, "no block may be live");
  require(stats.pinned_bytes == 0 && stats.slabs == 0, "an idle pool must give everything back");
  require(stats.pinned_peak_bytes <= cap_bytes, "the pool must never have been over its cap");
}

void lease(Run& run, const DeviceKind& kind, Dice& dice) {
  const std::shared_ptr<OrderingChecker> device = open_device(run, kind, dice);
  const std::shared_ptr<PinnedPool> pool = make_pool(device, dice);
  Land land;
  std::vector<std::unique_ptr<Tenant>> all;
  for (std::size_t index = 0; index < tenants; ++index) {
    all.push_back(std::make_unique<Tenant>(run, device, pool, land, dice.seed()));
  }
  run_together(tenants, [&](std::size_t index) {
    for (std::uint64_t turn = 0; turn < turns; ++turn) all[index]->take_turn();
    all[index]->drop_all();
  });
  pool->wait_for_growth();
  require_empty(*pool);
  fill_up(run, *pool);
  require_empty(*pool);
  pool->close();
  device->close();
  require_no_violations(*device);
  require_driver_clean(run);
}

}  // namespace

void lease_from_many_threads(Run& run) {
  Dice dice(run.seed);
  for (std::uint64_t round = 0; round < run.rounds; ++round) {
    for (const DeviceKind& kind : device_kinds(run)) lease(run, kind, dice);
  }
  require(run.counts.of("full") > 0, "the cap must have refused at times");
}

}  // namespace vdnn::stress
