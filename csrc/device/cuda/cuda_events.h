// The CUDA events of one device: created once, handed out by record(), and returned when the last copy of an Event is
// destroyed.
//
// A handle is reused only when no Event refers to its record any more. The driver binds a wait to the record that
// existed when the wait was issued, so reuse cannot change the meaning of an earlier wait. Destroying an Event does not
// call the driver and takes no lock; a later record() reuses the handle.
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

  // Not synchronized: the device's lock guards it. The context must be current.
  [[nodiscard]] Event record(CudaContext& context, driver::StreamHandle handle, Stream stream, std::uint64_t position,
                             Timing timing);
  [[nodiscard]] static driver::EventHandle handle_of(const Event& event);
  // Destroys every handle, including those of live Events (a closed device refuses such Events).
  void destroy_all(CudaContext& context);

 private:
  struct Record final : EventRecord {
    driver::EventHandle handle = nullptr;
    Record* next_returned = nullptr;
    std::shared_ptr<CudaEvents> home;  // set while an Event refers to this record
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
