// What the deferred accelerator calls of a simulated device: plain functions, so that an extension built against
// torch's headers and the native core, which knows no torch, need share no C++ types.
//
// `device` is the first argument of each. Functions throw what the core throws, a std::exception. Streams are the
// indices of the device's own streams; an event is owned by whoever recorded it until drop_event.
#pragma once

#include <cstdint>

struct VdnnSimTable {
  std::uint32_t version;
  void* device;
  // Runs `run(task)` on the stream in its turn, then `destroy(task)`; only the latter when the device goes first.
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
  // Where in its program the calling thread is, for a checker's violations.
  void (*set_origin)(void* device, const char* origin);
};

inline constexpr std::uint32_t vdnn_sim_table_version = 2;
inline constexpr const char* vdnn_sim_table_name = "vdnn.sim_table";
