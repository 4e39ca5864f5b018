// What the thread sanitizer must not report, read by it when the tests start; see its manual on
// suppressions. In builds without it nobody calls the function.

// NOLINTNEXTLINE(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp)
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions();

extern "C" const char* __tsan_default_suppressions() {
  // The last holder of an exception destroys it, and libstdc++ knows by an atomic count who is the
  // last. It is not compiled with the sanitizer, which therefore takes the destruction in one
  // thread and an earlier look at the exception in another for a race.
  return "race:std::__exception_ptr::exception_ptr::_M_release\n"
         "race:std::runtime_error::~runtime_error\n";
}
