// The device calls of an offload, in order.
#include "transfer/submission.h"

namespace vdnn {

Event Submission::put_on_stream(const std::vector<OutgoingCopy>& batch) {
  device_.wait(copy_stream_, device_.record(batch.front().producer));
  if (timing_ == Timing::On) began_ = device_.record(copy_stream_, timing_);
  for (const OutgoingCopy& outgoing : batch) {
    const PinnedBlock& block = *outgoing.copy->block();
    // The last reader of the block may not have run yet: the stream waits for it, the host does not.
    for (const Event& use : block.last_uses().events()) device_.wait(copy_stream_, use);
    device_.copy_async(block.address(), outgoing.source, outgoing.copy->bytes(), CopyDirection::DeviceToHost,
                       copy_stream_);
    ++copies_issued_;
  }
  return device_.record(copy_stream_, timing_);
}

bool Submission::settle() const noexcept {
  if (copies_issued_ == 0) return true;
  try {
    device_.drain(copy_stream_);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace vdnn
