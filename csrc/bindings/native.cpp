// The Python module trae_mem._native: conversion and nothing else.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../core/cuda_device.h"
#include "../core/error.h"
#include "../core/file_store.h"
#include "../core/host_device.h"
#include "../core/layer_streamer.h"
#include "../core/options.h"
#include "../core/page_pool.h"
#include "../core/weight_store.h"

namespace py = pybind11;
using namespace trae_mem;  // NOLINT(google-build-using-namespace): a file of bindings to it

namespace {

// Raised whenever the Python side must change with this file (trae_mem/native.py).
constexpr int kInterface = 2;

// Memory that Python views through the buffer protocol or, on a GPU, through the CUDA array
// interface; its owner lives as long as the views.
struct Memory {
  std::shared_ptr<void> owner;
  void* data;
  std::size_t bytes;
  int device;  // -1: the host
};

py::buffer_info host_view(const Memory& memory) {
  if (memory.device >= 0) {
    throw py::buffer_error("this memory is on GPU " + std::to_string(memory.device) +
                           ": view it with torch.as_tensor(memory, device='cuda')");
  }
  return {static_cast<std::uint8_t*>(memory.data), static_cast<py::ssize_t>(memory.bytes)};
}

py::dict device_view(const Memory& memory) {
  if (memory.device < 0) throw py::attribute_error("this memory is on the host");
  py::dict result;
  result["shape"] = py::make_tuple(memory.bytes);
  result["typestr"] = "|u1";
  result["data"] = py::make_tuple(reinterpret_cast<std::uintptr_t>(memory.data), false);
  result["version"] = 3;
  result["strides"] = py::none();
  result["stream"] = py::none();  // its users are ordered by acquire and release
  return result;
}

// Destroying one waits for its work, which may need the interpreter: a host function of a stream.
void destroy(LayerStreamer* streamer) {
  if (PyGILState_Check() == 1) {
    const py::gil_scoped_release released;
    delete streamer;
  } else {
    delete streamer;
  }
}

// Raises the Python exception `name` of trae_mem.errors.
void raise(const char* name, const std::exception& error) {
  py::set_error(py::module_::import("trae_mem.errors").attr(name), error.what());
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const OutOfMemory& error) {
    raise("OutOfMemoryError", error);
  } catch (const FileError& error) {
    raise("WeightFileError", error);
  } catch (const InvalidArgument& error) {
    py::set_error(PyExc_ValueError, error.what());
  } catch (const DeviceUnavailable& error) {
    raise("ConfigError", error);
  } catch (const DeviceError& error) {
    raise("TransferError", error);
  } catch (const Error& error) {
    raise("TraeMemError", error);
  }
}

py::dict as_dict(const StreamerStats& stats) {
  py::dict result;
  result["acquires"] = stats.acquires;
  result["loads"] = stats.loads;
  result["load_bytes"] = stats.load_bytes;
  result["load_ns"] = stats.load_ns;
  result["hits"] = stats.hits;
  result["stalls"] = stats.stalls;
  result["stall_ns"] = stats.stall_ns;
  return result;
}

py::tuple as_tuple(const EventLog::Batch& batch) {
  py::list entries;
  for (const LogEntry& entry : batch.entries) {
    entries.append(py::make_tuple(static_cast<int>(entry.kind), entry.unit, entry.slot, entry.bytes,
                                  entry.begin_ns, entry.end_ns));
  }
  return py::make_tuple(entries, batch.next, batch.lost);
}

// name, file (-1: none), offset in the file, bytes, offset in the pack, address while it rests
using TensorTuple =
    std::tuple<std::string, std::int64_t, std::uint64_t, std::size_t, std::size_t, std::uintptr_t>;

