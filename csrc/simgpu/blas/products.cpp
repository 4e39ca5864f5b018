// The matrix products of cuBLAS, single, batched and with every type. Signatures are checked
// against cublas_api.h; the 64-bit names differ from the others in the type of sizes only.

#include "simgpu/blas/handle.h"
#include "simgpu/blas/work.h"

using simgpu::blas::from_c;
using simgpu::blas::Product;
using simgpu::blas::report;

namespace {

cublasStatus_t queue(cublasHandle_t handle, const char* name, Product product) {
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  if ((from_c(handle)->math & CUBLAS_TF32_TENSOR_OP_MATH) != 0) product.tensor_float = true;
  return report(name, from_c(handle)->stream, product);
}

Product product_of(int64_t m, int64_t n, int64_t k, int64_t batch, cudaDataType type) {
  return {.m = m, .n = n, .k = k, .batch = batch, .a = type, .b = type, .c = type};
}

bool allows_tensor_float(cublasComputeType_t type) { return type == CUBLAS_COMPUTE_32F_FAST_TF32; }

}  // namespace

// One type's functions: SCALAR in memory, TYPE as cuBLAS names it, SIZE of the sizes.
#define SIMGPU_PRODUCTS_OF(SINGLE, BATCHED, STRIDED, SCALAR, TYPE, SIZE)                          \
  cublasStatus_t SINGLE(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, SIZE m,      \
                        SIZE n, SIZE k, const SCALAR*, const SCALAR*, SIZE, const SCALAR*, SIZE,  \
                        const SCALAR*, SCALAR*, SIZE) {                                           \
    return queue(handle, #SINGLE, product_of(m, n, k, 1, TYPE));                                  \
  }                                                                                               \
  cublasStatus_t BATCHED(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, SIZE m,     \
                         SIZE n, SIZE k, const SCALAR*, const SCALAR* const*, SIZE,               \
                         const SCALAR* const*, SIZE, const SCALAR*, SCALAR* const*, SIZE,         \
                         SIZE batch) {                                                            \
    return queue(handle, #BATCHED, product_of(m, n, k, batch, TYPE));                             \
  }                                                                                               \
  cublasStatus_t STRIDED(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, SIZE m,     \
                         SIZE n, SIZE k, const SCALAR*, const SCALAR*, SIZE, long long,           \
                         const SCALAR*, SIZE, long long, const SCALAR*, SCALAR*, SIZE, long long, \
                         SIZE batch) {                                                            \
    return queue(handle, #STRIDED, product_of(m, n, k, batch, TYPE));                             \
  }

// A matrix and a vector: a product with n = 1.
#define SIMGPU_VECTOR_PRODUCT(NAME, SCALAR, TYPE, SIZE)                                         \
  cublasStatus_t NAME(cublasHandle_t handle, cublasOperation_t, SIZE m, SIZE n, const SCALAR*,  \
                      const SCALAR*, SIZE, const SCALAR*, SIZE, const SCALAR*, SCALAR*, SIZE) { \
    return queue(handle, #NAME, product_of(m, 1, n, 1, TYPE));                                  \
  }

#define SIMGPU_TYPED(SIZE, SUFFIX)                                                                 \
  cublasStatus_t cublasGemmEx##SUFFIX(                                                             \
      cublasHandle_t handle, cublasOperation_t, cublasOperation_t, SIZE m, SIZE n, SIZE k,         \
      const void*, const void*, cudaDataType a, SIZE, const void*, cudaDataType b, SIZE,           \
      const void*, void*, cudaDataType c, SIZE, cublasComputeType_t type, cublasGemmAlgo_t) {      \
    return queue(handle, "cublasGemmEx" #SUFFIX,                                                   \
                 {.m = m,                                                                          \
                  .n = n,                                                                          \
                  .k = k,                                                                          \
                  .a = a,                                                                          \
                  .b = b,                                                                          \
                  .c = c,                                                                          \
                  .tensor_float = allows_tensor_float(type)});                                     \
  }                                                                                                \
  cublasStatus_t cublasGemmBatchedEx##SUFFIX(                                                      \
      cublasHandle_t handle, cublasOperation_t, cublasOperation_t, SIZE m, SIZE n, SIZE k,         \
      const void*, const void* const*, cudaDataType a, SIZE, const void* const*, cudaDataType b,   \
      SIZE, const void*, void* const*, cudaDataType c, SIZE, SIZE batch, cublasComputeType_t type, \
      cublasGemmAlgo_t) {                                                                          \
    return queue(handle, "cublasGemmBatchedEx" #SUFFIX,                                            \
                 {.m = m,                                                                          \
                  .n = n,                                                                          \
                  .k = k,                                                                          \
                  .batch = batch,                                                                  \
                  .a = a,                                                                          \
                  .b = b,                                                                          \
                  .c = c,                                                                          \
                  .tensor_float = allows_tensor_float(type)});                                     \
  }                                                                                                \
  cublasStatus_t cublasGemmStridedBatchedEx##SUFFIX(                                               \
      cublasHandle_t handle, cublasOperation_t, cublasOperation_t, SIZE m, SIZE n, SIZE k,         \
      const void*, const void*, cudaDataType a, SIZE, long long, const void*, cudaDataType b,      \
      SIZE, long long, const void*, void*, cudaDataType c, SIZE, long long, SIZE batch,            \
      cublasComputeType_t type, cublasGemmAlgo_t) {                                                \
    return queue(handle, "cublasGemmStridedBatchedEx" #SUFFIX,                                     \
                 {.m = m,                                                                          \
                  .n = n,                                                                          \
                  .k = k,                                                                          \
                  .batch = batch,                                                                  \
                  .a = a,                                                                          \
                  .b = b,                                                                          \
                  .c = c,                                                                          \
                  .tensor_float = allows_tensor_float(type)});                                     \
  }                                                                                                \
  cublasStatus_t cublasSgemmEx##SUFFIX(                                                            \
      cublasHandle_t handle, cublasOperation_t, cublasOperation_t, SIZE m, SIZE n, SIZE k,         \
      const float*, const void*, cudaDataType a, SIZE, const void*, cudaDataType b, SIZE,          \
      const float*, void*, cudaDataType c, SIZE) {                                                 \
    return queue(handle, "cublasSgemmEx" #SUFFIX,                                                  \
                 {.m = m, .n = n, .k = k, .a = a, .b = b, .c = c});                                \
  }

