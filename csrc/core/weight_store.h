// Where the units' bytes rest while they are not on the device, and how they get there.
//
// A *pack* is a unit's tensors in one contiguous buffer; the store knows, for every byte of it,
// where it comes from. RamStore keeps the packs themselves in host memory and copies one with a
// single call. FileStore (file_store.h) keeps nothing and reads safetensors files.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "device.h"

namespace trae_mem {

class WeightStore {
 public:
  WeightStore() = default;
  WeightStore(const WeightStore&) = delete;
  WeightStore& operator=(const WeightStore&) = delete;
  virtual ~WeightStore() = default;

  [[nodiscard]] virtual const char* name() const noexcept = 0;  // "ram", "file"
  [[nodiscard]] virtual std::size_t units() const noexcept = 0;
  [[nodiscard]] virtual std::size_t unit_bytes(std::size_t unit) const = 0;
  // Queues the copy of the unit's pack into its window.
  virtual void load(std::size_t unit, Address window, Device& device, StreamHandle stream) = 0;
};

class RamStore final : public WeightStore {
 public:
  explicit RamStore(std::shared_ptr<Device> device);

  // A pack of exactly `bytes`, to be filled by the caller before the unit's first load.
  std::shared_ptr<HostBuffer> add_unit(std::size_t bytes);

  [[nodiscard]] const char* name() const noexcept override { return "ram"; }
  [[nodiscard]] std::size_t units() const noexcept override { return packs_.size(); }
  [[nodiscard]] std::size_t unit_bytes(std::size_t unit) const override;
  void load(std::size_t unit, Address window, Device& device, StreamHandle stream) override;

 private:
  std::shared_ptr<Device> device_;
  std::vector<std::shared_ptr<HostBuffer>> packs_;
};

}  // namespace trae_mem
