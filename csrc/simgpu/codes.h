// The results of API calls. Driver and runtime number them alike (CUresult in cuda.h, cudaError in
// driver_types.h), so that one enumeration serves both and the core needs neither header.
#pragma once

#include "simgpu.h"

namespace simgpu {

enum class Code : int {
  kOk = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kDeinitialized = 4,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kAssert = 710,
  kHostAlreadyRegistered = 712,
  kHostNotRegistered = 713,
  kLaunchFailed = 719,
  kNotPermitted = 800,
  kNotSupported = 801,
  kUnknown = 999,
};

struct CodeText {
  int value;
  const char* driver;   // "CUDA_ERROR_OUT_OF_MEMORY"
  const char* runtime;  // "cudaErrorMemoryAllocation"
  const char* text;     // "out of memory"
};

// Null for a value that neither API has.
SIMGPU_API const CodeText* describe(int value);

}  // namespace simgpu
