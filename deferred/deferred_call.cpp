// Gets the shapes, makes the results, and enqueues the operation on the current stream.
#include "deferred_call.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <torch/library.h>

#include <thread>

#include "accelerator.h"
#include "arguments.h"
#include "shape_memory.h"

namespace vdnn::deferred {

namespace {

// The state of a thread that has entered no mode. Under the random schedule an operation may run on any thread that
// makes a call, and must not see that thread's modes, hooks and autocast.
const at::ThreadLocalState& untouched_state() {
  static const auto* state = [] {
    const at::ThreadLocalState* captured = nullptr;
    std::thread([&] { captured = new at::ThreadLocalState; }).join();
    return captured;
  }();
  return *state;
}

// Operations that a GPU runs with some tensors of the CPU: copies, indices, and lengths of sequences.
bool may_read_cpu(const std::string& name) {
  for (const char* one :
       {"aten::copy_", "aten::index.Tensor", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index",
        "aten::_ctc_loss", "aten::_pack_padded_sequence", "aten::_pad_packed_sequence"}) {
    if (name.rfind(one, 0) == 0) return true;
  }
  return false;
}

class Call {
 public:
  Call(const c10::OperatorHandle& operation, torch::jit::Stack& stack, std::optional<at::MemoryFormat> format)
      : operation_(operation),
        stack_(stack),
        format_(format),
        accelerator_(*Accelerator::running()),
        name_(c10::toString(operation.operator_name())) {
    const std::size_t count = operation.schema().arguments().size();
    arguments_.assign(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end());
    torch::jit::drop(stack, count);
  }

  void make() {
    accelerator_.say_origin();
    const auto shapes = shapes_of(operation_, arguments_);
    if (!shapes.has_value()) {
      run_synchronously();
      return;
    }
    std::vector<c10::IValue> results;
    if (!results_for(*shapes, results)) return;  // a view: nothing runs
    note_arguments();
    for (const at::Tensor& fresh : fresh_) note(accelerator_, fresh, write_access, name_.c_str());
    enqueue();
    for (c10::IValue& result : results) stack_.push_back(std::move(result));
  }

 private:
  [[nodiscard]] at::Tensor allocated(const at::Tensor& shape) {
    if (!shape.defined()) {
      fresh_.push_back(shape);
      return shape;
    }
    const auto options = shape.options().device(c10::Device(c10::DeviceType::PrivateUse1, 0));
    at::Tensor fresh = format_.has_value() && shape.dim() == 4
                           ? at::empty(shape.sizes(), options.memory_format(*format_))
                           : at::empty_strided(shape.sizes(), shape.strides(), options);
    fresh_.push_back(fresh);
    return fresh;
  }

  // The argument that a return aliases, by its alias set.
  [[nodiscard]] const c10::IValue* aliased(const c10::AliasInfo& alias) const {
    const auto& declared = operation_.schema().arguments();
    for (std::size_t index = 0; index < declared.size(); ++index) {
      const auto* other = declared[index].alias_info();
      if (other != nullptr && other->beforeSets() == alias.beforeSets()) return &arguments_[index];
    }
    return nullptr;
  }

  [[nodiscard]] static at::Tensor view_of(const at::Tensor& base, const at::Tensor& shape) {
    const auto bytes = base.storage_offset() * base.element_size() + shape.storage_offset() * shape.element_size();
    at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                               base.key_set(), shape.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides(), bytes / shape.element_size());
    if (shape.is_conj() != view.is_conj()) view._set_conj(shape.is_conj());
    if (shape.is_neg() != view.is_neg()) view._set_neg(shape.is_neg());
    return view;
  }

