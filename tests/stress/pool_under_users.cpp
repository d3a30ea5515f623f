// Scenario "pool_under_users": a pool is closed, or its device is, while other threads use it.
//
// They must be told Closed, and a closed pool must count nothing pinned. Nobody touches a block's bytes here: that
// would be wrong once the pool may close.
#include <array>
#include <atomic>

#include "device/errors.h"
#include "rig.h"
#include "together.h"

namespace vdnn::stress {
namespace {

constexpr std::size_t users = 3;
constexpr std::uint64_t most_turns = 400;
constexpr std::uint64_t cap_bytes = 512 << 10;

enum class Ends { Pool, Device };

void use_once(PinnedPool& pool, Device& device, Stream stream, Dice& dice,
              std::array<std::shared_ptr<PinnedBlock>, 4>& held) {
  const std::uint64_t choice = dice.below(100);
  if (choice < 15) {
    pool.trim();
  } else if (choice < 25) {
    pool.reserve(dice.between(1, cap_bytes));
  } else if (choice < 30) {
    static_cast<void>(pool.stats());
  } else {
    auto& block = held[dice.below(held.size())];
    block = nullptr;
    block = pool.allocate(dice.between(1, 100 << 10), dice.percent(70) ? Growth::Now : Growth::Later);
    if (block != nullptr) block->note_use(device.record(stream));
  }
}

void use(Run& run, PinnedPool& pool, Device& device, Stream stream, std::uint64_t seed, Progress& progress) {
  const Finishing finishing(progress);
  Dice dice(seed);
  std::array<std::shared_ptr<PinnedBlock>, 4> held;
  for (std::uint64_t turn = 0; turn < most_turns; ++turn) {
    try {
      use_once(pool, device, stream, dice, held);
    } catch (const PinnedMemoryFull&) {
      run.counts.add("full");
    } catch (const Closed&) {
      run.counts.add("told closed");
      return;
    }
    progress.advance();
  }
  run.counts.add("done before the close");
}

void close_under_users(Run& run, const DeviceKind& kind, Ends ends, Dice& dice) {
  const std::shared_ptr<OrderingChecker> device = open_device(run, kind, dice);
  PoolOptions options;
  options.cap_bytes = cap_bytes;
  options.slab_bytes = 32 << 10;
  const std::shared_ptr<PinnedPool> pool = PinnedPool::create(device, options);
  const Stream stream = device->create_stream("shared");
  const std::uint64_t seed = dice.seed();
  const std::uint64_t moment = dice.between(1, 60);
  Progress progress;
  run_together(users + 1, [&](std::size_t index) {
    if (index < users) return use(run, *pool, *device, stream, seed + index, progress);
    progress.wait_for(moment);
    if (ends == Ends::Pool) return pool->close();
    device->close();
  });
  if (ends == Ends::Device) pool->close();
  const PoolStats stats = pool->stats();
  require(stats.pinned_bytes == 0,
          "a closed pool must count nothing pinned, not " + std::to_string(stats.pinned_bytes));
  require(stats.live_bytes == 0, "blocks dropped after the close must count too");
  device->close();
  require_driver_clean(run);
}

}  // namespace

void close_pools_under_users(Run& run) {
  Dice dice(run.seed);
  constexpr std::uint64_t moments = 6;
  for (std::uint64_t round = 0; round < run.rounds * moments; ++round) {
    for (const DeviceKind& kind : device_kinds(run)) {
      close_under_users(run, kind, Ends::Pool, dice);
      close_under_users(run, kind, Ends::Device, dice);
    }
  }
  require(run.counts.of("told closed") > 0, "some user must have met the close");
}

}  // namespace vdnn::stress
