// The functions of a simulated device that the deferred accelerator calls. They are plain functions, so that an
// extension built against torch's headers and the native core, built without torch, share no C++ types.
//
// `device` is the first argument of each. Functions throw the core's errors, which are std::exceptions. Streams are the
// indices of the device's own streams. The caller of `record` owns the event until it calls drop_event.
#pragma once

#include <cstdint>

struct VdnnSimTable {
  std::uint32_t version;
  void* device;
  // Runs `run(task)` in stream order, then `destroy(task)`. Calls only `destroy` if the device is destroyed first.
  void (*enqueue)(void* device, std::uint32_t stream, void (*run)(void*), void (*destroy)(void*), void* task);
  void* (*record)(void* device, std::uint32_t stream);
  void (*wait)(void* device, std::uint32_t stream, void* event);
  bool (*query)(void* device, void* event);
  void (*synchronize)(void* device, void* event);
  void (*drop_event)(void* event);
  void (*drain)(void* device, std::uint32_t stream);
  // access: 0 read, 1 write, 2 release.
  void (*note)(void* device, std::uintptr_t address, std::uint64_t bytes, int access, std::uint32_t stream,
               const char* label);
  std::uintptr_t (*allocate)(void* device, std::uint64_t bytes);
  // Sets where in its program the calling thread is, for a checker's violations.
  void (*set_origin)(void* device, const char* origin);
};

inline constexpr std::uint32_t vdnn_sim_table_version = 2;
inline constexpr const char* vdnn_sim_table_name = "vdnn.sim_table";
