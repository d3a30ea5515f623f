// Scenario "training": whole steps on every device, with compute on callers' threads and on a stream of its own.
#include "compute_stream.h"
#include "network.h"
#include "rig.h"

namespace vdnn::stress {
namespace {

constexpr std::uint64_t steps = 2;
constexpr std::uint64_t layers = 24;

void train(Run& run, const DeviceKind& kind, Runs runs, HostMemory host_memory, Dice& dice) {
  Rig rig = make_rig(run, kind, dice, host_memory);
  {
    ComputeStream compute =
        runs == Runs::OnCallers ? ComputeStream::on_callers(rig, 0) : ComputeStream::on_its_own(rig, "compute");
    Network network(rig, compute, dice.seed(), run.counts);
    for (std::uint64_t step = 0; step < steps; ++step) network.train_step(layers);
  }
  finish(run, rig);
  require_driver_clean(run);
}

}  // namespace

void train_on_every_device(Run& run) {
  Dice dice(run.seed);
  for (std::uint64_t round = 0; round < run.rounds; ++round) {
    for (const DeviceKind& kind : device_kinds(run)) {
      train(run, kind, Runs::OnCallers, HostMemory::Roomy, dice);
      train(run, kind, Runs::OnCallers, HostMemory::Tight, dice);
      // Its staging comes from the pool too and cannot do without, so here the pool has room.
      train(run, kind, Runs::OnItsOwn, HostMemory::Roomy, dice);
    }
  }
  require(run.counts.of("full") > 0, "host memory must have run out at times");
}

}  // namespace vdnn::stress
