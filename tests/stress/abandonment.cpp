// Scenario "abandonment": what a program does that loses interest, throws, or exits without closing.
//
// Handles are dropped at any moment, some of them by another thread; then the queue is closed with work in flight, or
// all is dropped without close() in some order while other threads do the same. Rigs made later take over what was
// parked. In the end no buffer is left and the driver has everything back.
#include <algorithm>
#include <functional>
#include <random>
#include <vector>

#include "compute_stream.h"
#include "device/errors.h"
#include "rig.h"
#include "together.h"

namespace vdnn::stress {
namespace {

constexpr std::size_t abandoners = 3;
constexpr std::uint64_t actions = 40;

// What somebody else drops.
class Bin {
 public:
  void put(std::shared_ptr<void> thing) {
    const std::lock_guard<std::mutex> lock(mutex_);
    things_.push_back(std::move(thing));
  }
  // False once there will be no more.
  bool empty_until_finished() {
    std::vector<std::shared_ptr<void>> dropped;
    const std::lock_guard<std::mutex> lock(mutex_);
    std::swap(dropped, things_);
    return !finished_ || !dropped.empty();
  }
  void finish() {
    const std::lock_guard<std::mutex> lock(mutex_);
    finished_ = true;
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<void>> things_;
  bool finished_ = false;
};

struct Handles {
  std::vector<std::shared_ptr<HostCopy>> copies;
  std::vector<std::shared_ptr<Reload>> reloads;
  std::vector<std::shared_ptr<Buffer>> targets;
};

template <class Thing>
Thing take_any(std::vector<Thing>& things, Dice& dice) {
  std::swap(things[dice.below(things.size())], things.back());
  Thing thing = std::move(things.back());
  things.pop_back();
  return thing;
}

class Abandoner {
 public:
  Abandoner(Run& run, Rig& rig, std::uint64_t seed)
      : run_(run), rig_(rig), compute_(ComputeStream::on_callers(rig, 0)), dice_(seed) {}

  void act(Bin& bin) {
    const std::uint64_t choice = dice_.below(100);
    if (choice < 40 || handles_.copies.empty()) {
      offload();
    } else if (choice < 60) {
      drop_copy(bin);
    } else if (choice < 80) {
      reload();
    } else if (choice < 90 && !handles_.reloads.empty()) {
      bin.put(take_any(handles_.reloads, dice_));
    } else if (choice < 95 && !handles_.targets.empty()) {
      static_cast<void>(take_any(handles_.targets, dice_));  // the queue still has it while the reload runs
    } else {
      tidy();
    }
  }
  [[nodiscard]] Handles take_handles() { return std::move(handles_); }

 private:
  void offload() {
    const std::shared_ptr<Buffer> source = compute_.allocate(draw_bytes(dice_));
    compute_.fill(*source, dice_.seed());
    auto copy = dropping_nothing([&] {
      return rig_.queue->offload(source->address(), source->bytes(), compute_.stream(), compute_.stream(), source,
                                 Growth::Now);
    });
    // Dropped at once, the queue may still have it in a batch.
    if (dice_.percent(80)) handles_.copies.push_back(std::move(copy));
  }
  void drop_copy(Bin& bin) {
    std::shared_ptr<HostCopy> copy = take_any(handles_.copies, dice_);
    if (dice_.percent(30)) dropping_nothing([&] { return rig_.queue->release(copy); });
    if (dice_.percent(50)) bin.put(std::move(copy));
  }
  void reload() {
    const auto& copy = handles_.copies[dice_.below(handles_.copies.size())];
    std::shared_ptr<Buffer> target = compute_.allocate(copy->bytes());
    auto reload =
        dropping_nothing([&] { return rig_.queue->reload(copy, target->address(), compute_.stream(), target); });
    run_.counts.add("reloads never waited for");
    if (dice_.percent(70)) handles_.reloads.push_back(std::move(reload));
    if (dice_.percent(70)) handles_.targets.push_back(std::move(target));
  }
  void tidy() {
    dropping_nothing([&] { dice_.percent(50) ? rig_.queue->flush() : rig_.queue->collect(); });
    drop_returned(*rig_.queue);
  }

