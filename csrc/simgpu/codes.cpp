// Names and texts of results, as cuda.h, driver_types.h and NVIDIA's libraries give them.
#include "codes.h"

#include <algorithm>
#include <array>

namespace simgpu {
namespace {

constexpr std::array kTexts = {
    CodeText{0, "CUDA_SUCCESS", "cudaSuccess", "no error"},
    CodeText{1, "CUDA_ERROR_INVALID_VALUE", "cudaErrorInvalidValue", "invalid argument"},
    CodeText{2, "CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation", "out of memory"},
    CodeText{3, "CUDA_ERROR_NOT_INITIALIZED", "cudaErrorInitializationError",
             "initialization error"},
    CodeText{4, "CUDA_ERROR_DEINITIALIZED", "cudaErrorCudartUnloading", "driver shutting down"},
    CodeText{36, "CUDA_ERROR_INVALID_VALUE", "cudaErrorCallRequiresNewerDriver",
             "API call is not supported in the installed CUDA driver"},
    CodeText{46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "cudaErrorDevicesUnavailable",
             "CUDA-capable device(s) is/are busy or unavailable"},
    CodeText{100, "CUDA_ERROR_NO_DEVICE", "cudaErrorNoDevice",
             "no CUDA-capable device is detected"},
    CodeText{101, "CUDA_ERROR_INVALID_DEVICE", "cudaErrorInvalidDevice", "invalid device ordinal"},
    CodeText{200, "CUDA_ERROR_INVALID_IMAGE", "cudaErrorInvalidKernelImage",
             "device kernel image is invalid"},
    CodeText{201, "CUDA_ERROR_INVALID_CONTEXT", "cudaErrorDeviceUninitialized",
             "invalid device context"},
    CodeText{209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "cudaErrorNoKernelImageForDevice",
             "no kernel image is available for execution on the device"},
    CodeText{214, "CUDA_ERROR_ECC_UNCORRECTABLE", "cudaErrorECCUncorrectable",
             "uncorrectable ECC error encountered"},
    CodeText{304, "CUDA_ERROR_OPERATING_SYSTEM", "cudaErrorOperatingSystem",
             "OS call failed or operation not supported on this OS"},
    CodeText{400, "CUDA_ERROR_INVALID_HANDLE", "cudaErrorInvalidResourceHandle",
             "invalid resource handle"},
    CodeText{401, "CUDA_ERROR_ILLEGAL_STATE", "cudaErrorIllegalState",
             "the operation cannot be performed in the present state"},
    CodeText{500, "CUDA_ERROR_NOT_FOUND", "cudaErrorSymbolNotFound", "named symbol not found"},
    CodeText{600, "CUDA_ERROR_NOT_READY", "cudaErrorNotReady", "device not ready"},
    CodeText{700, "CUDA_ERROR_ILLEGAL_ADDRESS", "cudaErrorIllegalAddress",
             "an illegal memory access was encountered"},
    CodeText{701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "cudaErrorLaunchOutOfResources",
             "too many resources requested for launch"},
    CodeText{702, "CUDA_ERROR_LAUNCH_TIMEOUT", "cudaErrorLaunchTimeout",
             "the launch timed out and was terminated"},
    CodeText{704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "cudaErrorPeerAccessAlreadyEnabled",
             "peer access is already enabled"},
    CodeText{708, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", "cudaErrorSetOnActiveProcess",
             "cannot set while device is active in this process"},
    CodeText{709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "cudaErrorContextIsDestroyed",
             "context is destroyed"},
    CodeText{710, "CUDA_ERROR_ASSERT", "cudaErrorAssert", "device-side assert triggered"},
    CodeText{712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
             "cudaErrorHostMemoryAlreadyRegistered",
             "part or all of the requested memory range is already mapped"},
    CodeText{713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "cudaErrorHostMemoryNotRegistered",
             "pointer does not correspond to a registered memory region"},
    CodeText{716, "CUDA_ERROR_MISALIGNED_ADDRESS", "cudaErrorMisalignedAddress",
             "misaligned address"},
    CodeText{719, "CUDA_ERROR_LAUNCH_FAILED", "cudaErrorLaunchFailure",
             "unspecified launch failure"},
    CodeText{800, "CUDA_ERROR_NOT_PERMITTED", "cudaErrorNotPermitted", "operation not permitted"},
    CodeText{801, "CUDA_ERROR_NOT_SUPPORTED", "cudaErrorNotSupported", "operation not supported"},
    CodeText{802, "CUDA_ERROR_SYSTEM_NOT_READY", "cudaErrorSystemNotReady",
             "system not yet initialized"},
    CodeText{803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "cudaErrorSystemDriverMismatch",
             "system has unsupported display driver / cuda driver combination"},
    CodeText{900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "cudaErrorStreamCaptureUnsupported",
             "operation not permitted when stream is capturing"},
    CodeText{999, "CUDA_ERROR_UNKNOWN", "cudaErrorUnknown", "unknown error"},
};

}  // namespace

const CodeText* describe(int value) {
  const auto found = std::find_if(kTexts.begin(), kTexts.end(),
                                  [value](const CodeText& text) { return text.value == value; });
  return found == kTexts.end() ? nullptr : &*found;
}

}  // namespace simgpu
