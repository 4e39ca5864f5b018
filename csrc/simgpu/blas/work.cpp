#include "simgpu/blas/work.h"

#include "simgpu/simgpu.h"

namespace simgpu::blas {

double element_bytes(cudaDataType type) {
  switch (type) {
    case CUDA_C_64F:
    case CUDA_C_64I:
    case CUDA_C_64U:
      return 16;
    case CUDA_R_64F:
    case CUDA_R_64I:
    case CUDA_R_64U:
    case CUDA_C_32F:
    case CUDA_C_32I:
    case CUDA_C_32U:
      return 8;
    case CUDA_R_32F:
    case CUDA_R_32I:
    case CUDA_R_32U:
    case CUDA_C_16F:
    case CUDA_C_16BF:
    case CUDA_C_16I:
    case CUDA_C_16U:
      return 4;
    case CUDA_R_16F:
    case CUDA_R_16BF:
    case CUDA_R_16I:
    case CUDA_R_16U:
    case CUDA_C_8I:
    case CUDA_C_8U:
      return 2;
    case CUDA_R_4I:
    case CUDA_R_4U:
      return 0.5;
    default:  // 8-bit integers and floats, and the smaller floats of newer headers
      return 1;
  }
}

double flops_weight(const Product& product) {
  switch (product.a) {
    case CUDA_R_32F:
      return product.tensor_float ? 2 : 4;
    case CUDA_C_32F:  // four real products for each complex one
      return product.tensor_float ? 8 : 16;
    case CUDA_R_64F:
      return 256;
    case CUDA_C_64F:
      return 1024;
    default:
      return 1;
  }
}

cublasStatus_t report(const char* name, void* stream, const Product& product) {
  if (product.m < 0 || product.n < 0 || product.k < 0 || product.batch < 0) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (product.m == 0 || product.n == 0 || product.batch == 0) {
    return CUBLAS_STATUS_SUCCESS;
  }
  const auto m = static_cast<double>(product.m);
  const auto n = static_cast<double>(product.n);
  const auto k = static_cast<double>(product.k);
  const auto batch = static_cast<double>(product.batch);
  const double flops = 2 * m * n * k * flops_weight(product);
  const double bytes = m * k * element_bytes(product.a) + k * n * element_bytes(product.b) +
                       m * n * element_bytes(product.c);
  const int failed = simgpu_work(stream, name, flops * batch, bytes * batch);
  return failed == 0 ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

}  // namespace simgpu::blas
