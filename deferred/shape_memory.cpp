// Makes the key of a call, and calls the meta kernel for a new key.
#include "shape_memory.h"

#include <ATen/ATen.h>

#include <mutex>
#include <set>
#include <unordered_map>

#include "arguments.h"

namespace vdnn::deferred {

namespace {

using Answer = std::optional<std::vector<c10::IValue>>;

// Beyond this number all answers are forgotten: shapes that never repeat would fill memory.
constexpr std::size_t most_answers = 50'000;

// Everything in a call that a shape can depend on, as bytes.
class Key {
 public:
  Key(const c10::OperatorHandle& operation, const std::vector<c10::IValue>& arguments) {
    number(reinterpret_cast<std::uintptr_t>(&operation.schema()));
    number(c10::get_default_dtype_as_scalartype());
    number(at::GradMode::is_enabled());
    for (const c10::IValue& argument : arguments) value(argument);
  }
  // True if every argument is of a known kind and is in the key.
  [[nodiscard]] bool complete() const { return complete_; }
  [[nodiscard]] const std::string& bytes() const { return bytes_; }

 private:
  template <class Number>
  void number(Number value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  template <class List>
  void numbers(const List& list) {
    number(list.size());
    for (const auto& one : list) number(one);
  }

  void tensor(const at::Tensor& tensor) {
    number(tensor.defined());
    if (!tensor.defined()) return;
    number(tensor.device().type());
    number(tensor.scalar_type());
    number(tensor.is_conj());
    number(tensor.is_neg());
    numbers(tensor.sizes());
    numbers(tensor.strides());
    if (!tensor.is_cpu() || tensor.dim() != 0) return;
    // Meta kernels read the value of a zero-dimensional CPU tensor.
    number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
    bytes_.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.element_size());
  }

  void value(const c10::IValue& value) {
    bytes_.push_back(value.isNone()            ? '0'
                     : value.isTensor()        ? 't'
                     : value.isInt()           ? 'i'
                     : value.isDouble()        ? 'd'
                     : value.isBool()          ? 'b'
                     : value.isIntList()       ? 'I'
                     : value.isDoubleList()    ? 'D'
                     : value.isBoolList()      ? 'B'
                     : value.isString()        ? 's'
                     : value.isDevice()        ? 'v'
                     : value.isComplexDouble() ? 'c'
                     : value.isGenerator()     ? 'g'
                                               : 'l');
    if (value.isNone() || value.isGenerator()) return;
    if (value.isTensor()) return tensor(value.toTensor());
    if (value.isInt()) return number(value.toInt());
    if (value.isDouble()) return number(value.toDouble());
    if (value.isBool()) return number(value.toBool());
    if (value.isIntList()) return numbers(value.toIntVector());
    if (value.isDoubleList()) return numbers(value.toDoubleVector());
    if (value.isComplexDouble()) return number(value.toComplexDouble());
    if (value.isDevice()) return number(value.toDevice().type());
    if (value.isString()) {
      number(value.toStringRef().size());
      bytes_ += value.toStringRef();
      return;
    }
    if (!value.isList()) {
      complete_ = false;
      return;
    }
    const auto list = value.toListRef();
    number(list.size());
    for (const c10::IValue& one : list) this->value(one);
  }

  bool complete_ = true;
  std::string bytes_;
};

// Operations whose meta kernels give an accelerator's shapes and strides instead of the CPU's: those of oneDNN's
// workspace, of the tensors that embedding bags save for the backward pass, and of LAPACK's results.
bool meta_kernel_is_wrong(const c10::OperatorHandle& operation) {
  static const std::set<std::string> wrong{"aten::mkldnn_rnn_layer", "aten::_embedding_bag",
                                           "aten::_embedding_bag_forward_only", "aten::_linalg_svd",
                                           "aten::linalg_eig"};
  return wrong.count(operation.operator_name().name) != 0;
}

// Runs the CPU's kernel on zeros of the same geometry.
Answer try_out(const c10::OperatorHandle& operation, const std::vector<c10::IValue>& arguments) {
  torch::jit::Stack stack;
  for (const c10::IValue& argument : arguments) {
    stack.push_back(changed(argument, [](const at::Tensor& tensor) {
      return tensor.defined() ? at::zeros(tensor.sizes(), tensor.options().device(at::kCPU)) : tensor;
    }));
  }
  operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  return std::vector<c10::IValue>(stack.begin(), stack.end());
}

Answer ask(const c10::OperatorHandle& operation, const std::vector<c10::IValue>& arguments) {
  if (meta_kernel_is_wrong(operation)) return try_out(operation, arguments);
  torch::jit::Stack metas;
  for (const c10::IValue& argument : arguments) {
    metas.push_back(with_device(changed(argument, &as_meta), c10::DeviceType::Meta));
  }
  try {
    operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &metas);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return std::vector<c10::IValue>(metas.begin(), metas.end());
}

}  // namespace

Answer shapes_of(const c10::OperatorHandle& operation, const std::vector<c10::IValue>& arguments) {
  static std::mutex mutex;
  static auto* answers = new std::unordered_map<std::string, Answer>;  // never destroyed: threads may end after main
  const Key key(operation, arguments);
  if (!key.complete()) return ask(operation, arguments);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto known = answers->find(key.bytes());
    if (known != answers->end()) return known->second;
  }
  // Called without the lock: meta kernels in Python take the GIL.
  Answer answer = ask(operation, arguments);
  const std::lock_guard<std::mutex> lock(mutex);
  if (answers->size() >= most_answers) answers->clear();
  answers->emplace(key.bytes(), answer);
  return answer;
}

}  // namespace vdnn::deferred
