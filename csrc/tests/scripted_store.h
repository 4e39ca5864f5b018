// A store whose bytes, failures and timing a test of the streamer decides.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "core/device.h"
#include "core/weight_store.h"

namespace trae_mem::test {

// The 64-bit word at `index` of a unit; each version of a unit differs in every word.
inline std::uint64_t unit_word(std::size_t unit, std::size_t version, std::size_t index) {
  return (unit + 1) * 0x9E3779B97F4A7C15U + version * 0xC2B2AE3D27D4EB4FU + index;
}

// Units' sizes are multiples of 8. Bytes come from a ByteSource, or from host memory that the
// device gave, as a RamStore's do.
class ScriptedStore final : public WeightStore {
 public:
  using Hook = std::function<void(std::size_t unit)>;

  explicit ScriptedStore(std::vector<std::size_t> unit_bytes, bool from_memory = false)
      : unit_bytes_(std::move(unit_bytes)),
        from_memory_(from_memory),
        versions_(unit_bytes_.size(), 0) {}

  [[nodiscard]] const char* name() const noexcept override { return "scripted"; }
  [[nodiscard]] std::size_t units() const noexcept override { return unit_bytes_.size(); }
  [[nodiscard]] std::size_t unit_bytes(std::size_t unit) const override {
    return unit_bytes_.at(unit);
  }
  void load(std::size_t unit, Address window, Device& device, StreamHandle stream) override {
    requested_.push_back(unit);
    const Source source(*this, unit, versions_.at(unit));
    if (!from_memory_) {
      device.copy_to_device(window, std::make_shared<Source>(source), unit_bytes(unit), stream);
      return;
    }
    device.run([this, unit] { reach(unit); }, stream);
    std::unique_ptr<HostBuffer>& pack = packs_[{unit, versions_.at(unit)}];
    if (pack == nullptr) {
      pack = device.allocate_host(unit_bytes(unit));
      source.write(0, {pack->data(), pack->bytes()});
    }
    device.copy_to_device(window, pack->data(), pack->bytes(), stream);
  }

  // Runs on the copy stream before a unit's bytes are written; may block, and may throw to make
  // the load fail.
  void before_loads(Hook hook) {
    const std::lock_guard lock(mutex_);
    hook_ = std::move(hook);
  }
  // From the next load on the unit has other bytes.
  void change(std::size_t unit) { ++versions_.at(unit); }
  [[nodiscard]] std::size_t version(std::size_t unit) const { return versions_.at(unit); }
  // The units whose loads were begun, in that order.
  [[nodiscard]] const std::vector<std::size_t>& requested() const { return requested_; }
  void forget_requests() { requested_.clear(); }
  // True once the unit's bytes are being written, or a hook holds them.
  [[nodiscard]] bool reached(std::size_t unit) const {
    const std::lock_guard lock(mutex_);
    return std::find(reached_.begin(), reached_.end(), unit) != reached_.end();
  }
  void forget_reached() {
    const std::lock_guard lock(mutex_);
    reached_.clear();
  }

 private:
  class Source final : public ByteSource {
   public:
    Source(ScriptedStore& store, std::size_t unit, std::size_t version)
        : store_(store), unit_(unit), version_(version) {}
    void read(std::size_t offset, std::span<std::byte> out) const override {
      if (offset == 0) store_.reach(unit_);
      write(offset, out);
    }
    void write(std::size_t offset, std::span<std::byte> out) const {
      for (std::size_t i = 0; i < out.size(); i += sizeof(std::uint64_t)) {
        const std::uint64_t word = unit_word(unit_, version_, (offset + i) / sizeof(std::uint64_t));
        std::memcpy(out.data() + i, &word, sizeof(word));
      }
    }

   private:
    ScriptedStore& store_;
    std::size_t unit_;
    std::size_t version_;
  };

  void reach(std::size_t unit) {
    Hook hook;
    {
      const std::lock_guard lock(mutex_);
      reached_.push_back(unit);
      hook = hook_;
    }
    if (hook) hook(unit);
  }

  std::vector<std::size_t> unit_bytes_;
  const bool from_memory_;
  std::vector<std::size_t> versions_;
  std::map<std::pair<std::size_t, std::size_t>, std::unique_ptr<HostBuffer>> packs_;  // and version
  std::vector<std::size_t> requested_;
  mutable std::mutex mutex_;  // guards all below; the copy stream takes it
  Hook hook_;
  std::vector<std::size_t> reached_;
};

}  // namespace trae_mem::test
