// cuBLASLt in dry mode: it remembers what the caller says of its matrices, always offers one
// algorithm without workspace, and reports each product's work. Descriptors lie in the space that
// the real library's opaque types have, since callers may hold them on their own stack.

#include <cublasLt.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>

#include "simgpu/blas/work.h"

namespace {

using simgpu::blas::Product;

struct Layout {
  uint64_t rows;
  uint64_t columns;
  int64_t leading;       // elements from one column (or row) to the next
  int64_t batch_stride;  // elements
  int32_t type;          // cudaDataType
  int32_t order;         // cublasLtOrder_t
  int32_t batch;
};

struct Description {
  int32_t compute;  // cublasComputeType_t
  int32_t scale;    // cudaDataType
  int32_t pointer_mode;
  int32_t transpose_a;
  int32_t transpose_b;
  int32_t epilogue;
};

// The caller's opaque descriptor, seen as one of ours.
template <typename Ours, typename Opaque>
Ours load(const Opaque* opaque) {
  static_assert(sizeof(Ours) <= sizeof(Opaque) && std::is_trivially_copyable_v<Ours>);
  Ours ours;
  std::memcpy(&ours, opaque, sizeof ours);
  return ours;
}

template <typename Ours, typename Opaque>
void store(Opaque* opaque, const Ours& ours) {
  static_assert(sizeof(Ours) <= sizeof(Opaque) && std::is_trivially_copyable_v<Ours>);
  std::memcpy(opaque, &ours, sizeof ours);
}

template <typename Opaque>
cublasStatus_t create(Opaque** descriptor) {
  if (descriptor == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  *descriptor = std::make_unique<Opaque>().release();
  return CUBLAS_STATUS_SUCCESS;
}

template <typename Opaque>
cublasStatus_t destroy(Opaque* descriptor) {
  const std::unique_ptr<Opaque> owned(descriptor);
  return CUBLAS_STATUS_SUCCESS;
}

template <typename Opaque>
cublasStatus_t clear(Opaque* descriptor, size_t size) {
  if (descriptor == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  if (size < sizeof(Opaque)) return CUBLAS_STATUS_ALLOC_FAILED;
  *descriptor = {};
  return CUBLAS_STATUS_SUCCESS;
}

// A field's address and size; nothing for an attribute that is accepted and forgotten.
struct Field {
  void* address = nullptr;
  size_t bytes = 0;
};

template <typename Value>
Field field(Value& value) {
  return {&value, sizeof value};
}

Field find(Layout& layout, cublasLtMatrixLayoutAttribute_t attribute) {
  switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_TYPE:
      return field(layout.type);
    case CUBLASLT_MATRIX_LAYOUT_ORDER:
      return field(layout.order);
    case CUBLASLT_MATRIX_LAYOUT_ROWS:
      return field(layout.rows);
    case CUBLASLT_MATRIX_LAYOUT_COLS:
      return field(layout.columns);
    case CUBLASLT_MATRIX_LAYOUT_LD:
      return field(layout.leading);
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
      return field(layout.batch);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
      return field(layout.batch_stride);
    default:
      return {};
  }
}

Field find(Description& description, cublasLtMatmulDescAttributes_t attribute) {
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_COMPUTE_TYPE:
      return field(description.compute);
    case CUBLASLT_MATMUL_DESC_SCALE_TYPE:
      return field(description.scale);
    case CUBLASLT_MATMUL_DESC_POINTER_MODE:
      return field(description.pointer_mode);
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return field(description.transpose_a);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return field(description.transpose_b);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return field(description.epilogue);
    default:
      return {};
  }
}

template <typename Ours, typename Opaque, typename Attribute>
cublasStatus_t set(Opaque* descriptor, Attribute attribute, const void* value, size_t size) {
  if (descriptor == nullptr || value == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  auto ours = load<Ours>(descriptor);
  const Field found = find(ours, attribute);
  if (found.address == nullptr) return CUBLAS_STATUS_SUCCESS;
  if (size != found.bytes) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(found.address, value, size);
  store(descriptor, ours);
  return CUBLAS_STATUS_SUCCESS;
}

template <typename Ours, typename Opaque, typename Attribute>
cublasStatus_t get(Opaque* descriptor, Attribute attribute, void* value, size_t size,
                   size_t* written) {
  if (descriptor == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  auto ours = load<Ours>(descriptor);
  const Field found = find(ours, attribute);
  if (found.address == nullptr) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (written != nullptr) *written = found.bytes;
  if (size == 0) return written == nullptr ? CUBLAS_STATUS_INVALID_VALUE : CUBLAS_STATUS_SUCCESS;
  if (value == nullptr || size != found.bytes) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(value, found.address, size);
  return CUBLAS_STATUS_SUCCESS;
}

// The one algorithm that there is.
cublasLtMatmulHeuristicResult_t only_result() {
  cublasLtMatmulHeuristicResult_t result{};
  result.state = CUBLAS_STATUS_SUCCESS;
  result.wavesCount = 1.0F;
  return result;
}

}  // namespace

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  if (handle == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  static char only_handle = 0;  // a handle has no state
  *handle = reinterpret_cast<cublasLtHandle_t>(&only_handle);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t) { return CUBLAS_STATUS_SUCCESS; }

size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }

size_t cublasLtGetCudartVersion(void) { return CUBLAS_VER_MAJOR * 1000; }

cublasStatus_t cublasLtGetProperty(libraryPropertyType type, int* value) {
  if (value == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  *value = type == MAJOR_VERSION   ? CUBLAS_VER_MAJOR
           : type == MINOR_VERSION ? CUBLAS_VER_MINOR
                                   : CUBLAS_VER_PATCH;
  return CUBLAS_STATUS_SUCCESS;
}

const char* cublasLtGetStatusName(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS (simulated)";
}

const char* cublasLtGetStatusString(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? "success" : "the simulated GPU's BLAS refused the call";
}

// --- matrix layouts -----------------------------------------------------------------------------

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t size,
                                                 cudaDataType type, uint64_t rows, uint64_t columns,
                                                 int64_t leading) {
  if (const auto status = clear(layout, size); status != CUBLAS_STATUS_SUCCESS) return status;
  store(layout, Layout{.rows = rows,
                       .columns = columns,
                       .leading = leading,
                       .batch_stride = 0,
                       .type = type,
                       .order = CUBLASLT_ORDER_COL,
                       .batch = 1});
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                          uint64_t rows, uint64_t columns, int64_t leading) {
  if (const auto status = create(layout); status != CUBLAS_STATUS_SUCCESS) return status;
  return cublasLtMatrixLayoutInit_internal(*layout, sizeof **layout, type, rows, columns, leading);
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  return destroy(layout);
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* value, size_t size) {
  return set<Layout>(layout, attribute, value, size);
}

cublasStatus_t cublasLtMatrixLayoutGetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                void* value, size_t size, size_t* written) {
  return get<Layout>(layout, attribute, value, size, written);
}

