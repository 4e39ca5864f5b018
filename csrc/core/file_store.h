// Weights that stay in their safetensors files: each tensor's bytes are read straight into its
// place in the pack, on reader threads, when its unit is loaded. The store holds file
// descriptors and offsets, nothing else; the page cache belongs to the system, not the process.
//
// A file that was truncated or rewritten since it was added is an error at the next load, which
// names the file and the tensor.
//
// [Note: changed mappings] While a tensor rests, Python shows it as a private mapping of its
// file. Whoever writes to it (an in-place operation, an adapter's merge through `.data`) makes
// the kernel copy the page, and the tensor no longer equals its file. /proc/self/pagemap tells
// such pages apart, whatever wrote them; a tensor with one is loaded from the mapping.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "reader_pool.h"
#include "weight_store.h"

namespace trae_mem {

class FileStore final : public WeightStore {
 public:
  struct Tensor {
    std::string name;           // in the file, for messages
    std::size_t file;           // as add_file returned, or kNoFile: it rests in memory
    std::uint64_t file_offset;  // of its first byte
    std::size_t bytes;
    std::size_t pack_offset;  // its place in the unit's pack
    const std::byte* memory;  // its private mapping of the file, or where it rests
  };
  static constexpr std::size_t kNoFile = static_cast<std::size_t>(-1);

  explicit FileStore(std::size_t reader_threads);
  ~FileStore() override;

  // Opens the file for as long as the store lives. Throws FileError.
  std::size_t add_file(const std::string& path);
  // Throws FileError if a tensor lies outside of its file, InvalidArgument if outside the pack.
  void add_unit(std::size_t pack_bytes, std::vector<Tensor> tensors);
  // From now on the tensor rests in `memory`, which must stay valid, and in no file.
  void rest_in_memory(std::size_t unit, std::size_t tensor, const void* memory);

  [[nodiscard]] const char* name() const noexcept override { return "file"; }
  [[nodiscard]] std::size_t units() const noexcept override { return units_.size(); }
  [[nodiscard]] std::size_t unit_bytes(std::size_t unit) const override;
  void load(std::size_t unit, Address window, Device& device, StreamHandle stream) override;

 private:
  class UnitSource;
  struct File {
    std::string path;
    int descriptor;
    std::uint64_t bytes;  // these two as they were when the file was added
    std::int64_t modified_ns;
  };
  struct Unit {
    std::size_t bytes;
    std::vector<Tensor> tensors;
  };

  // False if the tensor must come from its memory: it has no file, or was written to.
  [[nodiscard]] bool equals_file(const Tensor& tensor) const;
  static void require_inside(const File& file, const Tensor& tensor);
  void require_unchanged(const File& file, const Tensor& tensor) const;
  void read_file(const Tensor& tensor, std::size_t skip, std::span<std::byte> out) const;

  std::vector<File> files_;  // fixed once units are loaded
  std::vector<Unit> units_;
  mutable std::mutex mutex_;  // guards each Tensor's file and memory
  int page_map_ = -1;         // /proc/self/pagemap; -1: not to be had, writes go unnoticed
  mutable ReaderPool readers_;
};

}  // namespace trae_mem
