// dlopen and dlsym behind FakeDriverControls.
#include "fake_driver_controls.h"

#include <dlfcn.h>
#include <unistd.h>

#include <filesystem>

#include "report.h"

namespace vdnn::stress {
namespace {

void* open_library(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  require(library != nullptr, "the fake driver " + path + " must open: " + (library == nullptr ? dlerror() : ""));
  return library;
}

template <class Function>
void resolve(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  require(function != nullptr, std::string("the fake driver must have ") + name);
}

}  // namespace

FakeDriverControls::FakeDriverControls(std::string path) : path_(std::move(path)), library_(open_library(path_)) {
  resolve(library_, "fake_set_delays", set_delays);
  resolve(library_, "fake_hold_streams", hold_streams);
  resolve(library_, "fake_fail_nth", fail_nth);
  resolve(library_, "fake_fail_async", fail_async);
  resolve(library_, "fake_faults_pending", faults_pending);
  resolve(library_, "fake_reset", reset);
  resolve(library_, "fake_calls", calls);
  resolve(library_, "fake_call_name", call_name);
  resolve(library_, "fake_live", live_);
}

std::string FakeDriverControls::leaks() const {
  std::string text;
  for (const char* kind : {"context", "stream", "event", "module", "device_bytes", "host_bytes", "pinned_ranges"}) {
    const std::int64_t count = live_(kind);
    if (count == 0) continue;
    if (!text.empty()) text += ", ";
    text += std::string(kind) + " " + std::to_string(count);
  }
  return text;
}

std::string fake_driver_beside_program() {
  std::error_code ignored;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  const auto library = program.parent_path() / "libvdnn_fake_driver.so";
  return std::filesystem::exists(library, ignored) ? library.string() : "";
}

}  // namespace vdnn::stress
