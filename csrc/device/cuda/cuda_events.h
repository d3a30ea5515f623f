// The CUDA events of one device: made once, handed out by record(), taken back when the last copy of an Event drops.
//
// A handle is reused only when no Event refers to its record any more, and the driver binds a wait to the record that
// existed when the wait was made: so reuse cannot change what an earlier wait means. Dropping an Event calls no
// driver and takes no lock; the next record picks the handle up.
#pragma once

#include <memory>
#include <vector>

#include "device/cuda/cuda_context.h"
#include "device/return_stack.h"

namespace vdnn {

class CudaEvents : public std::enable_shared_from_this<CudaEvents> {
 public:
  CudaEvents() = default;
  CudaEvents(const CudaEvents&) = delete;  // handles have one owner
  CudaEvents& operator=(const CudaEvents&) = delete;
  ~CudaEvents();

  // Not synchronised: the device's lock guards it. The context must be current.
  [[nodiscard]] Event record(CudaContext& context, driver::StreamHandle handle, Stream stream, std::uint64_t position,
                             Timing timing);
  [[nodiscard]] static driver::EventHandle handle_of(const Event& event);
  // Destroys every handle, also those that live Events still name (the device refuses such Events once closed).
  void destroy_all(CudaContext& context);

 private:
  struct Record final : EventRecord {
    driver::EventHandle handle = nullptr;
    Record* next_returned = nullptr;
    std::shared_ptr<CudaEvents> home;  // set while an Event refers to it
  };
  [[nodiscard]] std::unique_ptr<Record> take(CudaContext& context, Timing timing);
  void collect_returned();
  static void give_back(Record* record) noexcept;

  ReturnStack<Record> returned_;
  std::vector<std::unique_ptr<Record>> free_untimed_;
  std::vector<std::unique_ptr<Record>> free_timed_;
  std::vector<driver::EventHandle> handles_;
};

}  // namespace vdnn