  Run& run_;
  Rig& rig_;
  ComputeStream compute_;
  Dice dice_;
  Handles handles_;
};

Handles make_a_mess(Run& run, Rig& rig, Dice& dice) {
  Abandoner abandoner(run, rig, dice.seed());
  Bin bin;
  run_together(2, [&](std::size_t index) {
    if (index == 1) {
      while (bin.empty_until_finished()) std::this_thread::yield();
      return;
    }
    const auto finish_at_last = [&bin](void*) { bin.finish(); };
    const std::unique_ptr<void, decltype(finish_at_last)> finishing(&bin, finish_at_last);
    for (std::uint64_t action = 0; action < actions; ++action) abandoner.act(bin);
  });
  return abandoner.take_handles();
}

// Each in its turn, in some order: what one close() left behind another must cope with.
void close_in_some_order(Run& run, Rig& rig, Dice& dice) {
  std::vector<std::function<void()>> closes = {[&] { rig.queue->close(); }, [&] { rig.pool->close(); },
                                               [&] { rig.device->close(); }};
  std::shuffle(closes.begin(), closes.end(), std::mt19937_64(dice.seed()));
  for (const auto& close : closes) close();
  drop_returned(*rig.queue);
  run.counts.add("closed in flight");
}

void drop_in_some_order(Run& run, Rig& rig, Handles& handles, Dice& dice) {
  std::vector<std::function<void()>> drops = {[&] { rig.queue.reset(); },      [&] { rig.pool.reset(); },
                                              [&] { rig.device.reset(); },     [&] { rig.heap.reset(); },
                                              [&] { handles.copies.clear(); }, [&] { handles.reloads.clear(); },
                                              [&] { handles.targets.clear(); }};
  std::shuffle(drops.begin(), drops.end(), std::mt19937_64(dice.seed()));
  for (const auto& drop : drops) drop();
  run.counts.add("dropped in flight");
}

void abandon(Run& run, const DeviceKind& kind, std::uint64_t seed) {
  Dice dice(seed);
  Rig rig = make_rig(run, kind, dice, HostMemory::Roomy);
  // What rigs before this one parked comes out of whichever queue is made next.
  drop_returned(*rig.queue);
  Handles handles = make_a_mess(run, rig, dice);
  require_no_violations(*rig.device);
  require(rig.heap->wrongly_dropped() == 0, "the queue must hand references back, not drop them");
  if (dice.percent(40)) close_in_some_order(run, rig, dice);
  drop_in_some_order(run, rig, handles, dice);
}

// Parked things hold one another (a queue its blocks, they their pool, that its device), so several rigs must pass.
void sweep(Run& run, Dice& dice) {
  for (int pass = 0; pass < 4; ++pass) {
    for (const DeviceKind& kind : device_kinds(run)) {
      if (kind.schedule != Schedule::Eager || kind.held) continue;
      Rig rig = make_rig(run, kind, dice, HostMemory::Roomy);
      drop_returned(*rig.queue);
      rig.queue->close();
      rig.pool->close();
      rig.device->close();
    }
  }
}

}  // namespace

void abandon_everything(Run& run) {
  Dice dice(run.seed);
  constexpr std::uint64_t messes = 4;
  for (std::uint64_t round = 0; round < run.rounds * messes; ++round) {
    for (const DeviceKind& kind : device_kinds(run)) {
      const std::uint64_t seed = dice.seed();
      run_together(abandoners, [&](std::size_t index) { abandon(run, kind, seed + index); });
    }
  }
  sweep(run, dice);
  require(DeviceHeap::live_heaps() == 0, "no buffer may be left anywhere");
  require_driver_clean(run);
}

}  // namespace vdnn::stress
