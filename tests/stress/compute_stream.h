// The stream on which a network computes: allocates, fills and checks buffers, all ordered on that stream.
//
// On callers' threads a fill writes the buffer directly, as torch's CPU operations do. On a stream of its own a fill is
// a copy from a pinned block and a check a copy into one, so blocks of the pool are reused behind their events too.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "rig.h"

namespace vdnn::stress {

class ComputeStream {
 public:
  // `handle` names a stream of somebody else; CudaDevice's only one that runs on callers is 0, the legacy stream.
  [[nodiscard]] static ComputeStream on_callers(const Rig& rig, std::uintptr_t handle);
  [[nodiscard]] static ComputeStream on_its_own(const Rig& rig, std::string_view name);

  [[nodiscard]] Stream stream() const noexcept { return order_.stream; }
  [[nodiscard]] std::shared_ptr<Buffer> allocate(std::uint64_t bytes) { return heap_->allocate(bytes, order_); }
  void fill(const Buffer& buffer, std::uint64_t content);
  // Throws Failure unless the buffer, as the stream finds it, has this content.
  void check(const Buffer& buffer, std::uint64_t content);

 private:
  ComputeStream(const Rig& rig, ComputeOrder order);
  void upload(const Buffer& buffer, std::uint64_t content);
  [[nodiscard]] bool equals_downloaded(const Buffer& buffer, std::uint64_t content);
  [[nodiscard]] Event copy(const std::shared_ptr<PinnedBlock>& block, const Buffer& buffer, CopyDirection direction);

  std::shared_ptr<Device> device_;
  std::shared_ptr<DeviceHeap> heap_;
  std::shared_ptr<PinnedPool> pool_;
  ComputeOrder order_;
  // A copy was issued and its event could not be recorded: nobody knows when these may be written again.
  std::vector<std::shared_ptr<PinnedBlock>> stranded_;
};

}  // namespace vdnn::stress
