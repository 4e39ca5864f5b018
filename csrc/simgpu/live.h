// What lives, by the library that made it: for leak tests, and for the summary at exit.
#pragma once

#include <string>

namespace simgpu {

std::string live_as_json();
// To stderr: misuse that was reported, and what trae_mem's library still holds. Nothing if neither.
void print_summary();

}  // namespace simgpu
