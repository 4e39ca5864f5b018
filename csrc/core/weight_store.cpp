#include "weight_store.h"

#include <utility>

namespace trae_mem {

RamStore::RamStore(std::shared_ptr<Device> device) : device_(std::move(device)) {}

std::shared_ptr<HostBuffer> RamStore::add_unit(std::size_t bytes) {
  packs_.push_back(device_->allocate_host(bytes));
  return packs_.back();
}

std::size_t RamStore::unit_bytes(std::size_t unit) const { return packs_.at(unit)->bytes(); }

void RamStore::load(std::size_t unit, Address window, Device& device, StreamHandle stream) {
  const HostBuffer& pack = *packs_.at(unit);
  device.copy_to_device(window, pack.data(), pack.bytes(), stream);
}

}  // namespace trae_mem
