// RamStore and FileStore: every byte at its place, and files that are not what they were.
#include "core/weight_store.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <limits>

#include "core/address_range.h"
#include "core/error.h"
#include "core/file_store.h"
#include "core/host_device.h"
#include "test_support.h"

namespace trae_mem::test {
namespace {

class WeightStoreTest : public ::testing::Test {
 protected:
  void make_device(const HostDeviceOptions& options) {
    device_ = std::make_shared<HostDevice>(options);
  }
  void SetUp() override { make_device({.memory_bytes = 8 * kPageBytes}); }
  void TearDown() override {
    device_->check_invariants();
    EXPECT_EQ(device_->info().used_bytes, 0U);
  }

  // What a window holds after a load of the unit; throws what the load throws.
  std::vector<std::byte> load(WeightStore& store, std::size_t unit) {
    const std::size_t bytes = store.unit_bytes(unit);
    AddressRange window(device_, bytes);
    const PageHandle pages = device_->create(window.bytes());
    window.map(0, window.bytes(), pages);
    device_->release(pages);  // lives as long as the window
    store.load(unit, window.begin(), *device_, kCallerStream);
    const auto* begin = reinterpret_cast<const std::byte*>(window.begin());
    return {begin, begin + bytes};
  }

  std::shared_ptr<HostDevice> device_;
};

using RamStoreTest = WeightStoreTest;

TEST_F(RamStoreTest, PacksHaveTheirExactSizeAndAreLoadedWhole) {
  RamStore store(device_);
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{4097}, kPageBytes + 77}) {
    const std::shared_ptr<HostBuffer> pack = store.add_unit(bytes);
    EXPECT_EQ(pack->bytes(), bytes);
    const auto content = test_bytes(bytes, bytes);
    std::copy(content.begin(), content.end(), pack->data());
    EXPECT_EQ(store.unit_bytes(store.units() - 1), bytes);
    EXPECT_EQ(load(store, store.units() - 1), content);
  }
  EXPECT_EQ(store.units(), 3U);
  EXPECT_STREQ(store.name(), "ram");
}

TEST_F(RamStoreTest, ALoadBringsThePackAsItIsThen) {
  RamStore store(device_);
  const auto pack = store.add_unit(3);
  pack->data()[1] = std::byte{5};
  EXPECT_EQ(load(store, 0)[1], std::byte{5});
  pack->data()[1] = std::byte{6};
  EXPECT_EQ(load(store, 0)[1], std::byte{6});
}

class FileStoreTest : public WeightStoreTest {
 protected:
  // One file with one tensor: bytes [100, 100 + 5000) of "a.safetensors", pack of the same size.
  void make_simple_store() {
    path_ = folder_.file("a.safetensors");
    content_ = test_bytes(6000, 1);
    write_file(path_, content_);
    store_.add_unit(kBytes, {{"layers.0.weight", store_.add_file(path_), 100, kBytes, 0, nullptr}});
  }
  [[nodiscard]] std::vector<std::byte> expected() const {
    return {content_.begin() + 100, content_.begin() + 100 + kBytes};
  }

  // The message of the FileError that loading unit 0 throws; it must name file and tensor.
  std::string failure() {
    std::string message = message_of<FileError>([this] { load(store_, 0); });
    EXPECT_NE(message.find(path_), std::string::npos) << message;
    EXPECT_NE(message.find("layers.0.weight"), std::string::npos) << message;
    return message;
  }

  void set_modified(time_t seconds, long nanoseconds) const {
    const std::array<timespec, 2> times = {{{seconds, nanoseconds}, {seconds, nanoseconds}}};
    ASSERT_EQ(utimensat(AT_FDCWD, path_.c_str(), times.data(), 0), 0);
  }

  static constexpr std::size_t kBytes = 5000;
  TemporaryFolder folder_;
  std::string path_;
  std::vector<std::byte> content_;
  FileStore store_{2};
};

