// Forward, backward, and the choices a hook makes on the way.
#include "network.h"

#include "device/errors.h"
#include "noise.h"

namespace vdnn::stress {

Network::Network(const Rig& rig, ComputeStream& compute, std::uint64_t seed, Counts& counts)
    : device_(rig.device), queue_(rig.queue), compute_(compute), dice_(seed), counts_(counts) {}

void Network::train_step(std::uint64_t layers) {
  forward(layers);
  backward();
  drop_returned(*queue_);
  counts_.add("steps");
}

void Network::forward(std::uint64_t layers) {
  for (std::uint64_t layer = 0; layer < layers; ++layer) {
    std::shared_ptr<Buffer> source = compute_.allocate(draw_bytes(dice_));
    const std::uint64_t content = dice_.seed();
    compute_.fill(*source, content);
    save(std::move(source), content);
    after_layer();
  }
}

void Network::save(std::shared_ptr<Buffer> source, std::uint64_t content) {
  Activation& activation = activations_.emplace_back();
  activation.bytes = source->bytes();
  activation.content = content;
  try {
    const Growth growth = dice_.percent(70) ? Growth::Now : Growth::Later;
    activation.copy = dropping_nothing([&] {
      return queue_->offload(source->address(), source->bytes(), compute_.stream(), compute_.stream(), source, growth);
    });
  } catch (const PinnedMemoryFull&) {
    counts_.add("full");
  }
  if (activation.copy == nullptr) activation.resident = std::move(source);
}

// A hook releases what it offloaded some layers before; sometimes it looks at a copy, sometimes it does nothing.
void Network::after_layer() {
  if (dice_.percent(50)) {
    const Activation& earlier = activations_[dice_.below(activations_.size())];
    if (earlier.copy != nullptr) dropping_nothing([&] { return queue_->release(earlier.copy); });
  }
  if (dice_.percent(10)) dropping_nothing([&] { queue_->flush(); });
  if (dice_.percent(10)) check_on_host(activations_[dice_.below(activations_.size())]);
  if (dice_.percent(60)) drop_returned(*queue_);
}

void Network::check_on_host(const Activation& activation) {
  if (activation.copy == nullptr) return;
  const Event ready = queue_->ready(activation.copy);
  if (queue_->state(activation.copy) != CopyState::Submitted) return;
  device_->synchronize(ready);
  const bool equal = is_noise(activation.copy->block()->address(), activation.bytes, activation.content);
  if (!equal) device_->drain(compute_.stream());  // as in ComputeStream::check
  require(equal, "a ready copy of " + std::to_string(activation.bytes) + " bytes must equal its source");
}

void Network::backward() {
  const std::size_t look_ahead = dice_.below(5);
  for (std::size_t index = activations_.size(); index-- > 0;) {
    reload_ahead(index, look_ahead);
    consume(activations_[index]);
    activations_.pop_back();
    if (dice_.percent(60)) drop_returned(*queue_);
  }
}

void Network::reload_ahead(std::size_t index, std::size_t look_ahead) {
  for (std::size_t ahead = 0; ahead <= look_ahead && ahead <= index; ++ahead) {
    issue(activations_[index - ahead]);
  }
}

void Network::issue(Activation& activation) {
  if (activation.resident != nullptr || activation.reload != nullptr) return;
  static_cast<void>(queue_->ready(activation.copy));  // submits it: only then it is known whether that works
  if (queue_->state(activation.copy) == CopyState::Failed) {
    keep_failed_source(activation);
    return;
  }
  activation.target = compute_.allocate(activation.bytes);
  activation.reload = dropping_nothing([&] {
    return queue_->reload(activation.copy, activation.target->address(), compute_.stream(), activation.target);
  });
}

void Network::keep_failed_source(Activation& activation) {
  const Keepalive source = queue_->failure(activation.copy).second;
  require(source != nullptr, "a copy that failed must still have its source");
  activation.resident = std::static_pointer_cast<Buffer>(source);
  counts_.add("kept sources");
}

void Network::consume(Activation& activation) {
  if (activation.resident != nullptr) return compute_.check(*activation.resident, activation.content);
  dropping_nothing([&] { queue_->wait(activation.reload, compute_.stream()); });
  compute_.check(*activation.target, activation.content);
  // In either order: the handles and the target are dropped at different moments of a real backward pass.
  if (dice_.percent(50)) activation.copy.reset();
  if (dice_.percent(50)) activation.target.reset();
}

}  // namespace vdnn::stress
