// Fills and checks.
#include "compute_stream.h"

#include "noise.h"

namespace vdnn::stress {

ComputeStream::ComputeStream(const Rig& rig, ComputeOrder order)
    : device_(rig.device), heap_(rig.heap), pool_(rig.pool), order_(order) {}

ComputeStream ComputeStream::on_callers(const Rig& rig, std::uintptr_t handle) {
  return {rig, {rig.device->adopt_stream(handle), Runs::OnCallers}};
}

ComputeStream ComputeStream::on_its_own(const Rig& rig, std::string_view name) {
  return {rig, {rig.device->create_stream(name), Runs::OnItsOwn}};
}

void ComputeStream::fill(const Buffer& buffer, std::uint64_t content) {
  if (order_.runs == Runs::OnItsOwn) return upload(buffer, content);
  device_->note_access({buffer.address(), buffer.bytes()}, Access::Write, order_.stream, "fill");
  write_noise(buffer.address(), buffer.bytes(), content);
}

void ComputeStream::check(const Buffer& buffer, std::uint64_t content) {
  bool equal = false;
  if (order_.runs == Runs::OnItsOwn) {
    equal = equals_downloaded(buffer, content);
  } else {
    device_->note_access({buffer.address(), buffer.bytes()}, Access::Read, order_.stream, "check");
    equal = is_noise(buffer.address(), buffer.bytes(), content);
  }
  // A lost device runs nothing more and says so at the next call: then it is that which is wrong, not the bytes.
  if (!equal) device_->drain(order_.stream);
  require(equal, "a buffer of " + std::to_string(buffer.bytes()) + " bytes must come back as it was");
}

Event ComputeStream::copy(const std::shared_ptr<PinnedBlock>& block, const Buffer& buffer, CopyDirection direction) {
  const bool to_host = direction == CopyDirection::DeviceToHost;
  const Address target = to_host ? block->address() : buffer.address();
  const Address source = to_host ? buffer.address() : block->address();
  device_->copy_async(target, source, buffer.bytes(), direction, order_.stream);
  try {
    const Event done = device_->record(order_.stream, Timing::Off);
    block->note_use(done);
    return done;
  } catch (...) {
    stranded_.push_back(block);
    throw;
  }
}

void ComputeStream::upload(const Buffer& buffer, std::uint64_t content) {
  const std::shared_ptr<PinnedBlock> block = pool_->allocate(buffer.bytes(), Growth::Now);
  // The host itself writes the block, so it is the host that must wait.
  for (const Event& use : block->last_uses().events()) device_->synchronize(use);
  write_noise(block->address(), buffer.bytes(), content);
  static_cast<void>(copy(block, buffer, CopyDirection::HostToDevice));
}

bool ComputeStream::equals_downloaded(const Buffer& buffer, std::uint64_t content) {
  const std::shared_ptr<PinnedBlock> block = pool_->allocate(buffer.bytes(), Growth::Now);
  for (const Event& use : block->last_uses().events()) device_->wait(order_.stream, use);
  device_->synchronize(copy(block, buffer, CopyDirection::DeviceToHost));
  return is_noise(block->address(), buffer.bytes(), content);
}

}  // namespace vdnn::stress
