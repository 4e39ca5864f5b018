// Handles, their settings, and what cuBLAS says of itself.

#include "simgpu/blas/handle.h"

#include <memory>

using simgpu::blas::from_c;
using simgpu::blas::Handle;

namespace {

// Sets one field of a handle, or says that there is no handle.
template <typename Field, typename Value>
cublasStatus_t set(cublasHandle_t handle, Field Handle::* field, Value value) {
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  from_c(handle)->*field = value;
  return CUBLAS_STATUS_SUCCESS;
}

template <typename Field, typename Value>
cublasStatus_t get(cublasHandle_t handle, Field Handle::* field, Value* value) {
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (value == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  *value = static_cast<Value>(from_c(handle)->*field);
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  if (handle == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  *handle = reinterpret_cast<cublasHandle_t>(std::make_unique<Handle>().release());
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  const std::unique_ptr<Handle> owned(from_c(handle));
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetVersion_v2(cublasHandle_t, int* version) {
  if (version == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  *version = CUBLAS_VERSION;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetProperty(libraryPropertyType type, int* value) {
  if (value == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  switch (type) {
    case MAJOR_VERSION:
      *value = CUBLAS_VER_MAJOR;
      return CUBLAS_STATUS_SUCCESS;
    case MINOR_VERSION:
      *value = CUBLAS_VER_MINOR;
      return CUBLAS_STATUS_SUCCESS;
    case PATCH_LEVEL:
      *value = CUBLAS_VER_PATCH;
      return CUBLAS_STATUS_SUCCESS;
  }
  return CUBLAS_STATUS_INVALID_VALUE;
}

const char* cublasGetStatusName(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS (simulated)";
}

const char* cublasGetStatusString(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? "success" : "the simulated GPU's BLAS refused the call";
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  return set(handle, &Handle::stream, stream);
}

cublasStatus_t cublasGetStream_v2(cublasHandle_t handle, cudaStream_t* stream) {
  return get(handle, &Handle::stream, stream);
}

// The workspace is the caller's memory; nothing is written to it.
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void*, size_t) {
  return handle == nullptr ? CUBLAS_STATUS_NOT_INITIALIZED : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  return set(handle, &Handle::math, mode);
}

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode) {
  return get(handle, &Handle::math, mode);
}

cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
  return set(handle, &Handle::pointer_mode, mode);
}

cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t* mode) {
  return get(handle, &Handle::pointer_mode, mode);
}

cublasStatus_t cublasSetAtomicsMode(cublasHandle_t handle, cublasAtomicsMode_t mode) {
  return set(handle, &Handle::atomics, mode);
}

cublasStatus_t cublasGetAtomicsMode(cublasHandle_t handle, cublasAtomicsMode_t* mode) {
  return get(handle, &Handle::atomics, mode);
}

cublasStatus_t cublasSetSmCountTarget(cublasHandle_t handle, int count) {
  return set(handle, &Handle::sm_count_target, count);
}

cublasStatus_t cublasGetSmCountTarget(cublasHandle_t handle, int* count) {
  return get(handle, &Handle::sm_count_target, count);
}

}  // extern "C"
