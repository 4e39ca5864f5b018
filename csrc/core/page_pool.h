// The one pool of physical pages from which slots, resident units and (later) tensors draw.
//
// A page is 2 MiB of device memory with a handle of its own, so that any free page can serve
// any purpose. Free pages are kept for the next taker until `trim` gives them to the device.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "device.h"

namespace trae_mem {

class PagePool;

// Pages that somebody uses; they go back to their pool with the owner. Whoever mapped them must
// have unmapped them, and their work must be done, before that.
class PageList {
 public:
  PageList() = default;
  PageList(std::shared_ptr<PagePool> pool, std::vector<PageHandle> pages)
      : pool_(std::move(pool)), pages_(std::move(pages)) {}
  ~PageList();
  PageList(PageList&&) noexcept = default;
  PageList& operator=(PageList&&) = delete;
  PageList(const PageList&) = delete;
  PageList& operator=(const PageList&) = delete;
  [[nodiscard]] const std::vector<PageHandle>& pages() const noexcept { return pages_; }

 private:
  std::shared_ptr<PagePool> pool_;
  std::vector<PageHandle> pages_;
};

class PagePool : public std::enable_shared_from_this<PagePool> {
 public:
  // `limit_bytes`: most memory that the pool may hold; 0: what the device has. Thread-safe.
  explicit PagePool(std::shared_ptr<Device> device, std::size_t limit_bytes = 0);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // Pages for `bytes`. Throws OutOfMemory beyond the limit, and what the device throws; pages
  // created by then stay in the pool, free.
  [[nodiscard]] PageList take(std::size_t bytes);
  void trim();  // releases the free pages

  [[nodiscard]] const std::shared_ptr<Device>& device() const noexcept { return device_; }
  [[nodiscard]] std::size_t used_bytes() const;
  [[nodiscard]] std::size_t free_bytes() const;
  void check_invariants() const;

 private:
  friend class PageList;
  void put_back(std::vector<PageHandle>& pages) noexcept;

  std::shared_ptr<Device> device_;
  const std::size_t limit_pages_;
  mutable std::mutex mutex_;      // guards all below
  std::vector<PageHandle> free_;  // capacity for every page, so that put_back cannot fail
  std::size_t used_ = 0;          // pages that somebody holds
};

}  // namespace trae_mem
