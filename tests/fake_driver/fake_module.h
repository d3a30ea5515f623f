// Modules whose code is the codec's CPU reference: any image will do, and the kernels are in each.
//
// Guarded by the driver's lock, except run_kernel, which a stream calls while it runs a launch.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "codec/kernel_call.h"
#include "device/cuda/driver_api.h"
#include "handle_table.h"

namespace vdnn::fake {

class ModuleTable final {
 public:
  [[nodiscard]] driver::Module load() { return modules_.add({}); }
  [[nodiscard]] driver::Result find_function(driver::Function* function, driver::Module module, const char* name);
  // False if there is no such module. Its functions go with it.
  bool unload(driver::Module module);
  // Which kernel `function` is; empty if it is none, or its module was unloaded.
  [[nodiscard]] std::optional<Kernel> kernel(driver::Function function);
  [[nodiscard]] std::size_t live() const noexcept { return modules_.size(); }

 private:
  HandleTable<driver::Module, std::vector<driver::Function>> modules_{0x53000000};
  HandleTable<driver::Function, Kernel> functions_{0x54000000};
};

// What the device code does, done by the CPU reference. The content hash is ADDED to its target, as on the GPU, so
// that a host which forgot to zero the target gets a wrong answer here too.
void run_kernel(const KernelCall& call);

}  // namespace vdnn::fake
