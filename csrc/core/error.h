// Every error that the core raises, and the two helpers that word them.
//
// The core never prints and never exits: it throws one of these, and the bindings turn each
// into the Python exception of the same meaning (trae_mem/errors.py). A message says what
// failed, with numbers and names.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace trae_mem {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A caller broke a rule of the interface: a bug in the caller, or a bad argument.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

// The device, or the limit that was set for it, has no room.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

// The operating system or the device refused or failed an operation.
class DeviceError : public Error {
 public:
  using Error::Error;
};

// There is no such device here, or it lacks what is needed: nothing was tried on it.
class DeviceUnavailable : public DeviceError {
 public:
  using DeviceError::DeviceError;
};

// A file of weights is missing, truncated, changed or unreadable.
class FileError : public Error {
 public:
  using Error::Error;
};

// "1.23 GiB", "7.08 MiB", "512 B": two decimals above a KiB.
std::string format_bytes(std::size_t bytes);

// `what` followed by the text of the current errno.
std::string with_errno(const std::string& what);

}  // namespace trae_mem
