// A cuBLAS handle of the dry mode: nothing but the settings that callers may ask for again.
#pragma once

#include <cublas_api.h>

namespace simgpu::blas {

struct Handle {
  void* stream = nullptr;  // a cudaStream_t; null is the device's default stream
  cublasMath_t math = CUBLAS_DEFAULT_MATH;
  cublasPointerMode_t pointer_mode = CUBLAS_POINTER_MODE_HOST;
  cublasAtomicsMode_t atomics = CUBLAS_ATOMICS_NOT_ALLOWED;
  int sm_count_target = 0;  // 0: all
};

inline Handle* from_c(cublasHandle_t handle) { return reinterpret_cast<Handle*>(handle); }

}  // namespace simgpu::blas