  // False if the operation only makes views. They are then on the stack.
  [[nodiscard]] bool results_for(const std::vector<c10::IValue>& shapes, std::vector<c10::IValue>& results) {
    const auto& returns = operation_.schema().returns();
    bool only_views = !returns.empty();
    for (std::size_t index = 0; index < returns.size(); ++index) {
      const auto* alias = returns[index].alias_info();
      const c10::IValue* base = alias == nullptr ? nullptr : aliased(*alias);
      const bool is_view = base != nullptr && !alias->isWrite();
      only_views = only_views && is_view;
      if (base == nullptr) {
        results.push_back(changed(shapes[index], [this](const at::Tensor& shape) { return allocated(shape); }));
      } else if (is_view) {
        results.push_back(
            changed(shapes[index], [&](const at::Tensor& shape) { return view_of(base->toTensor(), shape); }));
      } else {
        if (base->isTensor() && shapes[index].isTensor()) grow(base->toTensor(), shapes[index].toTensor());
        results.push_back(*base);
      }
    }
    if (only_views) {
      for (c10::IValue& result : results) stack_.push_back(std::move(result));
    }
    return !only_views;
  }

  // The operation may have to resize an `out` argument.
  static void grow(const at::Tensor& tensor, const at::Tensor& shape) {
    if (tensor.sizes() != shape.sizes()) tensor.resize_(shape.sizes());
  }

  void note_arguments() {
    const auto& declared = operation_.schema().arguments();
    for (std::size_t index = 0; index < declared.size(); ++index) {
      const auto* alias = declared[index].alias_info();
      const int access = alias != nullptr && alias->isWrite() ? write_access : read_access;
      changed(arguments_[index], [&](const at::Tensor& tensor) {
        TORCH_CHECK(access == read_access || !tensor.defined() || !tensor.is_cpu(),
                    "Expected all tensors to be on the same device: ", name_, " writes to a tensor of the CPU");
        TORCH_CHECK(!tensor.defined() || !tensor.is_cpu() || tensor.dim() == 0 || may_read_cpu(name_),
                    "Expected all tensors to be on the same device: ", name_, " reads a tensor of the CPU");
        note(accelerator_, tensor, access, name_.c_str());
        return tensor;
      });
    }
  }

  // The task on the stream. It holds no tensor of the device, so that memory is free as soon as the program drops it.
  struct Deferred {
    c10::OperatorHandle operation;
    std::vector<c10::IValue> arguments;  // without tensors
    std::vector<std::vector<Reference>> tensors;
    std::vector<Reference> fresh;
    std::string name;
    std::weak_ptr<Accelerator> accelerator;
    bool grad_mode = at::GradMode::is_enabled();  // a kernel may ask

    [[nodiscard]] torch::jit::Stack on_cpu() const {
      torch::jit::Stack stack;
      for (std::size_t index = 0; index < arguments.size(); ++index) {
        std::size_t next = 0;
        const auto& references = tensors[index];
        stack.push_back(
            changed(arguments[index], [&](const at::Tensor& /*was*/) { return references[next++].on_cpu(); }));
      }
      return stack;
    }

    void run() const {
      // Without this call a new thread has another number of threads for a kernel, and so other bits.
      at::internal::lazy_init_num_threads();
      const at::ThreadLocalStateGuard neutral_state(untouched_state());
      const at::AutoGradMode callers_grad_mode(grad_mode);
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      torch::jit::Stack stack = on_cpu();
      operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      std::size_t next = 0;
      const auto& returns = operation.schema().returns();
      for (std::size_t index = 0; index < returns.size(); ++index) {
        if (returns[index].alias_info() != nullptr) continue;
        changed(stack[index], [&](const at::Tensor& result) {
          // The CPU's kernels leave out results that were not requested, and meta kernels make them. Each has an entry.
          const Reference& target = fresh.at(next++);
          if (target.defined && result.defined()) target.on_cpu().copy_(result);
          if (target.defined && !result.defined()) target.on_cpu().zero_();
          return result;
        });
      }
    }
  };

  static void run_deferred(void* task) {
    const auto& deferred = *static_cast<Deferred*>(task);
    try {
      deferred.run();
    } catch (const std::exception& error) {
      if (const auto accelerator = deferred.accelerator.lock())
        accelerator->failed(deferred.name + ": " + error.what());
    }
  }

