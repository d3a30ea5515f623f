// Recycles CUDA events.
#include "device/cuda/cuda_events.h"

namespace vdnn {

CudaEvents::~CudaEvents() {
  collect_returned();
}

void CudaEvents::give_back(Record* record) noexcept {
  // The last Event may outlive its device: release the home only after the push.
  const std::shared_ptr<CudaEvents> home = std::move(record->home);
  record->clock.reset();
  home->returned_.push(record);
}

void CudaEvents::collect_returned() {
  for (Record* record = returned_.take_all(); record != nullptr;) {
    Record* next = record->next_returned;
    (record->timed ? free_timed_ : free_untimed_).emplace_back(record);
    record = next;
  }
}

std::unique_ptr<CudaEvents::Record> CudaEvents::take(CudaContext& context, Timing timing) {
  collect_returned();
  auto& free = timing == Timing::On ? free_timed_ : free_untimed_;
  if (!free.empty()) {
    std::unique_ptr<Record> record = std::move(free.back());
    free.pop_back();
    return record;
  }
  auto record = std::make_unique<Record>();
  record->timed = timing == Timing::On;
  handles_.reserve(handles_.size() + 1);  // so that a created handle is always recorded
  const unsigned flags = timing == Timing::On ? 0 : driver::event_disable_timing;
  context.check(context.driver().cuEventCreate(&record->handle, flags), "cuEventCreate");
  handles_.push_back(record->handle);
  return record;
}

Event CudaEvents::record(CudaContext& context, driver::StreamHandle handle, Stream stream, std::uint64_t position,
                         Timing timing) {
  std::unique_ptr<Record> record = take(context, timing);
  const driver::Result result = context.driver().cuEventRecord(record->handle, handle);
  if (result != driver::success) {
    auto& free = record->timed ? free_timed_ : free_untimed_;
    free.push_back(std::move(record));
    context.fail(result, "cuEventRecord", 0);
  }
  record->stream = stream;
  record->position = position;
  record->home = shared_from_this();
  return Event(std::shared_ptr<const EventRecord>(record.release(), [](const EventRecord* dropped) {
    give_back(static_cast<Record*>(const_cast<EventRecord*>(dropped)));
  }));
}

driver::EventHandle CudaEvents::handle_of(const Event& event) {
  return static_cast<const Record&>(event.record()).handle;
}

void CudaEvents::destroy_all(CudaContext& context) {
  while (!handles_.empty()) {
    context.check_released(context.driver().cuEventDestroy_v2(handles_.back()), "cuEventDestroy_v2");
    handles_.pop_back();
  }
  free_timed_.clear();
  free_untimed_.clear();
}

}  // namespace vdnn
