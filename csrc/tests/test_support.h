// What the tests share: gates that hold a stream, waits for what other threads do, and folders
// and environment variables that are put back.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

// A designated initializer leaves the members that it does not name at their defaults: on purpose.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

namespace trae_mem::test {

// Holds whatever runs `task()` until `open()`. Opens itself when it goes, so that a failed test
// ends: declare it behind the streams that it holds.
class Gate {
 public:
  Gate() : state_(std::make_shared<State>()) {}
  ~Gate() { open(); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  [[nodiscard]] std::function<void()> task() const {
    return [state = state_] {
      std::unique_lock lock(state->mutex);
      state->reached = true;
      state->changed.wait(lock, [&state] { return state->open; });
    };
  }
  void open() {
    {
      const std::lock_guard lock(state_->mutex);
      state_->open = true;
    }
    state_->changed.notify_all();
  }
  [[nodiscard]] bool reached() const {
    const std::lock_guard lock(state_->mutex);
    return state_->reached;
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool open = false;
    bool reached = false;
  };
  std::shared_ptr<State> state_;  // shared with tasks, which may outlive the gate
};

// True as soon as `holds` is true; false after far more time than any machine needs.
inline bool eventually(const std::function<bool()>& holds,
                       std::chrono::milliseconds patience = std::chrono::seconds(60)) {
  const auto end = std::chrono::steady_clock::now() + patience;
  while (!holds()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

// Gives what must not happen the time to happen, should the code be broken. Right code never
// lets it happen, however long one waits, so no verdict on right code depends on time.
inline bool happens(const std::function<bool()>& mishap) {
  return eventually(mishap, std::chrono::milliseconds(100));
}

// The message of the `Expected` that `action` throws; if nothing is thrown, the test fails.
template <typename Expected>
std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Expected& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "trae_mem_XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = pattern;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  [[nodiscard]] std::string file(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

inline void write_file(const std::string& path, const std::vector<std::byte>& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
  if (!file) throw std::runtime_error("cannot write " + path);
}

// Shared memory that counts as resident in this process: page-table entries, so that a page seen
// through two windows counts twice.
inline std::size_t resident_shared_bytes() {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.starts_with("RssShmem:")) return std::stoul(line.substr(9)) * 1024;
  }
  throw std::runtime_error("/proc/self/status has no RssShmem");
}

// Sets an environment variable (null: unsets it) and restores it with its scope.
class ScopedVariable {
 public:
  ScopedVariable(std::string name, const char* value) : name_(std::move(name)) {
    const char* before = std::getenv(name_.c_str());
    had_value_ = before != nullptr;
    if (had_value_) before_ = before;
    set(value);
  }
  ~ScopedVariable() { set(had_value_ ? before_.c_str() : nullptr); }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  void set(const char* value) const {
    if (value != nullptr) {
      setenv(name_.c_str(), value, 1);
    } else {
      unsetenv(name_.c_str());
    }
  }
  std::string name_;
  bool had_value_ = false;
  std::string before_;
};

// Bytes that differ from place to place and from seed to seed.
inline std::vector<std::byte> test_bytes(std::size_t count, std::uint64_t seed) {
  std::vector<std::byte> bytes(count);
  std::uint64_t state = seed * 0x9E3779B97F4A7C15U + 1;
  for (std::byte& byte : bytes) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    byte = static_cast<std::byte>(state >> 56);
  }
  return bytes;
}

}  // namespace trae_mem::test
