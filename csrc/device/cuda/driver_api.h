// The CUDA driver entry points that this package uses, declared here so that the build needs no CUDA toolkit.
//
// VDNN_DRIVER_CALLS lists all of them. The loader resolves each name (the versioned symbol, because dlsym does not see
// the macros of cuda.h), the fake driver of the tests defines each of them, and a test compares the two. Types and
// constants follow the driver's documented ABI.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vdnn::driver {

using Result = int;
using DeviceOrdinal = int;
using Context = struct ContextOpaque*;
using StreamHandle = struct StreamOpaque*;
using EventHandle = struct EventOpaque*;
using Module = struct ModuleOpaque*;
using Function = struct FunctionOpaque*;
using DevicePointer = unsigned long long;

inline constexpr Result success = 0;
inline constexpr Result invalid_value = 1;
inline constexpr Result out_of_memory = 2;
inline constexpr Result deinitialized = 4;
inline constexpr Result not_ready = 600;

inline constexpr unsigned stream_non_blocking = 1;
inline constexpr unsigned event_disable_timing = 2;
inline constexpr unsigned host_register_portable = 1;
inline constexpr int capture_mode_relaxed = 2;

inline constexpr int attribute_integrated = 18;
inline constexpr int attribute_compute_capability_major = 75;
inline constexpr int attribute_compute_capability_minor = 76;

// X(symbol, parameters): every call returns Result.
#define VDNN_DRIVER_CALLS(X)                                                                                   \
  X(cuInit, (unsigned flags))                                                                                  \
  X(cuDriverGetVersion, (int* version))                                                                        \
  X(cuGetErrorName, (Result error, const char** name))                                                         \
  X(cuDeviceGetCount, (int* count))                                                                            \
  X(cuDeviceGet, (DeviceOrdinal * device, int ordinal))                                                        \
  X(cuDeviceGetName, (char* name, int capacity, DeviceOrdinal device))                                         \
  X(cuDeviceGetAttribute, (int* value, int attribute, DeviceOrdinal device))                                   \
  X(cuDeviceTotalMem_v2, (std::size_t* bytes, DeviceOrdinal device))                                           \
  X(cuDeviceGetPCIBusId, (char* id, int capacity, DeviceOrdinal device))                                       \
  X(cuDevicePrimaryCtxRetain, (Context * context, DeviceOrdinal device))                                       \
  X(cuDevicePrimaryCtxRelease_v2, (DeviceOrdinal device))                                                      \
  X(cuCtxGetCurrent, (Context * context))                                                                      \
  X(cuCtxPushCurrent_v2, (Context context))                                                                    \
  X(cuCtxPopCurrent_v2, (Context * context))                                                                   \
  X(cuStreamCreate, (StreamHandle * stream, unsigned flags))                                                   \
  X(cuStreamDestroy_v2, (StreamHandle stream))                                                                 \
  X(cuStreamSynchronize, (StreamHandle stream))                                                                \
  X(cuStreamWaitEvent, (StreamHandle stream, EventHandle event, unsigned flags))                               \
  X(cuEventCreate, (EventHandle * event, unsigned flags))                                                      \
  X(cuEventDestroy_v2, (EventHandle event))                                                                    \
  X(cuEventRecord, (EventHandle event, StreamHandle stream))                                                   \
  X(cuEventQuery, (EventHandle event))                                                                         \
  X(cuEventSynchronize, (EventHandle event))                                                                   \
  X(cuEventElapsedTime, (float* milliseconds, EventHandle begin, EventHandle end))                             \
  X(cuMemcpyDtoHAsync_v2, (void* target, DevicePointer source, std::size_t bytes, StreamHandle stream))        \
  X(cuMemcpyHtoDAsync_v2, (DevicePointer target, const void* source, std::size_t bytes, StreamHandle stream))  \
  X(cuMemsetD8Async, (DevicePointer target, unsigned char value, std::size_t bytes, StreamHandle stream))      \
  X(cuMemHostRegister_v2, (void* address, std::size_t bytes, unsigned flags))                                  \
  X(cuMemHostUnregister, (void* address))                                                                      \
  X(cuMemAlloc_v2, (DevicePointer * address, std::size_t bytes))                                               \
  X(cuMemFree_v2, (DevicePointer address))                                                                     \
  X(cuModuleLoadData, (Module * module, const void* image))                                                    \
  X(cuModuleUnload, (Module module))                                                                           \
  X(cuModuleGetFunction, (Function * function, Module module, const char* name))                               \
  X(cuLaunchKernel,                                                                                            \
    (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, \
     unsigned block_z, unsigned shared_bytes, StreamHandle stream, void** params, void** extra))               \
  X(cuThreadExchangeStreamCaptureMode, (int* mode))

// True for an error of work that the driver had already accepted: the context is lost after it.
[[nodiscard]] constexpr bool is_asynchronous(Result result) noexcept {
  switch (result) {
    case 214:  // ECC_UNCORRECTABLE
    case 220:  // NVLINK_UNCORRECTABLE
    case 226:  // CONTAINED
    case 700:  // ILLEGAL_ADDRESS
    case 702:  // LAUNCH_TIMEOUT
    case 710:  // ASSERT
    case 714:  // HARDWARE_STACK_ERROR
    case 715:  // ILLEGAL_INSTRUCTION
    case 716:  // MISALIGNED_ADDRESS
    case 717:  // INVALID_ADDRESS_SPACE
    case 718:  // INVALID_PC
    case 719:  // LAUNCH_FAILED
    case 721:  // TENSOR_MEMORY_LEAK
    case 911:  // EXTERNAL_DEVICE
    case 999:  // UNKNOWN
      return true;
    default:
      return false;
  }
}

}  // namespace vdnn::driver
