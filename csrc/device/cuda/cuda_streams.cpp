// Creates, adopts and destroys CUDA streams.
#include "device/cuda/cuda_streams.h"

namespace vdnn {

std::uint32_t CudaStreams::create(CudaContext& context, std::string_view name) {
  entries_.reserve(entries_.size() + 1);  // so that a created stream is always recorded
  Entry entry;
  entry.name = name;
  entry.owned = true;
  // Non-blocking: torch's default stream is the legacy one. An ordinary stream would synchronize with it at every call,
  // and copies would silently not overlap with computation.
  context.check(context.driver().cuStreamCreate(&entry.handle, driver::stream_non_blocking), "cuStreamCreate");
  entries_.push_back(std::move(entry));
  return static_cast<std::uint32_t>(entries_.size() - 1);
}

std::uint32_t CudaStreams::adopt(std::uintptr_t native_handle) {
  const auto handle = reinterpret_cast<driver::StreamHandle>(native_handle);
  for (std::size_t index = 0; index < entries_.size(); ++index) {
    if (!entries_[index].owned && entries_[index].handle == handle) return static_cast<std::uint32_t>(index);
  }
  Entry entry;
  entry.handle = handle;
  entry.name = native_handle == 0 ? "compute" : "compute-" + std::to_string(native_handle);
  entries_.push_back(std::move(entry));
  return static_cast<std::uint32_t>(entries_.size() - 1);
}

void CudaStreams::synchronize_owned(CudaContext& context) const {
  for (const Entry& entry : entries_) {
    if (!entry.owned) continue;
    context.check_released(context.driver().cuStreamSynchronize(entry.handle), "cuStreamSynchronize");
  }
}

void CudaStreams::destroy_all(CudaContext& context) {
  while (!entries_.empty()) {
    if (entries_.back().owned) {
      context.check_released(context.driver().cuStreamDestroy_v2(entries_.back().handle), "cuStreamDestroy_v2");
    }
    entries_.pop_back();
  }
}

}  // namespace vdnn