extern "C" {

SIMGPU_PRODUCTS_OF(cublasHgemm, cublasHgemmBatched, cublasHgemmStridedBatched, __half, CUDA_R_16F,
                   int)
SIMGPU_PRODUCTS_OF(cublasHgemm_64, cublasHgemmBatched_64, cublasHgemmStridedBatched_64, __half,
                   CUDA_R_16F, int64_t)
SIMGPU_PRODUCTS_OF(cublasSgemm_v2, cublasSgemmBatched, cublasSgemmStridedBatched, float, CUDA_R_32F,
                   int)
SIMGPU_PRODUCTS_OF(cublasSgemm_v2_64, cublasSgemmBatched_64, cublasSgemmStridedBatched_64, float,
                   CUDA_R_32F, int64_t)
SIMGPU_PRODUCTS_OF(cublasDgemm_v2, cublasDgemmBatched, cublasDgemmStridedBatched, double,
                   CUDA_R_64F, int)
SIMGPU_PRODUCTS_OF(cublasDgemm_v2_64, cublasDgemmBatched_64, cublasDgemmStridedBatched_64, double,
                   CUDA_R_64F, int64_t)
SIMGPU_PRODUCTS_OF(cublasCgemm_v2, cublasCgemmBatched, cublasCgemmStridedBatched, cuComplex,
                   CUDA_C_32F, int)
SIMGPU_PRODUCTS_OF(cublasCgemm_v2_64, cublasCgemmBatched_64, cublasCgemmStridedBatched_64,
                   cuComplex, CUDA_C_32F, int64_t)
SIMGPU_PRODUCTS_OF(cublasZgemm_v2, cublasZgemmBatched, cublasZgemmStridedBatched, cuDoubleComplex,
                   CUDA_C_64F, int)
SIMGPU_PRODUCTS_OF(cublasZgemm_v2_64, cublasZgemmBatched_64, cublasZgemmStridedBatched_64,
                   cuDoubleComplex, CUDA_C_64F, int64_t)

SIMGPU_VECTOR_PRODUCT(cublasSgemv_v2, float, CUDA_R_32F, int)
SIMGPU_VECTOR_PRODUCT(cublasSgemv_v2_64, float, CUDA_R_32F, int64_t)
SIMGPU_VECTOR_PRODUCT(cublasDgemv_v2, double, CUDA_R_64F, int)
SIMGPU_VECTOR_PRODUCT(cublasDgemv_v2_64, double, CUDA_R_64F, int64_t)
SIMGPU_VECTOR_PRODUCT(cublasCgemv_v2, cuComplex, CUDA_C_32F, int)
SIMGPU_VECTOR_PRODUCT(cublasCgemv_v2_64, cuComplex, CUDA_C_32F, int64_t)
SIMGPU_VECTOR_PRODUCT(cublasZgemv_v2, cuDoubleComplex, CUDA_C_64F, int)
SIMGPU_VECTOR_PRODUCT(cublasZgemv_v2_64, cuDoubleComplex, CUDA_C_64F, int64_t)

SIMGPU_TYPED(int, )
SIMGPU_TYPED(int64_t, _64)

}  // extern "C"
