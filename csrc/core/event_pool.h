// Timed events that are used again: a load, or a wait that is measured, takes some and gives them
// back when what they told has been noted.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "device.h"

namespace trae_mem {

// Thread-safe. Must outlive the events that it gave.
class EventPool {
 public:
  // An event of the pool, given back with its owner.
  class Lease {
   public:
    Lease(EventPool& pool, Event event) : pool_(&pool), event_(std::move(event)) {}
    ~Lease() {
      if (pool_ != nullptr) pool_->give_back(std::move(event_));
    }
    Lease(Lease&& other) noexcept
        : pool_(std::exchange(other.pool_, nullptr)), event_(std::move(other.event_)) {}
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    Lease& operator=(Lease&&) = delete;
    [[nodiscard]] EventHandle handle() const noexcept { return event_.handle(); }

   private:
    EventPool* pool_;  // null once moved from
    Event event_;
  };

  explicit EventPool(std::shared_ptr<Device> device) : device_(std::move(device)) {}

  // Makes events before they are needed, so that fewer, or none, are made later.
  void prepare(std::size_t count) {
    std::vector<Lease> taken;
    for (std::size_t i = 0; i < count; ++i) taken.push_back(take());
  }

  Lease take() {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      Lease lease(*this, std::move(free_.back()));
      free_.pop_back();
      return lease;
    }
    free_.reserve(++made_);  // so that giving back cannot fail
    return {*this, Event(*device_, /*timed=*/true)};
  }

 private:
  void give_back(Event event) noexcept {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(event));
  }

  std::shared_ptr<Device> device_;
  std::mutex mutex_;         // guards all below
  std::vector<Event> free_;  // room for all that were made
  std::size_t made_ = 0;
};

}  // namespace trae_mem
