// The one deferred accelerator of a process: the streams and memory of a simulated device, and counts of operations.
#pragma once

#include <c10/core/Stream.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bindings/sim_table.h"
#include "stream_ordered_memory.h"

namespace vdnn::deferred {

inline constexpr c10::DeviceType device_type = c10::DeviceType::PrivateUse1;

class Accelerator {
 public:
  // `owner` keeps the table's device alive. `origin` returns where in its program the calling thread is; if it is not
  // empty, it is called before every operation.
  Accelerator(const VdnnSimTable& table, std::shared_ptr<void> owner, std::vector<std::uint32_t> streams,
              std::uint64_t capacity_bytes, std::function<std::string()> origin);

  // Throws when none has been started.
  [[nodiscard]] static const std::shared_ptr<Accelerator>& running();
  [[nodiscard]] static std::shared_ptr<Accelerator> running_or_null();
  static void start(std::shared_ptr<Accelerator> accelerator);
  static void stop();

  // The calling thread's current stream, by number; 0 is the default one.
  [[nodiscard]] static std::size_t current_stream();
  static void set_current_stream(std::size_t stream);

  [[nodiscard]] const VdnnSimTable& table() const { return table_; }
  [[nodiscard]] std::size_t streams() const { return streams_.size(); }
  [[nodiscard]] std::uint32_t native(std::size_t stream) const { return streams_.at(stream); }
  [[nodiscard]] StreamOrderedMemory& memory() { return memory_; }
  [[nodiscard]] std::size_t next_pool_stream();

  void say_origin() const;
  void drain(std::size_t stream);
  void drain_all();
  // Counts an operation that could not be deferred: it waited for all streams and ran on the calling thread.
  void ran_synchronously(const std::string& operation);
  [[nodiscard]] std::map<std::string, std::uint64_t> synchronous_operations();
  void deferred_one() { ++deferred_; }
  [[nodiscard]] std::uint64_t deferred() const { return deferred_; }
  // Remembers that an operation failed on its stream. The next wait raises it, as on a GPU.
  void failed(const std::string& what);
  void raise_failure();

 private:
  const VdnnSimTable table_;
  const std::shared_ptr<void> owner_;
  const std::vector<std::uint32_t> streams_;
  StreamOrderedMemory memory_;
  const std::function<std::string()> origin_;
  std::atomic<std::uint64_t> deferred_{0};
  std::atomic<std::size_t> next_stream_{0};
  std::mutex mutex_;  // guards the members below
  std::map<std::string, std::uint64_t> synchronous_;
  std::string failure_;
};

// Context of a tensor's storage: a block and its accelerator. A tensor that outlives the accelerator owns no memory.
struct Lease {
  std::weak_ptr<Accelerator> accelerator;
  StreamOrderedMemory::Block* block;
};

}  // namespace vdnn::deferred
