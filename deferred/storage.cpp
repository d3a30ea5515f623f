// Storages of the deferred accelerator: allocates the memory of tensors and changes their geometry. Runs no operation.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <torch/library.h>

#include "accelerator.h"

namespace vdnn::deferred {

namespace {

void end_lease(void* context) {
  const std::unique_ptr<Lease> lease(static_cast<Lease*>(context));
  if (lease == nullptr) return;
  // The arena and its blocks are destroyed with the accelerator. A closed device raises here.
  const auto accelerator = lease->accelerator.lock();
  if (accelerator == nullptr) return;
  try {
    accelerator->say_origin();
    accelerator->memory().free(lease->block);
  } catch (const std::exception& error) {
    accelerator->failed(std::string("freeing memory: ") + error.what());
  }
}

class TorchAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device device(c10::DeviceType::PrivateUse1, 0);
    if (bytes == 0) return {nullptr, device};
    const auto& accelerator = Accelerator::running();
    auto* block = accelerator->memory().allocate(bytes, Accelerator::current_stream());
    return {StreamOrderedMemory::address_of(block), new Lease{accelerator, block}, &end_lease, device};
  }
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* /*to*/, const void* /*from*/, std::size_t /*bytes*/) const override {
    TORCH_CHECK(false, "the deferred accelerator copies on streams only");
  }
};

TorchAllocator the_allocator;

at::Tensor empty_memory_format(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                               std::optional<at::Layout> /*layout*/, std::optional<at::Device> /*device*/,
                               std::optional<bool> /*pin*/, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &the_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> /*layout*/, std::optional<at::Device> /*device*/,
                         std::optional<bool> /*pin*/) {
  return at::detail::empty_strided_generic(
      size, stride, &the_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const std::size_t needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size();
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (storage->nbytes() < needed) {
    TORCH_CHECK(storage->nbytes() == 0, "the deferred accelerator resizes only what is empty");
    storage->set_data_ptr(the_allocator.allocate(needed));
    storage->set_nbytes(needed);
  }
  return tensor;
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  const auto* lease = static_cast<Lease*>(tensor.storage().data_ptr().get_context());
  const auto accelerator = lease == nullptr ? nullptr : lease->accelerator.lock();
  if (accelerator != nullptr) accelerator->memory().use_on(lease->block, static_cast<std::size_t>(stream.id()));
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, std::int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  return at::cpu::set_(tensor, std::move(storage), offset, size, stride);
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  const auto elements = static_cast<std::int64_t>(storage.nbytes() / tensor.element_size());
  return at::cpu::set_(tensor, std::move(storage), 0, {elements}, {1});
}

}  // namespace

}  // namespace vdnn::deferred

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &vdnn::deferred::the_allocator);

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  using namespace vdnn::deferred;
  library.impl("empty.memory_format", &empty_memory_format);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided",
               [](const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                  std::optional<std::int64_t> offset) { return at::cpu::as_strided(self, size, stride, offset); });
  library.impl("view", [](const at::Tensor& self, at::IntArrayRef size) { return at::cpu::view(self, size); });
  library.impl("_reshape_alias", [](const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
    return at::cpu::_reshape_alias(self, size, stride);
  });
  library.impl("unfold", [](const at::Tensor& self, std::int64_t dimension, std::int64_t size, std::int64_t step) {
    return at::cpu::unfold(self, dimension, size, step);
  });
  library.impl("record_stream", &record_stream);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
}