TEST_F(FileStoreTest, ReadsTensorsOfManyFilesIntoTheirPlaces) {
  struct Piece {
    std::size_t file, file_offset, bytes, pack_offset;
  };
  // Odd offsets, a tensor of several read jobs, an empty one, and not in the pack's order.
  const std::vector<Piece> pieces = {{1, 13, 2'500'001, 512},
                                     {0, 1, 255, 256},
                                     {0, 999, 1, 0},
                                     {1, 0, 0, 300},
                                     {0, 300, 699, 2'500'608}};
  const std::size_t pack_bytes = 2'500'608 + 699;
  const std::vector<std::vector<std::byte>> files = {test_bytes(1000, 1), test_bytes(2'600'000, 2)};
  for (const std::size_t threads : {std::size_t{1}, std::size_t{4}}) {
    FileStore store(threads);
    for (std::size_t i = 0; i < files.size(); ++i) {
      const std::string path = folder_.file(std::to_string(i));
      write_file(path, files[i]);
      EXPECT_EQ(store.add_file(path), i);
    }
    std::vector<FileStore::Tensor> tensors;
    for (const Piece& piece : pieces) {
      tensors.push_back(
          {"t", piece.file, piece.file_offset, piece.bytes, piece.pack_offset, nullptr});
    }
    store.add_unit(pack_bytes, tensors);
    for (const std::uint64_t link : {0U, 4'000'000'000U}) {  // whole, and in pieces of the link
      make_device({.memory_bytes = 8 * kPageBytes, .link_bytes_per_second = link});
      const auto pack = load(store, 0);
      for (const Piece& piece : pieces) {
        EXPECT_TRUE(
            std::equal(pack.begin() + static_cast<std::ptrdiff_t>(piece.pack_offset),
                       pack.begin() + static_cast<std::ptrdiff_t>(piece.pack_offset + piece.bytes),
                       files[piece.file].begin() + static_cast<std::ptrdiff_t>(piece.file_offset)))
            << piece.bytes << " bytes at " << piece.pack_offset;
      }
    }
  }
}

TEST_F(FileStoreTest, KnowsItsUnits) {
  make_simple_store();
  EXPECT_STREQ(store_.name(), "file");
  EXPECT_EQ(store_.units(), 1U);
  EXPECT_EQ(store_.unit_bytes(0), kBytes);
  EXPECT_EQ(load(store_, 0), expected());
}

TEST_F(FileStoreTest, ClosesItsFiles) {
  const auto open_files = [] {
    const std::filesystem::directory_iterator files("/proc/self/fd");
    return std::distance(begin(files), end(files));
  };
  const auto before = open_files();
  {
    FileStore store(1);
    write_file(folder_.file("b"), content_);
    store.add_file(folder_.file("b"));
    EXPECT_GT(open_files(), before);
  }
  EXPECT_EQ(open_files(), before);
}

// --- files that are not as they should be --------------------------------------------------------

TEST_F(FileStoreTest, AFileThatCannotBeOpenedIsNamedWithTheReason) {
  const std::string path = folder_.file("missing.safetensors");
  const std::string message = message_of<FileError>([&] { store_.add_file(path); });
  EXPECT_NE(message.find(path), std::string::npos) << message;
  EXPECT_NE(message.find("No such file"), std::string::npos) << message;
}

TEST_F(FileStoreTest, AFileTruncatedBeforeItIsAddedIsRefusedWithTheTensor) {
  make_simple_store();
  truncate(path_.c_str(), 5099);
  FileStore store(1);
  const std::size_t file = store.add_file(path_);
  const std::string message = message_of<FileError>(
      [&] { store.add_unit(kBytes, {{"layers.0.weight", file, 100, kBytes, 0, nullptr}}); });
  for (const std::string& part : {path_, std::string("'layers.0.weight' ends at byte 5100"),
                                  std::string("the file at 5099")}) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  EXPECT_EQ(store.units(), 0U);
}

TEST_F(FileStoreTest, AFileTruncatedLaterFailsTheLoad) {
  make_simple_store();
  truncate(path_.c_str(), 200);
  EXPECT_NE(failure().find("from 6000 to 200 bytes"), std::string::npos);
}

TEST_F(FileStoreTest, AFileThatGrewFailsTheLoad) {
  make_simple_store();
  truncate(path_.c_str(), 7000);
  EXPECT_NE(failure().find("from 6000 to 7000 bytes"), std::string::npos);
}

TEST_F(FileStoreTest, AFileRewrittenInPlaceFailsTheLoadUntilItIsAsItWas) {
  make_simple_store();
  struct stat before{};
  ASSERT_EQ(stat(path_.c_str(), &before), 0);
  set_modified(before.st_mtim.tv_sec, (before.st_mtim.tv_nsec + 1) % 1'000'000'000);
  EXPECT_NE(failure().find("rewritten"), std::string::npos);
  set_modified(before.st_mtim.tv_sec, before.st_mtim.tv_nsec);
  EXPECT_EQ(load(store_, 0), expected());  // a failed load leaves the store usable
}

TEST_F(FileStoreTest, AFileReplacedUnderItsNameIsStillTheFileThatWasOpened) {
  make_simple_store();
  write_file(folder_.file("new"), test_bytes(6000, 2));
  std::filesystem::rename(folder_.file("new"), path_);
  EXPECT_EQ(load(store_, 0), expected());
}

TEST_F(FileStoreTest, AReadThatTheSystemRefusesNamesFileAndTensor) {
  make_simple_store();
  // The store's descriptor becomes one of the same file that may not be read.
  struct stat wanted{};
  ASSERT_EQ(stat(path_.c_str(), &wanted), 0);
  const int write_only = open(path_.c_str(), O_WRONLY | O_CLOEXEC);
  ASSERT_GE(write_only, 0);
  for (int descriptor = 3; descriptor < 1024; ++descriptor) {
    struct stat found{};
    if (descriptor != write_only && fstat(descriptor, &found) == 0 &&
        found.st_ino == wanted.st_ino && found.st_dev == wanted.st_dev) {
      ASSERT_EQ(dup2(write_only, descriptor), descriptor);
    }
  }
  close(write_only);
  EXPECT_NE(failure().find("Bad file descriptor"), std::string::npos);
}

TEST_F(FileStoreTest, PlacesOutsideOfFileOrPackAreRefusedEvenWhereTheirSumsOverflow) {
  make_simple_store();
  constexpr auto kHuge = std::numeric_limits<std::uint64_t>::max() - 50;
  const auto add = [this](std::uint64_t file_offset, std::size_t bytes, std::size_t pack_offset) {
    store_.add_unit(kBytes, {{"t", 0, file_offset, bytes, pack_offset, nullptr}});
  };
  EXPECT_THROW(add(0, kBytes, 1), InvalidArgument);
  EXPECT_THROW(add(0, kBytes + 1, 0), InvalidArgument);
  EXPECT_THROW(add(0, 100, kHuge), InvalidArgument);
  EXPECT_THROW(add(0, kHuge, 100), InvalidArgument);
  EXPECT_THROW(add(5901, 100, 0), FileError);
  EXPECT_THROW(add(kHuge, 100, 0), FileError);
  EXPECT_EQ(store_.units(), 1U);
  add(5900, 100, kBytes - 100);  // both just fit
}

// --- tensors that rest in memory -----------------------------------------------------------------

TEST_F(FileStoreTest, ATensorThatRestsInMemoryNeedsNoFile) {
  make_simple_store();
  const auto memory = test_bytes(300, 3);
  store_.add_unit(400, {{"in file", 0, 0, 100, 0, nullptr},
                        {"in memory", FileStore::kNoFile, 0, 300, 100, memory.data()}});
  const auto pack = load(store_, 1);
  EXPECT_TRUE(std::equal(pack.begin(), pack.begin() + 100, content_.begin()));
  EXPECT_TRUE(std::equal(memory.begin(), memory.end(), pack.begin() + 100));
  EXPECT_THROW(store_.add_unit(1, {{"nowhere", FileStore::kNoFile, 0, 1, 0, nullptr}}),
               InvalidArgument);
}

TEST_F(FileStoreTest, ATensorThatMovedToMemoryIsReadFromTheFileNoMore) {
  make_simple_store();
  auto memory = test_bytes(kBytes, 4);
  store_.rest_in_memory(0, 0, memory.data());
  EXPECT_EQ(load(store_, 0), memory);
  memory[17] ^= std::byte{1};
  EXPECT_EQ(load(store_, 0), memory);  // as it is at the time of the load
  truncate(path_.c_str(), 0);
  EXPECT_EQ(load(store_, 0), memory);
}

class MappedTensorTest : public FileStoreTest {
 protected:
  void SetUp() override {
    FileStoreTest::SetUp();
    const int page_map = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (page_map < 0) GTEST_SKIP() << "this system does not let a process see its own pagemap";
    close(page_map);
    make_simple_store();
    const int file = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    ASSERT_GE(file, 0);
    void* mapped = mmap(nullptr, content_.size(), PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    close(file);
    ASSERT_NE(mapped, MAP_FAILED);
    mapping_ = static_cast<std::byte*>(mapped);
    store_.add_unit(kBytes, {{"layers.1.weight", 0, 100, kBytes, 0, mapping_ + 100}});
  }
  void TearDown() override {
    if (mapping_ != nullptr) munmap(mapping_, content_.size());
    FileStoreTest::TearDown();
  }
  std::byte* mapping_ = nullptr;
};

TEST_F(MappedTensorTest, ATensorWrittenThroughItsMappingIsLoadedAsWritten) {
  EXPECT_EQ(load(store_, 1), expected());
  auto changed = expected();
  changed[4444] = mapping_[100 + 4444] = ~changed[4444];
  EXPECT_EQ(load(store_, 1), changed);
  EXPECT_EQ(load(store_, 0), expected());  // another tensor of the same bytes, never written
}

TEST_F(MappedTensorTest, ATensorThatMovedToAMappingOfAnotherPlaceIsReadFromThere) {
  store_.rest_in_memory(0, 0, mapping_ + 500);  // never written, and not the tensor's old bytes
  EXPECT_EQ(load(store_, 0),
            std::vector<std::byte>(content_.begin() + 500, content_.begin() + 500 + kBytes));
}

TEST_F(MappedTensorTest, ATensorThatWasOnlyReadStillComesFromItsFile) {
  EXPECT_EQ(std::vector<std::byte>(mapping_ + 100, mapping_ + 100 + kBytes), expected());
  set_modified(1, 1);  // who asks the file meets an error
  EXPECT_THROW(load(store_, 1), FileError);
  volatile std::byte& byte = mapping_[100];
  byte = byte;  // a write, if of the same byte
  EXPECT_EQ(load(store_, 1), expected());
}

}  // namespace
}  // namespace trae_mem::test
