// Scenario "training_state": optimizer states, gradients and parameters on the host, beside activations that move.
//
// Several trainers share device, pool and copy streams, as the threads of autograd and of the program do. A step brings
// a tensor to the device on the reload stream while another is stepped, and takes what was stepped back on the offload
// stream, into the block that it came from or into a new one, whose predecessor is dropped under its copy. Tensors that
// left are released in order, as the window needs it. What was fetched may be given up.
#include <deque>
#include <vector>

#include "compute_stream.h"
#include "network.h"
#include "noise.h"
#include "rig.h"
#include "together.h"

namespace vdnn::stress {
namespace {

constexpr std::size_t trainers = 3;
constexpr std::uint64_t steps = 4;
constexpr std::uint64_t tensors = 12;
constexpr std::uint64_t layers = 6;
constexpr std::uint64_t most_leaving = 3;

struct HostTensor {
  std::shared_ptr<PinnedBlock> block;
  std::uint64_t content = 0;
};

struct Moving {
  std::shared_ptr<Buffer> buffer;
  Event complete;
};

class StateTrainer {
 public:
  StateTrainer(const Rig& rig, ComputeStream& compute, std::uint64_t seed, Counts& counts)
      : device_(rig.device), pool_(rig.pool), queue_(rig.queue), compute_(compute), dice_(seed), counts_(counts) {}

  // The first step makes the tensors on the device, from where they leave.
  void make() {
    for (std::uint64_t index = 0; index < tensors; ++index) {
      HostTensor tensor;
      tensor.block = pool_->allocate(draw_bytes(dice_), Growth::Now);
      tensor.content = dice_.seed();
      Moving made{compute_.allocate(tensor.block->bytes()), Event()};
      compute_.fill(*made.buffer, tensor.content);
      leave(std::move(made), tensor);
      tensors_.push_back(std::move(tensor));
    }
    release_all();
  }

  void step() {
    std::deque<Moving> ahead;
    for (std::size_t index = 0; index < tensors_.size(); ++index) {
      while (ahead.size() < 2 && index + ahead.size() < tensors_.size()) {
        ahead.push_back(fetch(tensors_[index + ahead.size()]));
      }
      Moving moving = std::move(ahead.front());
      ahead.pop_front();
      if (dice_.percent(10)) {
        give_up(std::move(moving));
      } else {
        step_one(std::move(moving), tensors_[index]);
      }
      if (dice_.percent(10)) read_on_host(tensors_[dice_.below(tensors_.size())]);
    }
    release_all();
    counts_.add("steps of states");
  }

  void read_all() {
    for (const HostTensor& tensor : tensors_) read_on_host(tensor);
    tensors_.clear();
  }

 private:
  Moving fetch(const HostTensor& tensor) {
    Moving moving{compute_.allocate(tensor.block->bytes()), Event()};
    const Stream stream = queue_->reload_stream();
    device_->wait(stream, device_->record(compute_.stream(), Timing::Off));
    for (const Event& use : tensor.block->last_uses().events()) device_->wait(stream, use);
    device_->copy_async(moving.buffer->address(), tensor.block->address(), moving.buffer->bytes(),
                        CopyDirection::HostToDevice, stream);
    moving.complete = device_->record(stream, Timing::Off);
    tensor.block->note_use(moving.complete);
    counts_.add("fetched");
    return moving;
  }

  // Its memory goes to others once the copy into it is over.
  void give_up(Moving moving) {
    device_->wait(compute_.stream(), moving.complete);
    counts_.add("given up");
  }

  void step_one(Moving moving, HostTensor& tensor) {
    const Event begin = device_->record(compute_.stream(), Timing::On);
    device_->wait(compute_.stream(), moving.complete);
    const Event end = device_->record(compute_.stream(), Timing::On);
    compute_.check(*moving.buffer, tensor.content);
    tensor.content = dice_.seed();
    compute_.fill(*moving.buffer, tensor.content);
    if (dice_.percent(30)) tensor.block = pool_->allocate(moving.buffer->bytes(), Growth::Now);  // as a gradient
    leave(std::move(moving), tensor);
    if (dice_.percent(20)) {
      device_->synchronize(end);
      require(device_->elapsed_ns(begin, end) >= 0, "a wait must not end before it begins");
    }
  }

  void leave(Moving moving, const HostTensor& tensor) {
    const Stream stream = queue_->offload_stream();
    device_->wait(stream, device_->record(compute_.stream(), Timing::Off));
    for (const Event& use : tensor.block->last_uses().events()) device_->wait(stream, use);
    device_->copy_async(tensor.block->address(), moving.buffer->address(), moving.buffer->bytes(),
                        CopyDirection::DeviceToHost, stream);
    moving.complete = device_->record(stream, Timing::Off);
    tensor.block->note_use(moving.complete);
    leaving_.push_back(std::move(moving));
    while (leaving_.size() > most_leaving || (!leaving_.empty() && dice_.percent(20))) release_oldest();
  }

  void release_oldest() {
    device_->wait(compute_.stream(), leaving_.front().complete);
    leaving_.pop_front();
  }

  void release_all() {
    while (!leaving_.empty()) release_oldest();
  }

  void read_on_host(const HostTensor& tensor) {
    for (const Event& use : tensor.block->last_uses().events()) device_->synchronize(use);
    require(is_noise(tensor.block->address(), tensor.block->bytes(), tensor.content),
            "a tensor on the host must be what the last step left");
    counts_.add("read on the host");
  }

  std::shared_ptr<Device> device_;
  std::shared_ptr<PinnedPool> pool_;
  std::shared_ptr<TransferQueue> queue_;
  ComputeStream& compute_;
  Dice dice_;
  Counts& counts_;
  std::vector<HostTensor> tensors_;
  std::deque<Moving> leaving_;
};

void train(Run& run, const DeviceKind& kind, Dice& dice) {
  Rig rig = make_rig(run, kind, dice, HostMemory::Roomy);
  std::vector<ComputeStream> compute;
  std::vector<std::uint64_t> seeds;
  for (std::size_t index = 0; index < trainers; ++index) {
    const bool own = index % 2 != 0;
    compute.push_back(own ? ComputeStream::on_its_own(rig, "compute " + std::to_string(index))
                          : ComputeStream::on_callers(rig, kind.cuda ? 0 : index + 1));
    seeds.push_back(dice.seed());
  }
  run_together(trainers, [&](std::size_t index) {
    StateTrainer state(rig, compute[index], seeds[index], run.counts);
    Network network(rig, compute[index], seeds[index] + 1, run.counts);
    state.make();
    for (std::uint64_t step = 0; step < steps; ++step) {
      network.train_step(layers);
      state.step();
      if (index == 0) run.counts.add("trimmed bytes", rig.pool->trim());
    }
    state.read_all();
  });
  compute.clear();
  finish(run, rig);
  require_driver_clean(run);
}

}  // namespace

void train_with_state_away(Run& run) {
  Dice dice(run.seed);
  for (std::uint64_t round = 0; round < run.rounds; ++round) {
    for (const DeviceKind& kind : device_kinds(run)) train(run, kind, dice);
  }
  require(run.counts.of("given up") > 0, "something that was fetched must have been given up");
}

}  // namespace vdnn::stress
