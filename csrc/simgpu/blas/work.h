// What a matrix product costs, told to the simulated GPU.
//
// In dry mode the BLAS computes nothing: each product is reported as FLOPs and bytes on the stream
// of its handle, and the simulated GPU makes that stream busy for as long as the card would be.
// The model is a roofline: the larger of FLOPs over the card's rate and bytes over its bandwidth.
// It knows no tile sizes, no caches and no launch overhead.
#pragma once

#include <cublas_api.h>

#include <cstdint>

namespace simgpu::blas {

// Sizes as BLAS names them: C (m x n) = A (m x k) * B (k x n), `batch` times.
struct Product {
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t batch = 1;
  cudaDataType a = CUDA_R_32F;
  cudaDataType b = CUDA_R_32F;
  cudaDataType c = CUDA_R_32F;
  bool tensor_float = false;  // a product of floats may round them to 10 bits of mantissa (TF32)
};

// Queues the product on the stream. Each operand is read, and the result written, once; C is not
// counted as read, since frameworks nearly always pass beta = 0.
cublasStatus_t report(const char* name, void* stream, const Product& product);

// The rate of a card is that of bf16 on its tensor cores. Other types count their FLOPs as if they
// were more, by the ratio of an A10's data sheet (float 31 TFLOP/s, TF32 62, bf16 125). Doubles are
// taken as a 64th of floats, which is a gaming card's rate and too low for an A100 or H100.
double flops_weight(const Product& product);

// Of one element, in bytes; half a byte for 4-bit types.
double element_bytes(cudaDataType type);

}  // namespace simgpu::blas
