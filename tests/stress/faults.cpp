// Scenario "faults": training on CudaDevice while the driver refuses one call, or loses the device in one copy.
//
// A refused call may cost one step, never data: the steps after it are checked as ever. After a lost device nothing
// works, but everything can still be closed. Either way the driver gets everything back.
#include <vector>

#include "compute_stream.h"
#include "device/errors.h"
#include "fake_driver_controls.h"
#include "network.h"
#include "rig.h"

namespace vdnn::stress {
namespace {

constexpr int out_of_memory = 2;
constexpr int illegal_address = 700;
constexpr std::uint64_t steps = 3;
constexpr std::uint64_t layers = 10;

enum class Fault {
  None,
  RefusedCall,
  RefusedTakeover,  // a call refused to a queue that takes over what one dropped without close() left
  LostDevice,
};

struct Trial {
  DeviceKind kind;
  Runs runs = Runs::OnCallers;
  std::uint64_t seed = 0;
  Fault fault = Fault::None;
  std::uint64_t nth = 0;  // call, or copy, from 1
};

void arm(const FakeDriverControls& driver, const Trial& trial) {
  if (trial.fault == Fault::RefusedCall) driver.fail_nth(trial.nth, out_of_memory);
  if (trial.fault == Fault::LostDevice) driver.fail_async(trial.nth, illegal_address);
}

// Closes once more after a failure: what could not be given back is tried again.
template <class Closable>
void close_persistently(const std::shared_ptr<Closable>& thing, Counts& counts) {
  if (thing == nullptr) return;
  try {
    thing->close();
  } catch (const Error&) {
    counts.add("closes tried again");
    thing->close();
  }
}

class Trainer {
 public:
  Trainer(Run& run, const Trial& trial) : run_(run), trial_(trial), dice_(trial.seed) {}

  void train() {
    if (!attempt([&] { set_up(); })) return;
    for (std::uint64_t step = 0; step < steps && !lost_; ++step) {
      if (!attempt([&] { network_->train_step(layers); })) network_->forget();
    }
    // Interrupted: what comes next, close(), finds copies in flight.
    if (!lost_) attempt([&] { network_->forward(layers); });
    network_->forget();
    // One refused call is one error at most; whatever else goes wrong was broken by it.
    require(lost_ || errors_ <= 1, "after one refused call all must work again");
  }

  void close() {
    network_.reset();
    if (trial_.fault == Fault::RefusedTakeover) replace_queue();
    std::vector<Keepalive> returned = close_queue();
    // On a refused call everything has ended with the queue, so late accesses show. On a lost device another copy may
    // be half way, and only the device's close() waits for that.
    if (!lost_) returned.clear();
    if (!lost_) close_persistently(rig_.pool, run_.counts);
    close_persistently(rig_.device, run_.counts);
    close_persistently(rig_.pool, run_.counts);
    if (rig_.device != nullptr) require_no_violations(*rig_.device);
  }

 private:
  void set_up() {
    rig_.device = open_device(run_, trial_.kind, dice_);
    furnish(rig_, dice_, HostMemory::Roomy);
    compute_ =
        std::make_unique<ComputeStream>(trial_.runs == Runs::OnCallers ? ComputeStream::on_callers(rig_, 0)
                                                                       : ComputeStream::on_its_own(rig_, "compute"));
    network_ = std::make_unique<Network>(rig_, *compute_, dice_.seed(), run_.counts);
  }

  template <class Part>
  bool attempt(const Part& part) {
    try {
      part();
      return true;
    } catch (const DeviceLost&) {
      lost_ = true;
    } catch (const PinnedMemoryFull&) {
      throw;  // the pool has room for all of it
    } catch (const Error&) {
      ++errors_;
    }
    run_.counts.add(lost_ ? "lost devices" : "refused calls");
    return false;
  }

  void replace_queue() {
    rig_.queue.reset();
    run_.fake_driver->fail_nth(trial_.nth, out_of_memory);
    if (!attempt([&] { add_queue(rig_, dice_); })) add_queue(rig_, dice_);
  }

  std::vector<Keepalive> close_queue() {
    if (rig_.queue == nullptr) return {};
    try {
      rig_.queue->close();
    } catch (const DeviceLost&) {
      lost_ = true;
    } catch (const Error&) {
      run_.counts.add("closes tried again");
      rig_.queue->close();
    }
    std::vector<Keepalive> returned = rig_.queue->take_released();
    for (Keepalive& reference : rig_.queue->take_finished()) returned.push_back(std::move(reference));
    rig_.queue.reset();
    return returned;
  }

  Run& run_;
  const Trial trial_;
  Dice dice_;
  Rig rig_;
  std::unique_ptr<ComputeStream> compute_;
  std::unique_ptr<Network> network_;
  bool lost_ = false;
  std::uint64_t errors_ = 0;
};

std::string describe(const FakeDriverControls& driver, const Trial& trial) {
  const std::string where = std::string(" on ") + trial.kind.name + ", seed " + std::to_string(trial.seed);
  if (trial.fault == Fault::None) return "without a fault" + where;
  const std::string nth = std::to_string(trial.nth);
  if (trial.fault == Fault::LostDevice) return "device lost in copy " + nth + where;
  if (trial.fault == Fault::RefusedTakeover) return "refused call " + nth + " of a takeover" + where;
  return "refused call " + nth + ", " + driver.call_name(trial.nth - 1) + where;
}

// Returns the driver calls that it took.
std::uint64_t attempt(Run& run, const Trial& trial) {
  const FakeDriverControls& driver = *run.fake_driver;
  arm(driver, trial);
  try {
    Trainer trainer(run, trial);
    trainer.train();
    trainer.close();
  } catch (const std::exception& error) {
    throw Failure(std::string(error.what()) + "; " + describe(driver, trial));
  }
  const std::uint64_t calls = driver.calls();
  run.counts.add(driver.faults_pending() == 0 ? "faults fired" : "faults not reached");
  require_driver_clean(run);
  return calls;
}

void try_faults(Run& run, const DeviceKind& kind, Runs runs, Dice& dice) {
  Trial trial{kind, runs, dice.seed()};
  const std::uint64_t calls = attempt(run, trial);
  constexpr int refused_calls = 8;
  for (int time = 0; time < refused_calls; ++time) {
    trial.fault = Fault::RefusedCall;
    // Half of them near the end, where things are given back.
    trial.nth = dice.percent(50) ? dice.between(1, calls) : calls - dice.below(calls / 16);
    attempt(run, trial);
  }
  constexpr int refused_takeovers = 4;
  constexpr std::uint64_t takeover_calls = 24;  // two streams made, two waited for
  for (int time = 0; time < refused_takeovers; ++time) {
    trial.fault = Fault::RefusedTakeover;
    trial.nth = dice.between(1, takeover_calls);
    attempt(run, trial);
  }
  constexpr int lost_devices = 4;
  for (int time = 0; time < lost_devices; ++time) {
    trial.fault = Fault::LostDevice;
    trial.nth = dice.between(1, steps * layers);
    attempt(run, trial);
  }
}

}  // namespace

void train_with_faults(Run& run) {
  Dice dice(run.seed);
  for (std::uint64_t round = 0; round < run.rounds; ++round) {
    for (const DeviceKind& kind : device_kinds(run)) {
      if (!kind.cuda) continue;
      try_faults(run, kind, Runs::OnCallers, dice);
      try_faults(run, kind, Runs::OnItsOwn, dice);
    }
  }
}

}  // namespace vdnn::stress