// --- descriptions of a product ------------------------------------------------------------------

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t description, size_t size,
                                               cublasComputeType_t compute, cudaDataType_t scale) {
  if (const auto status = clear(description, size); status != CUBLAS_STATUS_SUCCESS) return status;
  store(description, Description{.compute = compute,
                                 .scale = scale,
                                 .pointer_mode = CUBLASLT_POINTER_MODE_HOST,
                                 .transpose_a = CUBLAS_OP_N,
                                 .transpose_b = CUBLAS_OP_N,
                                 .epilogue = CUBLASLT_EPILOGUE_DEFAULT});
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* description,
                                        cublasComputeType_t compute, cudaDataType_t scale) {
  if (const auto status = create(description); status != CUBLAS_STATUS_SUCCESS) return status;
  return cublasLtMatmulDescInit_internal(*description, sizeof **description, compute, scale);
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
  return destroy(description);
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t size) {
  return set<Description>(description, attribute, value, size);
}

cublasStatus_t cublasLtMatmulDescGetAttribute(cublasLtMatmulDesc_t description,
                                              cublasLtMatmulDescAttributes_t attribute, void* value,
                                              size_t size, size_t* written) {
  return get<Description>(description, attribute, value, size, written);
}

// --- preferences and algorithms: accepted, one answer for all ------------------------------------

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t preference,
                                                     size_t size) {
  return clear(preference, size);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  return create(preference);
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  return destroy(preference);
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t,
                                                    const void* value, size_t) {
  return preference == nullptr || value == nullptr ? CUBLAS_STATUS_INVALID_VALUE
                                                   : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int requested,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int* returned) {
  if (requested < 1 || results == nullptr || returned == nullptr) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  results[0] = only_result();
  *returned = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetIds(cublasLtHandle_t, cublasComputeType_t, cudaDataType_t,
                                        cudaDataType_t, cudaDataType_t, cudaDataType_t,
                                        cudaDataType_t, int requested, int ids[], int* returned) {
  if (requested < 1 || ids == nullptr || returned == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  ids[0] = 0;
  *returned = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoInit(cublasLtHandle_t, cublasComputeType_t, cudaDataType_t,
                                      cudaDataType_t, cudaDataType_t, cudaDataType_t,
                                      cudaDataType_t, int, cublasLtMatmulAlgo_t* algorithm) {
  if (algorithm == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  *algorithm = {};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t,
                                       cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                       cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                       const cublasLtMatmulAlgo_t* algorithm,
                                       cublasLtMatmulHeuristicResult_t* result) {
  if (algorithm == nullptr || result == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  *result = only_result();
  result->algo = *algorithm;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoConfigSetAttribute(cublasLtMatmulAlgo_t* algorithm,
                                                    cublasLtMatmulAlgoConfigAttributes_t,
                                                    const void* value, size_t) {
  return algorithm == nullptr || value == nullptr ? CUBLAS_STATUS_INVALID_VALUE
                                                  : CUBLAS_STATUS_SUCCESS;
}

// Every setting of an algorithm reads as zero.
cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algorithm,
                                                    cublasLtMatmulAlgoConfigAttributes_t,
                                                    void* value, size_t size, size_t* written) {
  if (algorithm == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  if (value != nullptr) std::fill_n(static_cast<unsigned char*>(value), size, 0);
  if (written != nullptr) *written = size;
  return CUBLAS_STATUS_SUCCESS;
}

// --- the work ------------------------------------------------------------------------------------

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t description, const void*,
                              const void*, cublasLtMatrixLayout_t a, const void*,
                              cublasLtMatrixLayout_t b, const void*, const void*,
                              cublasLtMatrixLayout_t, void*, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t stream) {
  if (description == nullptr || a == nullptr || b == nullptr || d == nullptr) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  const auto operation = load<Description>(description);
  const auto first = load<Layout>(a);
  const auto second = load<Layout>(b);
  const auto result = load<Layout>(d);
  const bool plain = operation.transpose_a == CUBLAS_OP_N;
  return simgpu::blas::report(
      "cublasLtMatmul", stream,
      Product{.m = static_cast<int64_t>(result.rows),
              .n = static_cast<int64_t>(result.columns),
              .k = static_cast<int64_t>(plain ? first.columns : first.rows),
              .batch = std::max(1, result.batch),
              .a = static_cast<cudaDataType>(first.type),
              .b = static_cast<cudaDataType>(second.type),
              .c = static_cast<cudaDataType>(result.type),
              .tensor_float = operation.compute == CUBLAS_COMPUTE_32F_FAST_TF32});
}

}  // extern "C"