void add_file_unit(FileStore& store, std::size_t bytes, const std::vector<TensorTuple>& tensors) {
  std::vector<FileStore::Tensor> converted;
  for (const auto& [name, file, file_offset, tensor_bytes, pack_offset, address] : tensors) {
    converted.push_back({name, file < 0 ? FileStore::kNoFile : static_cast<std::size_t>(file),
                         file_offset, tensor_bytes, pack_offset,
                         reinterpret_cast<const std::byte*>(address)});
  }
  store.add_unit(bytes, std::move(converted));
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "The engine of trae_mem. Use the package's own functions instead.";
  module.attr("INTERFACE") = kInterface;
  module.attr("PAGE_BYTES") = kPageBytes;
  module.attr("SLOT_ALIGNMENT") = SlotArena::kAlignment;
  py::register_local_exception_translator(translate);

  module.def("options", [] {
    std::vector<std::tuple<std::string, std::string, std::string, std::string>> rows;
    for (const OptionDescription& option : kOptions) {
      rows.emplace_back(option.name, option.environment, option.default_value, option.meaning);
    }
    return rows;
  });

  py::class_<Memory>(module, "Memory", py::buffer_protocol())
      .def_buffer(&host_view)
      .def_readonly("device", &Memory::device)
      .def_property_readonly("__cuda_array_interface__", &device_view)
      .def(
          "part",
          [](const Memory& memory, std::size_t offset, std::size_t bytes) {
            if (offset > memory.bytes || bytes > memory.bytes - offset) {
              throw InvalidArgument("part: " + std::to_string(bytes) + " bytes from " +
                                    std::to_string(offset) + " on, of " +
                                    std::to_string(memory.bytes));
            }
            return Memory{memory.owner, static_cast<std::byte*>(memory.data) + offset, bytes,
                          memory.device};
          },
          py::arg("offset"), py::arg("bytes"));

  py::class_<Device, std::shared_ptr<Device>>(module, "Device")
      .def_property_readonly("name", [](const Device& device) { return device.info().name; })
      .def_property_readonly("total_bytes",
                             [](const Device& device) { return device.info().total_bytes; })
      .def_property_readonly("free_bytes",
                             [](const Device& device) { return device.info().free_bytes; })
      .def_property_readonly("used_bytes",
                             [](const Device& device) { return device.info().used_bytes; })
      .def_property_readonly("index", [](const Device& device) { return device.info().index; });

  py::class_<HostDevice, Device, std::shared_ptr<HostDevice>>(module, "HostDevice")
      .def(py::init([](std::size_t memory_bytes, std::uint64_t link_bytes_per_second,
                       std::string faults, std::uint64_t random_delay_us, std::uint64_t seed) {
             return std::make_shared<HostDevice>(HostDeviceOptions{
                 memory_bytes, link_bytes_per_second, std::move(faults), random_delay_us, seed});
           }),
           py::kw_only(), py::arg("memory_bytes") = 0, py::arg("link_bytes_per_second") = 0,
           py::arg("faults") = "", py::arg("random_delay_us") = 0, py::arg("seed") = 0)
      .def_static("from_environment", [] {
        return std::make_shared<HostDevice>(HostDeviceOptions::from_environment());
      });

  py::class_<CudaDevice, Device, std::shared_ptr<CudaDevice>>(module, "CudaDevice")
      .def(py::init([](int index, std::size_t memory_bytes) {
             CudaDeviceOptions options = CudaDeviceOptions::from_environment(index);
             options.memory_bytes = memory_bytes;
             const py::gil_scoped_release released;  // the driver may take seconds to start
             return std::make_shared<CudaDevice>(options);
           }),
           py::arg("index") = 0, py::kw_only(), py::arg("memory_bytes") = 0)
      .def_property_readonly("pinning_note", &CudaDevice::pinning_note);

  py::class_<PagePool, std::shared_ptr<PagePool>>(module, "PagePool")
      .def(py::init<std::shared_ptr<Device>, std::size_t>(), py::arg("device"),
           py::arg("limit_bytes") = 0)
      .def_property_readonly("used_bytes", &PagePool::used_bytes)
      .def_property_readonly("free_bytes", &PagePool::free_bytes)
      .def("trim", &PagePool::trim);

  py::class_<WeightStore, std::shared_ptr<WeightStore>>(module, "WeightStore")
      .def_property_readonly("name", &WeightStore::name);

  py::class_<RamStore, WeightStore, std::shared_ptr<RamStore>>(module, "RamStore")
      .def(py::init<std::shared_ptr<Device>>(), py::arg("device"))
      .def(
          "add_unit",
          [](RamStore& store, std::size_t bytes) {
            std::shared_ptr<HostBuffer> pack = store.add_unit(bytes);
            void* data = pack->data();
            return Memory{std::move(pack), data, bytes, -1};
          },
          py::arg("bytes"));

  py::class_<FileStore, WeightStore, std::shared_ptr<FileStore>>(module, "FileStore")
      .def(py::init([] { return std::make_shared<FileStore>(option_number("reader_threads", 1)); }))
      .def("add_file", &FileStore::add_file, py::arg("path"))
      .def("add_unit", add_file_unit, py::arg("bytes"), py::arg("tensors"))
      .def(
          "rest_in_memory",
          [](FileStore& store, std::size_t unit, std::size_t tensor, std::uintptr_t address) {
            store.rest_in_memory(unit, tensor, reinterpret_cast<const void*>(address));
          },
          py::arg("unit"), py::arg("tensor"), py::arg("address"));

  py::enum_<Travel>(module, "Travel")
      .value("FORWARD", Travel::kForward)
      .value("FORWARD_AROUND", Travel::kForwardAround)
      .value("BACKWARD", Travel::kBackward);

  py::class_<LayerStreamer, std::shared_ptr<LayerStreamer>>(module, "LayerStreamer")
      .def(
          py::init([](std::shared_ptr<PagePool> pool, std::shared_ptr<WeightStore> store,
                      std::size_t slots, std::size_t prefetch, std::vector<bool> resident,
                      bool poison) {
            return std::shared_ptr<LayerStreamer>(
                new LayerStreamer(std::move(pool), std::move(store),
                                  LayerStreamerOptions{slots, prefetch, std::move(resident), poison,
                                                       option_number("event_log_entries", 1)}),
                destroy);
          }),
          py::arg("pool"), py::arg("store"), py::kw_only(), py::arg("slots"), py::arg("prefetch"),
          py::arg("resident"), py::arg("poison"))
      .def("window",
           [](const std::shared_ptr<LayerStreamer>& streamer, std::size_t unit, std::size_t bytes) {
             return Memory{streamer, reinterpret_cast<void*>(streamer->window(unit)), bytes,
                           streamer->device().info().index};
           })
      .def(
          "acquire",
          [](LayerStreamer& streamer, std::size_t unit, std::uintptr_t stream, Travel travel) {
            streamer.acquire(unit, StreamHandle{stream}, travel);
          },
          py::call_guard<py::gil_scoped_release>())
      .def("release", [](LayerStreamer& streamer, std::size_t unit,
                         std::uintptr_t stream) { streamer.release(unit, StreamHandle{stream}); })
      .def("invalidate", &LayerStreamer::invalidate)
      .def("drain", &LayerStreamer::drain, py::call_guard<py::gil_scoped_release>())
      .def("abandon", &LayerStreamer::abandon)
      .def("stats", [](LayerStreamer& streamer) { return as_dict(streamer.stats()); })
      .def("events", [](LayerStreamer& streamer,
                        std::uint64_t from) { return as_tuple(streamer.events(from)); })
      .def_property_readonly("bytes_on_device", &LayerStreamer::bytes_on_device)
      .def("check_invariants", &LayerStreamer::check_invariants);
}
