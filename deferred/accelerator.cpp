// The accelerator's state, and torch's view of its devices and streams.
#include "accelerator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

namespace vdnn::deferred {

namespace {

std::shared_ptr<Accelerator> the_accelerator;
thread_local std::size_t the_current_stream = 0;

}  // namespace

Accelerator::Accelerator(const VdnnSimTable& table, std::shared_ptr<void> owner, std::vector<std::uint32_t> streams,
                         std::uint64_t capacity_bytes, std::function<std::string()> origin)
    : table_(table),
      owner_(std::move(owner)),
      streams_(streams),
      memory_(table, std::move(streams), capacity_bytes),
      origin_(std::move(origin)) {}

const std::shared_ptr<Accelerator>& Accelerator::running() {
  TORCH_CHECK(the_accelerator != nullptr, "no deferred accelerator is running: enter one first");
  return the_accelerator;
}

std::shared_ptr<Accelerator> Accelerator::running_or_null() {
  return the_accelerator;
}

void Accelerator::start(std::shared_ptr<Accelerator> accelerator) {
  TORCH_CHECK(the_accelerator == nullptr, "a deferred accelerator is running already: there is one at a time");
  the_accelerator = std::move(accelerator);
  the_current_stream = 0;
}

void Accelerator::stop() {
  the_accelerator.reset();
}

std::size_t Accelerator::current_stream() {
  return the_current_stream;
}

void Accelerator::set_current_stream(std::size_t stream) {
  the_current_stream = stream;
}

std::size_t Accelerator::next_pool_stream() {
  return streams_.size() == 1 ? 0 : 1 + next_stream_++ % (streams_.size() - 1);
}

void Accelerator::say_origin() const {
  if (origin_) table_.set_origin(table_.device, origin_().c_str());
}

void Accelerator::drain(std::size_t stream) {
  table_.drain(table_.device, native(stream));
  raise_failure();
}

void Accelerator::drain_all() {
  for (const std::uint32_t stream : streams_) table_.drain(table_.device, stream);
  raise_failure();
}

void Accelerator::ran_synchronously(const std::string& operation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++synchronous_[operation];
}

std::map<std::string, std::uint64_t> Accelerator::synchronous_operations() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return synchronous_;
}

void Accelerator::failed(const std::string& what) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_.empty()) failure_ = what;
}

void Accelerator::raise_failure() {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(failure_.empty(), "an operation failed on the deferred accelerator: ", failure_);
}

namespace {

c10::Stream stream_of(std::size_t number) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(device_type, 0), static_cast<c10::StreamId>(number));
}

std::size_t number_of(const c10::Stream& stream) {
  return static_cast<std::size_t>(stream.id());
}

// An event of torch: recorded again in place. A wait refers to the latest record before it.
struct TorchEvent {
  explicit TorchEvent(std::shared_ptr<Accelerator> accelerator) : accelerator(std::move(accelerator)) {}
  TorchEvent(const TorchEvent&) = delete;  // owns its record
  TorchEvent& operator=(const TorchEvent&) = delete;
  ~TorchEvent() { drop(); }
  void drop() {
    if (record != nullptr) accelerator->table().drop_event(record);
    record = nullptr;
  }
  std::shared_ptr<Accelerator> accelerator;
  void* record = nullptr;
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  [[nodiscard]] c10::DeviceType type() const override { return device_type; }
  [[nodiscard]] c10::Device exchangeDevice(c10::Device /*to*/) const override { return getDevice(); }
  [[nodiscard]] c10::Device getDevice() const override { return {device_type, 0}; }
  void setDevice(c10::Device /*to*/) const override {}
  void uncheckedSetDevice(c10::Device /*to*/) const noexcept override {}
  [[nodiscard]] c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  [[nodiscard]] c10::Stream getStream(c10::Device /*of*/) const override {
    return stream_of(Accelerator::current_stream());
  }
  [[nodiscard]] c10::Stream getDefaultStream(c10::Device /*of*/) const override { return stream_of(0); }
  [[nodiscard]] c10::Stream getStreamFromGlobalPool(c10::Device /*of*/, bool /*high*/) const override {
    return stream_of(Accelerator::running()->next_pool_stream());
  }
  [[nodiscard]] c10::Stream getNewStream(c10::Device /*of*/, int /*priority*/) const override {
    return stream_of(Accelerator::running()->next_pool_stream());
  }
  [[nodiscard]] c10::Stream exchangeStream(c10::Stream to) const override {
    const c10::Stream before = stream_of(Accelerator::current_stream());
    Accelerator::set_current_stream(number_of(to));
    return before;
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    const auto& accelerator = Accelerator::running();
    if (*event == nullptr) *event = new TorchEvent(accelerator);
    auto& recorded = *static_cast<TorchEvent*>(*event);
    recorded.drop();
    recorded.record = accelerator->table().record(accelerator->table().device, accelerator->native(number_of(stream)));
  }
  void block(void* event, const c10::Stream& stream) const override {
    const auto* recorded = static_cast<TorchEvent*>(event);
    if (recorded == nullptr || recorded->record == nullptr) return;
    const auto& accelerator = *recorded->accelerator;
    accelerator.table().wait(accelerator.table().device, accelerator.native(number_of(stream)), recorded->record);
  }
  [[nodiscard]] bool queryEvent(void* event) const override {
    const auto* recorded = static_cast<TorchEvent*>(event);
    if (recorded == nullptr || recorded->record == nullptr) return true;
    return recorded->accelerator->table().query(recorded->accelerator->table().device, recorded->record);
  }
  void synchronizeEvent(void* event) const override {
    const auto* recorded = static_cast<TorchEvent*>(event);
    if (recorded == nullptr || recorded->record == nullptr) return;
    recorded->accelerator->table().synchronize(recorded->accelerator->table().device, recorded->record);
    recorded->accelerator->raise_failure();
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<TorchEvent*>(event);
  }
  void synchronizeStream(const c10::Stream& stream) const override { Accelerator::running()->drain(number_of(stream)); }
  void synchronizeDevice(c10::DeviceIndex /*device*/) const override { Accelerator::running()->drain_all(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    const auto* lease = static_cast<Lease*>(data.get_context());
    const auto accelerator = lease == nullptr ? nullptr : lease->accelerator.lock();
    if (accelerator != nullptr) accelerator->memory().use_on(lease->block, number_of(stream));
  }
};

// The other functions that torch calls on an accelerator.
class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  [[nodiscard]] bool isBuilt() const override { return true; }
  [[nodiscard]] bool isAvailable() const override { return true; }
  [[nodiscard]] bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  [[nodiscard]] c10::DeviceIndex deviceCount() const override { return 1; }
  [[nodiscard]] c10::DeviceIndex getCurrentDevice() const override { return 0; }
  [[nodiscard]] c10::DeviceIndex exchangeDevice(c10::DeviceIndex /*to*/) const override { return 0; }
  [[nodiscard]] c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex /*to*/) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex /*to*/) const override {}
  // Operations draw random numbers when they run, from the CPU's generator.
  [[nodiscard]] const at::Generator& getDefaultGenerator(c10::DeviceIndex /*device*/) const override {
    return at::detail::getDefaultCPUGenerator();
  }
};

Hooks the_hooks;

[[maybe_unused]] const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(&the_hooks);
  return true;
}();

}  // namespace

}  // namespace vdnn::deferred

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(PrivateUse1, vdnn::deferred::Guard)
}  // namespace c10::impl