  static void destroy_deferred(void* task) { delete static_cast<Deferred*>(task); }

  [[nodiscard]] std::unique_ptr<Deferred> deferred() const {
    auto task = std::make_unique<Deferred>(
        Deferred{operation_, {}, {}, {}, name_, std::weak_ptr<Accelerator>(Accelerator::running())});
    for (const c10::IValue& argument : arguments_) {
      std::vector<Reference> references;
      // An undefined tensor stands for each tensor, so that the task keeps none of them alive.
      task->arguments.push_back(with_device(changed(argument,
                                                    [&](const at::Tensor& tensor) {
                                                      references.push_back(reference_to(tensor));
                                                      return at::Tensor();
                                                    }),
                                            c10::DeviceType::CPU));
      task->tensors.push_back(std::move(references));
    }
    for (const at::Tensor& fresh : fresh_) task->fresh.push_back(reference_to(fresh));
    return task;
  }

  void enqueue() {
    auto task = deferred();
    const auto& table = accelerator_.table();
    accelerator_.deferred_one();
    table.enqueue(table.device, accelerator_.native(Accelerator::current_stream()), &run_deferred, &destroy_deferred,
                  task.release());
  }

  // An empty `out` argument is for the operation to resize. It gets an empty CPU tensor instead.
  void make_room_to_grow(torch::jit::Stack& stack, std::vector<std::pair<at::Tensor, at::Tensor>>& grown) const {
    const auto& declared = operation_.schema().arguments();
    for (std::size_t index = 0; index < declared.size(); ++index) {
      const auto* alias = declared[index].alias_info();
      if (alias == nullptr || !alias->isWrite() || !arguments_[index].isTensor()) continue;
      const at::Tensor& tensor = arguments_[index].toTensor();
      if (!tensor.defined() || tensor.numel() != 0) continue;
      grown.emplace_back(tensor, at::empty(tensor.sizes(), tensor.options().device(at::kCPU)));
      stack[index] = grown.back().second;
    }
  }

  void run_synchronously() {
    accelerator_.ran_synchronously(name_);
    note_arguments();
    accelerator_.drain_all();
    const auto task = deferred();
    torch::jit::Stack stack = task->on_cpu();
    std::vector<std::pair<at::Tensor, at::Tensor>> grown;
    make_room_to_grow(stack, grown);
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      operation_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    }
    for (const auto& [tensor, on_cpu] : grown) {
      if (on_cpu.numel() == 0) continue;
      tensor.resize_(on_cpu.sizes());
      if (on_cpu.is_non_overlapping_and_dense()) {
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(on_cpu.sizes(), on_cpu.strides());
      }
      note(accelerator_, tensor, write_access, name_.c_str());
      reference_to(tensor).on_cpu().copy_(on_cpu);
    }
    const auto& returns = operation_.schema().returns();
    for (std::size_t index = 0; index < returns.size(); ++index) {
      const auto* alias = returns[index].alias_info();
      const c10::IValue* base = alias == nullptr ? nullptr : aliased(*alias);
      if (base != nullptr) {
        stack_.push_back(*base);
        continue;
      }
      stack_.push_back(changed(stack[index], [&](const at::Tensor& result) {
        if (!result.defined()) return result;
        at::Tensor fresh = allocated(result);
        note(accelerator_, fresh, write_access, name_.c_str());
        reference_to(fresh).on_cpu().copy_(result);
        return fresh;
      }));
    }
  }

  const c10::OperatorHandle& operation_;
  torch::jit::Stack& stack_;
  const std::optional<at::MemoryFormat> format_;
  Accelerator& accelerator_;
  const std::string name_;
  std::vector<c10::IValue> arguments_;
  std::vector<at::Tensor> fresh_;
};

}  // namespace

void make_deferred_call(const c10::OperatorHandle& operation, torch::jit::Stack& stack,
                        std::optional<at::MemoryFormat> format) {
  Call(operation, stack, format).make();
}

}  // namespace vdnn::deferred
