// libcuda.so.1: finding a function by name, as drivers hand themselves out.
#include <dlfcn.h>

#include <cstring>

#include "driver.h"
#include "driver_names.h"

#undef cuGetProcAddress  // both of its versions are defined here

namespace {

// Where this library itself is: its own functions are wanted, whoever else defines some.
void* own_library() {
  static void* const handle = [] {
    Dl_info info{};
    dladdr(reinterpret_cast<const void*>(&own_library), &info);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  return handle;
}

}  // namespace

// The newest version of the function that the headers map its plain name to.
SIMGPU_EXPORT CUresult cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t,
                                           CUdriverProcAddressQueryResult* status) {
  SIMGPU_ENTER("cuGetProcAddress", kNothing);
  *function = dlsym(own_library(), simgpu::newest_name(name));
  if (status != nullptr) {
    *status =
        *function == nullptr ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND : CU_GET_PROC_ADDRESS_SUCCESS;
  }
  return *function == nullptr ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

SIMGPU_EXPORT CUresult cuGetProcAddress(const char* name, void** function, int version,
                                        cuuint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}
