// Marks the functions that the CPU reference and the CUDA kernels share.
#pragma once

#ifdef __CUDACC__
#define VDNN_HOST_DEVICE __host__ __device__
#else
#define VDNN_HOST_DEVICE
#endif
