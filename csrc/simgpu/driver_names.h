// Which versioned symbol a plain function name means, from the macros of the cuda.h that the facade
// is compiled against ("cuMemAlloc" -> "cuMemAlloc_v2"). tools/simgpu_build.py writes the table.
#pragma once

namespace simgpu {

// The name itself where there is no other.
const char* newest_name(const char* name);

}  // namespace simgpu
