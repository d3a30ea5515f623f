// Leases, growth and shrinking of the PinnedPool.
#include "memory/pinned_pool.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "device/errors.h"
#include "device/host_mapping.h"
#include "device/parked.h"
#include "memory/host_limits.h"

namespace vdnn {
namespace {

constexpr std::uint64_t largest_block_bytes = std::uint64_t{1} << 47;

std::uint64_t round_up(std::uint64_t bytes, std::uint64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

PoolOptions checked(PoolOptions options) {
  if (options.cap_bytes == 0) options.cap_bytes = default_pinned_cap_bytes(read_host_limits());
  if (options.cap_bytes < host_page_bytes()) {
    throw InvalidArgument("cap_bytes", "at least one page of " + std::to_string(host_page_bytes()) + " bytes",
                          std::to_string(options.cap_bytes));
  }
  if (options.slab_bytes == 0 || options.slab_bytes > largest_block_bytes) {
    throw InvalidArgument("slab_bytes", "between 1 byte and 128 TiB", std::to_string(options.slab_bytes));
  }
  if (!(options.slack >= 1.0 && options.slack <= 16.0)) {
    throw InvalidArgument("slack", "a factor from 1 to 16", std::to_string(options.slack));
  }
  return options;
}

}  // namespace

struct PinnedPool::Leftovers {
  std::shared_ptr<Device> device;
  std::vector<Address> slabs;
  Leftovers* next_returned = nullptr;
};

std::shared_ptr<PinnedPool> PinnedPool::create(std::shared_ptr<Device> device, const PoolOptions& options) {
  if (device == nullptr) throw InvalidArgument("device", "a device", "none");
  free_leftovers();
  return {new PinnedPool(std::move(device), checked(options)), LeakInForkedChild()};
}

PinnedPool::PinnedPool(std::shared_ptr<Device> device, const PoolOptions& options)
    : device_(std::move(device)), options_(options) {
  stats_.cap_bytes = options_.cap_bytes;
}

// Taking the pool's own lock cannot block: a thread that holds it also holds a reference to the pool.
// Does not run in a forked child, see LeakInForkedChild.
PinnedPool::~PinnedPool() {
  if (grower_.joinable()) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    growth_wanted_.notify_all();
    grower_.join();
  }
  collect_returned();
  std::vector<Address> slabs = space_.slabs();
  if (slabs.empty() || device_->closed()) return;
  auto leftovers = std::make_unique<Leftovers>();
  leftovers->device = device_;
  leftovers->slabs = std::move(slabs);
  park(std::move(leftovers));
}

void PinnedPool::free_leftovers() {
  for (Leftovers* left = parked<Leftovers>().take_all(); left != nullptr;) {
    const std::unique_ptr<Leftovers> owned(left);
    left = owned->next_returned;
    if (owned->device->closed()) continue;  // or in a forked child
    for (const Address slab : owned->slabs) {
      try {
        owned->device->free_pinned(slab);
      } catch (const Error&) {
        break;  // closed or lost: the device's own close() frees the rest
      }
    }
  }
}

void PinnedPool::require_open() const {
  if (closed_) throw Closed("pinned pool", "close() was called");
  if (device_->closed()) throw Closed("pinned pool", "its device was closed");
}

void PinnedPool::take_back(PinnedBlock* block) noexcept {
  const std::shared_ptr<PinnedPool> home = std::move(block->home_);  // may be the last reference to the pool
  home->returned_.push(block);
}

void PinnedPool::collect_returned() {
  for (PinnedBlock* block = returned_.take_all(); block != nullptr;) {
    const std::unique_ptr<PinnedBlock> owned(block);
    block = owned->next_returned;
    stats_.live_bytes -= owned->requested_bytes_;
    if (!closed_) space_.give_back(owned->range_, owned->last_uses_);
  }
}

std::shared_ptr<PinnedBlock> PinnedPool::lease(std::uint64_t bytes, SlabSpace::Placement placement) {
  auto block = std::make_unique<PinnedBlock>();
  block->range_ = {placement.address, round_up(bytes, granule_bytes)};
  block->requested_bytes_ = bytes;
  block->last_uses_ = std::move(placement.last_uses);
  block->home_ = shared_from_this();
  stats_.live_bytes += bytes;
  stats_.live_peak_bytes = std::max(stats_.live_peak_bytes, stats_.live_bytes);
  ++stats_.blocks_given;
  return {block.release(), &PinnedPool::take_back};
}

std::shared_ptr<PinnedBlock> PinnedPool::allocate(std::uint64_t bytes, Growth growth) {
  if (bytes == 0 || bytes > largest_block_bytes) {
    throw InvalidArgument("bytes", "between 1 byte and 128 TiB", std::to_string(bytes));
  }
  const std::uint64_t rounded = round_up(bytes, granule_bytes);
  fork_guard_.refuse_in_child("pinned pool");
  Lock lock(mutex_);
  bool awaited = false;
  while (true) {
    require_open();
    collect_returned();
    if (auto placement = space_.take(rounded)) return lease(bytes, std::move(*placement));
    if (round_up(bytes, host_page_bytes()) > options_.cap_bytes) {
      ++stats_.refusals;
      if (growth == Growth::Later) return nullptr;
      throw PinnedMemoryFull(bytes, stats_.pinned_bytes, options_.cap_bytes, "one block is larger than the cap");
    }
    if (growth == Growth::Later) {
      ++stats_.refusals;
      ask_for_growth(rounded);
      return nullptr;
    }
    if (!awaited) ++stats_.growths_awaited;
    awaited = true;
    if (growing_bytes_ >= rounded) {
      growth_done_.wait(lock);  // another thread is already pinning enough
    } else {
      grow(lock, rounded);
    }
  }
}

bool PinnedPool::give_slab_back(Lock& lock) {
  const std::vector<SlabSpace::Slab> idle = space_.idle_slabs();
  if (idle.empty()) return false;
  const SlabSpace::Slab& slab = idle.front();
  space_.remove_slab(slab.range.address);
  lock.unlock();
  try {
    for (const Event& use : slab.last_uses.events()) device_->synchronize(use);
    device_->free_pinned(slab.range.address);
  } catch (...) {
    lock.lock();
    space_.add_slab(slab.range, slab.last_uses);
    throw;
  }
  lock.lock();
  if (!closed_) stats_.pinned_bytes -= slab.range.bytes;  // a closed pool counts 0
  ++stats_.slabs_given_back;
  return true;
}

void PinnedPool::make_room(Lock& lock, std::uint64_t bytes) {
  const auto after = [&] { return stats_.pinned_bytes + growing_bytes_ + bytes; };
  const auto wanted = static_cast<double>(std::max(stats_.live_peak_bytes, stats_.live_bytes + bytes));
  while (static_cast<double>(after()) > options_.slack * wanted && give_slab_back(lock)) {
  }
  while (after() > options_.cap_bytes && give_slab_back(lock)) {
  }
}

void PinnedPool::grow(Lock& lock, std::uint64_t bytes) {
  make_room(lock, bytes);
  if (space_.largest_free_bytes() >= bytes) return;  // another thread made room while the lock was released
  const std::uint64_t page = host_page_bytes();
  const std::uint64_t used = stats_.pinned_bytes + growing_bytes_;
  const std::uint64_t left = (options_.cap_bytes - std::min(options_.cap_bytes, used)) / page * page;
  const std::uint64_t needed = round_up(bytes, page);
  if (needed > left) {
    ++stats_.refusals;
    throw PinnedMemoryFull(bytes, used, options_.cap_bytes, "the cap is reached");
  }
  const std::uint64_t slab_bytes = std::min(std::max(needed, round_up(options_.slab_bytes, page)), left);
  growing_bytes_ += slab_bytes;
  lock.unlock();
  Address address = 0;
  try {
    address = device_->allocate_pinned(slab_bytes);
  } catch (...) {
    lock.lock();
    growing_bytes_ -= slab_bytes;
    growth_done_.notify_all();
    throw;
  }
  lock.lock();
  growing_bytes_ -= slab_bytes;
  if (closed_) {
    lock.unlock();
    device_->free_pinned(address);
    lock.lock();
  } else {
    space_.add_slab({address, slab_bytes});
    stats_.pinned_bytes += slab_bytes;
    stats_.pinned_peak_bytes = std::max(stats_.pinned_peak_bytes, stats_.pinned_bytes);
  }
  growth_done_.notify_all();
}

void PinnedPool::ask_for_growth(std::uint64_t bytes) {
  wanted_bytes_.push_back(bytes);
  if (!grower_.joinable()) grower_ = std::thread([this] { grow_ahead(); });
  growth_wanted_.notify_one();
}

void PinnedPool::grow_ahead() {
  Lock lock(mutex_);
  while (true) {
    growth_wanted_.wait(lock, [&] { return closed_ || !wanted_bytes_.empty(); });
    if (closed_) return;
    const std::uint64_t bytes = wanted_bytes_.front();
    try {
      collect_returned();
      if (space_.largest_free_bytes() < bytes) {
        grow(lock, bytes);
        ++stats_.growths_ahead;
      }
    } catch (const std::exception& error) {
      stats_.last_growth_error = error.what();
    }
    if (!wanted_bytes_.empty()) wanted_bytes_.pop_front();
    growth_done_.notify_all();
  }
}

std::uint64_t PinnedPool::room_bytes(std::uint64_t block_bytes) {
  const Lock lock(mutex_);
  require_open();
  collect_returned();
  std::uint64_t pinned = stats_.pinned_bytes + growing_bytes_;
  for (const SlabSpace::Slab& slab : space_.idle_slabs()) pinned -= slab.range.bytes;
  return options_.cap_bytes - std::min(options_.cap_bytes, pinned) + space_.free_bytes_beside_others(block_bytes);
}

void PinnedPool::reserve(std::uint64_t bytes) {
  if (bytes > options_.cap_bytes) {
    throw PinnedMemoryFull(bytes, 0, options_.cap_bytes, "the reservation is larger than the cap");
  }
  fork_guard_.refuse_in_child("pinned pool");
  const Lock lock(mutex_);
  require_open();
  collect_returned();
  if (bytes > stats_.pinned_bytes) ask_for_growth(round_up(bytes - stats_.pinned_bytes, granule_bytes));
}

void PinnedPool::wait_for_growth() {
  fork_guard_.refuse_in_child("pinned pool");
  Lock lock(mutex_);
  growth_done_.wait(lock, [&] { return closed_ || wanted_bytes_.empty(); });
}

std::uint64_t PinnedPool::trim(std::uint64_t kept_bytes) {
  fork_guard_.refuse_in_child("pinned pool");
  Lock lock(mutex_);
  require_open();
  collect_returned();
  const std::uint64_t before = stats_.pinned_bytes;
  while (stats_.pinned_bytes > kept_bytes && give_slab_back(lock)) {
  }
  return before - std::min(before, stats_.pinned_bytes);
}

PoolStats PinnedPool::stats() {
  fork_guard_.refuse_in_child("pinned pool");
  const Lock lock(mutex_);
  collect_returned();
  stats_.slabs = space_.slabs().size();
  return stats_;
}

void PinnedPool::close() {
  if (fork_guard_.in_forked_child()) return;
  Lock lock(mutex_);
  collect_returned();
  closed_ = true;
  wanted_bytes_.clear();
  growth_wanted_.notify_all();
  growth_done_.notify_all();
  std::thread grower = std::move(grower_);
  lock.unlock();
  if (grower.joinable()) grower.join();
  lock.lock();
  for (const Address slab : space_.slabs()) {
    if (!device_->closed()) device_->free_pinned(slab);
    space_.remove_slab(slab);
  }
  stats_.pinned_bytes = 0;
}

}  // namespace vdnn
