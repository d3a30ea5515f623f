// Functions of fake modules, and the kernels behind them.
#include "fake_module.h"

#include <cstring>
#include <string_view>

#include "codec/codec.h"
#include "result_codes.h"

namespace vdnn::fake {

driver::Result ModuleTable::find_function(driver::Function* function, driver::Module module, const char* name) {
  if (function == nullptr || name == nullptr) return driver::invalid_value;
  std::vector<driver::Function>* functions = modules_.find(module);
  if (functions == nullptr) return invalid_handle;
  for (std::uint64_t index = 0; index < kernel_count; ++index) {
    const auto kernel = static_cast<Kernel>(index);
    if (std::string_view(kernel_symbol(kernel)) != name) continue;
    *function = functions_.add(kernel);
    functions->push_back(*function);
    return driver::success;
  }
  return not_found;
}

bool ModuleTable::unload(driver::Module module) {
  const auto functions = modules_.take(module);
  if (!functions) return false;
  for (const driver::Function function : *functions) functions_.take(function);
  return true;
}

std::optional<Kernel> ModuleTable::kernel(driver::Function function) {
  const Kernel* found = functions_.find(function);
  if (found == nullptr) return std::nullopt;
  return *found;
}

void run_kernel(const KernelCall& call) {
  if (call.kernel != Kernel::ContentHash) return run_on_cpu(call);
  std::uint64_t hash = 0;
  KernelCall reference = call;
  reference.target = reinterpret_cast<std::uintptr_t>(&hash);
  run_on_cpu(reference);
  void* target = reinterpret_cast<void*>(call.target);  // NOLINT(performance-no-int-to-ptr): an address by ABI
  std::uint64_t before = 0;
  std::memcpy(&before, target, sizeof before);
  hash += before;
  std::memcpy(target, &hash, sizeof hash);
}

}  // namespace vdnn::fake
