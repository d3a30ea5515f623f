// Scenario "events": threads record, wait for, ask about and drop events of shared streams; then the device is closed
// under them, and whoever still calls it must be told Closed.
#include <functional>
#include <vector>

#include "device/errors.h"
#include "rig.h"
#include "together.h"

namespace vdnn::stress {
namespace {

constexpr std::size_t users = 4;
constexpr std::uint64_t turns = 250;
constexpr std::uint64_t most_turns_until_closed = 2000;

// Events that everybody may use; putting one there drops the one before it.
class Board {
 public:
  void put(const Event& event, Dice& dice) {
    Event dropped = event;
    const std::lock_guard<std::mutex> lock(mutex_);
    std::swap(events_[dice.below(events_.size())], dropped);
  }
  [[nodiscard]] Event any(Dice& dice) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return events_[dice.below(events_.size())];
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Event> events_ = std::vector<Event>(16);
};

struct Table {
  std::shared_ptr<OrderingChecker> device;
  std::vector<Stream> streams;
  Board board;
};

void set_table(Table& table, const Run& run, const DeviceKind& kind, Dice& dice) {
  table.device = open_device(run, kind, dice);
  table.streams = {table.device->create_stream("one"), table.device->create_stream("two"),
                   table.device->adopt_stream(0)};
}

// An event that nobody waited for has happened once a blocking call on it returns.
void require_happened(Device& device, const Event& event) {
  require(device.query(event), "an event must have happened once it was synchronised with");
}

void measure(Device& device, Stream stream) {
  const Event begin = device.record(stream, Timing::On);
  const Event end = device.record(stream, Timing::On);
  require(device.elapsed_ns(begin, end) >= 0, "the later of two events of a stream must not be the earlier");
}

void call_once(Run& run, Table& table, Dice& dice) {
  Device& device = *table.device;
  const Stream stream = table.streams[dice.below(table.streams.size())];
  const Event event = table.board.any(dice);
  const std::uint64_t choice = dice.below(100);
  if (choice < 40) {
    table.board.put(device.record(stream, dice.percent(20) ? Timing::On : Timing::Off), dice);
  } else if (choice < 70) {
    device.wait(stream, event);
  } else if (choice < 85) {
    run.counts.add(device.query(event) ? "happened" : "not yet");
  } else if (choice < 95) {
    device.synchronize(event);
    require_happened(device, event);
  } else if (choice < 98) {
    device.drain(stream);
  } else {
    measure(device, stream);
  }
}

void require_closed(Table& table, Dice& dice) {
  const Event event = table.board.any(dice);
  const Stream stream = table.streams.front();
  const std::function<void()> calls[] = {
      [&] { static_cast<void>(table.device->record(stream, Timing::Off)); }, [&] { table.device->wait(stream, event); },
      [&] { static_cast<void>(table.device->query(event)); }, [&] { table.device->synchronize(event); },
      [&] { table.device->drain(stream); }};
  for (const auto& call : calls) {
    bool refused = false;
    try {
      call();
    } catch (const Closed&) {
      refused = true;
    }
    require(refused, "every call on a closed device must be answered with Closed");
  }
}

void share(Run& run, const DeviceKind& kind, Dice& dice) {
  Table table;
  set_table(table, run, kind, dice);
  const std::uint64_t seed = dice.seed();
  run_together(users, [&](std::size_t index) {
    Dice own(seed + index);
    for (std::uint64_t turn = 0; turn < turns; ++turn) call_once(run, table, own);
  });
  run.counts.add("calls", users * turns);
  table.device->close();
  require_no_violations(*table.device);
  require_driver_clean(run);
}

void call_until_closed(Run& run, Table& table, std::uint64_t seed, Progress& progress) {
  const Finishing finishing(progress);
  Dice dice(seed);
  for (std::uint64_t turn = 0; turn < most_turns_until_closed; ++turn) {
    try {
      call_once(run, table, dice);
    } catch (const Closed&) {
      run.counts.add("told closed");
      return;
    }
    progress.advance();
  }
  run.counts.add("done before the close");
}

void close_under_users(Run& run, const DeviceKind& kind, Dice& dice) {
  Table table;
  set_table(table, run, kind, dice);
  const std::uint64_t seed = dice.seed();
  const std::uint64_t moment = dice.between(1, 100);
  Progress progress;
  run_together(users + 1, [&](std::size_t index) {
    if (index < users) return call_until_closed(run, table, seed + index, progress);
    progress.wait_for(moment);
    table.device->close();
  });
  require_closed(table, dice);
  // The events on the board outlive their device.
  table.device.reset();
  require_driver_clean(run);
}

}  // namespace

void share_events(Run& run) {
  Dice dice(run.seed);
  for (std::uint64_t round = 0; round < run.rounds; ++round) {
    for (const DeviceKind& kind : device_kinds(run)) {
      share(run, kind, dice);
      close_under_users(run, kind, dice);
    }
  }
  require(run.counts.of("told closed") > 0, "some user must have met the close");
}

}  // namespace vdnn::stress
