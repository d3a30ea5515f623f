// Scenario "several_threads": trainers on threads of their own share one device, one heap, one pool and one queue.
//
// Each has its own compute stream and its own copies, but any of them may be the one that releases another's source,
// takes over what the queue hands back, or makes room in the pool.
#include <vector>

#include "compute_stream.h"
#include "network.h"
#include "rig.h"
#include "together.h"

namespace vdnn::stress {
namespace {

constexpr std::size_t trainers = 4;
constexpr std::uint64_t steps = 2;
constexpr std::uint64_t layers = 16;

// Half of them compute on their own thread, half on a stream that runs by itself.
std::vector<ComputeStream> make_compute_streams(const Rig& rig, const DeviceKind& kind) {
  std::vector<ComputeStream> streams;
  for (std::size_t index = 0; index < trainers; ++index) {
    if (index % 2 != 0) {
      streams.push_back(ComputeStream::on_its_own(rig, "compute " + std::to_string(index)));
    } else {
      // On CudaDevice these share the legacy stream, as two threads do that never chose a stream.
      streams.push_back(ComputeStream::on_callers(rig, kind.cuda ? 0 : index + 1));
    }
  }
  return streams;
}

void train(Run& run, const DeviceKind& kind, Dice& dice) {
  Rig rig = make_rig(run, kind, dice, HostMemory::Roomy);
  std::vector<ComputeStream> compute = make_compute_streams(rig, kind);
  std::vector<std::uint64_t> seeds;
  for (std::size_t index = 0; index < trainers; ++index) seeds.push_back(dice.seed());
  run_together(trainers, [&](std::size_t index) {
    Network network(rig, compute[index], seeds[index], run.counts);
    for (std::uint64_t step = 0; step < steps; ++step) {
      network.train_step(layers);
      // Slabs are unpinned and pinned again while others copy.
      if (index == 0) run.counts.add("trimmed bytes", rig.pool->trim());
    }
  });
  compute.clear();
  finish(run, rig);
  require_driver_clean(run);
}

}  // namespace

void train_with_several_threads(Run& run) {
  Dice dice(run.seed);
  for (std::uint64_t round = 0; round < run.rounds; ++round) {
    for (const DeviceKind& kind : device_kinds(run)) train(run, kind, dice);
  }
}

}  // namespace vdnn::stress
