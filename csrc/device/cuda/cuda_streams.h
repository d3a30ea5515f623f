// The streams of one GPU by index: those that the device created and must destroy, and those that it adopted.
//
// Not synchronized: the device's lock guards it. The context must be current for the functions that take it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "device/cuda/cuda_context.h"

namespace vdnn {

class CudaStreams {
 public:
  struct Entry {
    driver::StreamHandle handle = nullptr;
    std::string name;
    bool owned = false;
    std::uint64_t position = 0;  // of the last record
  };

  [[nodiscard]] std::uint32_t create(CudaContext& context, std::string_view name);
  [[nodiscard]] std::uint32_t adopt(std::uintptr_t native_handle);
  [[nodiscard]] bool has(std::uint32_t index) const noexcept { return index < entries_.size(); }
  [[nodiscard]] Entry& at(std::uint32_t index) { return entries_[index]; }
  // Waits for all work on the streams that the device created.
  void synchronize_owned(CudaContext& context) const;
  void destroy_all(CudaContext& context);

 private:
  std::vector<Entry> entries_;
};

}  // namespace vdnn
