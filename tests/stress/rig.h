// Everything a trainer needs over one device: an ordering checker, a heap, a pool and a queue; and how it ends.
#pragma once

#include <memory>
#include <vector>

#include "device/check/ordering_checker.h"
#include "device/sim/sim_streams.h"
#include "device_heap.h"
#include "dice.h"
#include "memory/pinned_pool.h"
#include "report.h"
#include "transfer/transfer_queue.h"

namespace vdnn::stress {

// A device and the schedule under which it runs what it is given.
struct DeviceKind {
  const char* name;
  bool cuda = false;  // CudaDevice over the fake driver
  Schedule schedule = Schedule::Eager;
  std::uint64_t longest_delay_us = 0;
  bool held = false;  // the fake driver's latest legal schedule
};

// Those that can run here, each once.
[[nodiscard]] std::vector<DeviceKind> device_kinds(const Run& run);
[[nodiscard]] std::shared_ptr<OrderingChecker> open_device(const Run& run, const DeviceKind& kind, Dice& dice);

struct Rig {
  std::shared_ptr<OrderingChecker> device;
  std::shared_ptr<DeviceHeap> heap;
  std::shared_ptr<PinnedPool> pool;
  std::shared_ptr<TransferQueue> queue;
};

// Roomy: all that is offloaded at once fits. Tight: host memory runs out now and then.
enum class HostMemory { Roomy, Tight };
// Adds heap, pool and queue, with windows that are often full.
void furnish(Rig& rig, Dice& dice, HostMemory host_memory);
void add_queue(Rig& rig, Dice& dice);
[[nodiscard]] Rig make_rig(const Run& run, const DeviceKind& kind, Dice& dice, HostMemory host_memory);

// Drops what the queue has handed back; nulls stand for references that were never given.
void drop_returned(TransferQueue& queue);
// Closes all in order and requires that everything was given back, in order, with nothing left.
void finish(Run& run, Rig& rig);
void require_no_violations(OrderingChecker& device);
// The fake driver counts nothing alive; its knobs go back to where they were.
void require_driver_clean(const Run& run);

}  // namespace vdnn::stress
