#include "file_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <utility>

#include "error.h"

namespace trae_mem {
namespace {

constexpr std::size_t kReadBytes = std::size_t{1} << 20;  // a job of one reader thread

std::int64_t modified_ns(const struct stat& status) {
  return static_cast<std::int64_t>(status.st_mtim.tv_sec) * 1'000'000'000 + status.st_mtim.tv_nsec;
}

}  // namespace

// A unit's bytes as they are at the time of the load.
class FileStore::UnitSource final : public ByteSource {
 public:
  UnitSource(const FileStore& store, std::vector<Tensor> tensors)
      : store_(store), tensors_(std::move(tensors)) {}

  void read(std::size_t offset, std::span<std::byte> out) const override {
    std::vector<std::function<void()>> jobs;
    for (const Tensor& tensor : tensors_) {
      const std::size_t begin = std::max(offset, tensor.pack_offset);
      const std::size_t end = std::min(offset + out.size(), tensor.pack_offset + tensor.bytes);
      if (begin >= end) continue;
      const bool from_file = store_.equals_file(tensor);
      if (from_file) store_.require_unchanged(store_.files_[tensor.file], tensor);
      for (std::size_t position = begin; position < end; position += kReadBytes) {
        const std::size_t skip = position - tensor.pack_offset;
        const auto target = out.subspan(position - offset, std::min(kReadBytes, end - position));
        jobs.emplace_back([this, &tensor, from_file, skip, target] {
          if (from_file) {
            store_.read_file(tensor, skip, target);
          } else {
            std::memcpy(target.data(), tensor.memory + skip, target.size());
          }
        });
      }
    }
    store_.readers_.run(std::move(jobs));
  }

 private:
  const FileStore& store_;
  const std::vector<Tensor> tensors_;
};

FileStore::FileStore(std::size_t reader_threads)
    : page_map_(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)), readers_(reader_threads) {}

FileStore::~FileStore() {
  for (const File& file : files_) close(file.descriptor);
  if (page_map_ >= 0) close(page_map_);
}

std::size_t FileStore::add_file(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) throw FileError(with_errno("cannot open weight file '" + path + "'"));
  struct stat status{};
  if (fstat(descriptor, &status) != 0) {
    const std::string message = with_errno("cannot examine weight file '" + path + "'");
    close(descriptor);
    throw FileError(message);
  }
  files_.push_back(
      {path, descriptor, static_cast<std::uint64_t>(status.st_size), modified_ns(status)});
  return files_.size() - 1;
}

void FileStore::require_inside(const File& file, const Tensor& tensor) {
  if (tensor.bytes <= file.bytes && tensor.file_offset <= file.bytes - tensor.bytes) return;
  throw FileError("weight file '" + file.path + "' is truncated: tensor '" + tensor.name +
                  "' ends at byte " + std::to_string(tensor.file_offset + tensor.bytes) +
                  ", the file at " + std::to_string(file.bytes));
}

void FileStore::add_unit(std::size_t pack_bytes, std::vector<Tensor> tensors) {
  Unit unit{pack_bytes, {}};
  for (Tensor& tensor : tensors) {
    if (tensor.bytes > pack_bytes || tensor.pack_offset > pack_bytes - tensor.bytes) {
      throw InvalidArgument("tensor '" + tensor.name + "' lies outside of its pack");
    }
    if (tensor.file != kNoFile) {
      require_inside(files_.at(tensor.file), tensor);
    } else if (tensor.memory == nullptr) {
      throw InvalidArgument("tensor '" + tensor.name + "' rests nowhere");
    }
    unit.tensors.push_back(std::move(tensor));
  }
  units_.push_back(std::move(unit));
}

void FileStore::rest_in_memory(std::size_t unit, std::size_t tensor, const void* memory) {
  const std::lock_guard lock(mutex_);
  Tensor& moved = units_.at(unit).tensors.at(tensor);
  moved.file = kNoFile;
  moved.memory = static_cast<const std::byte*>(memory);
}

std::size_t FileStore::unit_bytes(std::size_t unit) const { return units_.at(unit).bytes; }

void FileStore::load(std::size_t unit, Address window, Device& device, StreamHandle stream) {
  const Unit& source = units_.at(unit);
  std::vector<Tensor> tensors;
  {
    const std::lock_guard lock(mutex_);
    tensors = source.tensors;
  }
  device.copy_to_device(window, std::make_shared<UnitSource>(*this, std::move(tensors)),
                        source.bytes, stream);
}

bool FileStore::equals_file(const Tensor& tensor) const {
  if (tensor.file == kNoFile) return false;
  if (tensor.memory == nullptr || page_map_ < 0) return true;
  // One 64-bit entry a page, see the kernel's admin-guide/mm/pagemap.
  constexpr std::uint64_t kPresentOrSwapped = std::uint64_t{3} << 62;
  constexpr std::uint64_t kFilePage = std::uint64_t{1} << 61;
  static const auto kSystemPage = static_cast<std::size_t>(sysconf(_SC_PAGE_SIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.memory);
  std::size_t page = begin / kSystemPage;
  const std::size_t end = (begin + tensor.bytes + kSystemPage - 1) / kSystemPage;
  std::array<std::uint64_t, 512> entries{};
  while (page < end) {
    const std::size_t wanted = std::min(entries.size(), end - page);
    const ssize_t got = pread(page_map_, entries.data(), wanted * sizeof(entries[0]),
                              static_cast<off_t>(page * sizeof(entries[0])));
    if (got <= 0) return true;
    const std::size_t count = static_cast<std::size_t>(got) / sizeof(entries[0]);
    for (std::size_t i = 0; i < count; ++i) {
      const bool ours = (entries[i] & kPresentOrSwapped) != 0 && (entries[i] & kFilePage) == 0;
      if (ours) return false;
    }
    page += count;
  }
  return true;
}

void FileStore::require_unchanged(const File& file, const Tensor& tensor) const {
  struct stat status{};
  if (fstat(file.descriptor, &status) != 0) {
    throw FileError(with_errno("cannot examine weight file '" + file.path + "'"));
  }
  if (static_cast<std::uint64_t>(status.st_size) != file.bytes) {
    throw FileError("weight file '" + file.path + "' changed its size from " +
                    std::to_string(file.bytes) + " to " + std::to_string(status.st_size) +
                    " bytes while tensor '" + tensor.name + "' was in use");
  }
  if (modified_ns(status) != file.modified_ns) {
    throw FileError("weight file '" + file.path + "' was rewritten while tensor '" + tensor.name +
                    "' was in use");
  }
}

void FileStore::read_file(const Tensor& tensor, std::size_t skip, std::span<std::byte> out) const {
  const File& file = files_[tensor.file];
  while (!out.empty()) {
    const ssize_t got = pread(file.descriptor, out.data(), out.size(),
                              static_cast<off_t>(tensor.file_offset + skip));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      throw FileError(
          with_errno("weight file '" + file.path + "': cannot read tensor '" + tensor.name + "'"));
    }
    if (got == 0) {
      throw FileError("weight file '" + file.path + "' is truncated: it ends inside tensor '" +
                      tensor.name + "'");
    }
    skip += static_cast<std::size_t>(got);
    out = out.subspan(static_cast<std::size_t>(got));
  }
}

}  // namespace trae_mem
