// Making a rig and taking it down.
#include "rig.h"

#include "device/cuda/cuda_device.h"
#include "device/sim/sim_device.h"
#include "fake_driver_controls.h"

namespace vdnn::stress {

std::vector<DeviceKind> device_kinds(const Run& run) {
  std::vector<DeviceKind> kinds = {
      {"eager", false, Schedule::Eager}, {"lazy", false, Schedule::Lazy}, {"random", false, Schedule::Random}};
  if (run.fake_driver != nullptr) {
    kinds.push_back({"cuda", true});
    kinds.push_back({"cuda delayed", true, Schedule::Eager, 30});
    kinds.push_back({"cuda held", true, Schedule::Eager, 0, true});
  }
  return kinds;
}

std::shared_ptr<OrderingChecker> open_device(const Run& run, const DeviceKind& kind, Dice& dice) {
  std::shared_ptr<Device> device;
  if (kind.cuda) {
    run.fake_driver->set_delays(dice.seed(), kind.longest_delay_us);
    run.fake_driver->hold_streams(kind.held);
    device = std::make_shared<CudaDevice>(0, run.fake_driver->path());
  } else {
    SimOptions options;
    options.schedule = kind.schedule;
    options.seed = dice.seed();
    device = std::make_shared<SimDevice>(options);
  }
  return std::make_shared<OrderingChecker>(std::move(device), OnViolation::Collect);
}

void furnish(Rig& rig, Dice& dice, HostMemory host_memory) {
  rig.heap = std::make_shared<DeviceHeap>(rig.device);
  PoolOptions pool;
  pool.cap_bytes = host_memory == HostMemory::Roomy ? std::uint64_t{256} << 20 : std::uint64_t{1} << 20;
  pool.slab_bytes = dice.between(4 << 10, 1 << 20);
  rig.pool = PinnedPool::create(rig.device, pool);
  add_queue(rig, dice);
}

void add_queue(Rig& rig, Dice& dice) {
  QueueOptions queue;
  queue.offload_window_bytes = dice.between(256 << 10, 4 << 20);
  queue.small_copy_bytes = std::uint64_t{16} << 10;
  queue.batch_bytes = dice.between(8 << 10, 128 << 10);
  rig.queue = std::make_shared<TransferQueue>(rig.device, rig.pool, queue);
}

Rig make_rig(const Run& run, const DeviceKind& kind, Dice& dice, HostMemory host_memory) {
  Rig rig;
  rig.device = open_device(run, kind, dice);
  furnish(rig, dice, host_memory);
  return rig;
}

void drop_returned(TransferQueue& queue) {
  static_cast<void>(queue.take_released());
  static_cast<void>(queue.take_finished());
}

void require_no_violations(OrderingChecker& device) {
  const std::vector<OrderingViolation> violations = device.take_violations();
  if (violations.empty()) return;
  const OrderingViolation& first = violations.front();
  throw Failure(std::to_string(violations.size()) + " accesses are not ordered, first " + first.second + " on '" +
                first.second_stream + "' after " + first.first + " on '" + first.first_stream + "'");
}

void require_driver_clean(const Run& run) {
  if (run.fake_driver == nullptr) return;
  const std::string leaks = run.fake_driver->leaks();
  run.fake_driver->reset();
  require(leaks.empty(), "the driver must have everything back, but there is still: " + leaks);
}

void finish(Run& run, Rig& rig) {
  rig.queue->close();
  drop_returned(*rig.queue);
  const QueueStats transfers = rig.queue->stats();
  require(transfers.failed == 0, "no copy may fail on a healthy device");
  rig.queue.reset();
  require(rig.pool->stats().live_bytes == 0, "every block must be back in the pool");
  rig.pool->close();
  require(rig.pool->stats().pinned_bytes == 0, "a closed pool must hold no memory");
  rig.pool.reset();
  rig.device->close();
  require_no_violations(*rig.device);
  require(rig.heap->live_buffers() == 0, "every buffer must have been let go");
  require(rig.heap->wrongly_dropped() == 0, "the queue must hand references back, not drop them");
  run.counts.add("offloads", transfers.offloads);
  run.counts.add("reloads", transfers.reloads);
  run.counts.add("refused", transfers.refused_offloads);
  run.counts.add("window waits", transfers.window_waits);
  run.counts.add("ordered accesses", rig.device->checked_accesses());
  rig.heap.reset();
  rig.device.reset();
}

}  // namespace vdnn::stress
