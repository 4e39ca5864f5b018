// The driver's table and the context over a driver of our own: what a machine lacks is said by
// name, and a caller's context is left as it was. No GPU, simulated or not, is needed.
#include "core/cuda_driver.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "core/cuda_context.h"
#include "core/error.h"
#include "fake_driver.h"
#include "test_support.h"

namespace trae_mem::test {
namespace {

using cuda::Result;

class CudaDriverTest : public ::testing::Test {
 protected:
  void SetUp() override { fake = {}; }
  void TearDown() override { EXPECT_EQ(fake.retained, 0) << "a context was not given back"; }

  static std::shared_ptr<CudaContext> open(int index = 0) {
    return std::make_shared<CudaContext>(std::make_shared<const CudaDriver>(fake_functions()),
                                         index);
  }
  // What opening says when it cannot be done.
  template <typename Expected = DeviceUnavailable>
  static std::string refusal(int index = 0) {
    return message_of<Expected>([index] { open(index); });
  }
  static bool has(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  }
};

// --- the table ----------------------------------------------------------------------------------

TEST_F(CudaDriverTest, AFunctionThatTheDriverLacksIsNamedWithTheDriversVersion) {
  fake.version = 10010;
  const std::string message = message_of<DeviceUnavailable>(
      [] { CudaDriver(fake_functions({"cuMemMap", "cuMemCreate"})); });
  EXPECT_TRUE(has(message, "CUDA 10.1")) << message;
  EXPECT_TRUE(has(message, "lacks cuMemCreate, cuMemMap")) << message;
  EXPECT_TRUE(has(message, "device=\"cpu\"")) << message;
}

TEST_F(CudaDriverTest, ManyMissingFunctionsAreCounted) {
  const std::string message = message_of<DeviceUnavailable>(
      [] { CudaDriver([](const char*, const char*) -> void* { return nullptr; }); });
  EXPECT_TRUE(
      has(message, "The driver lacks cuInit, cuDriverGetVersion, cuGetErrorName and 36 more"))
      << message;
}

TEST_F(CudaDriverTest, EachFunctionIsNeeded) {
  std::vector<std::string> names;
  CudaDriver([&names](const char* name, const char* /*symbol*/) {
    names.emplace_back(name);
    return address(not_called);
  });
  EXPECT_EQ(names.size(), 39U);
  for (const std::string& name : names) {
    const std::string message =
        message_of<DeviceUnavailable>([&name] { CudaDriver(fake_functions({name})); });
    EXPECT_TRUE(has(message, name)) << message;
  }
}

TEST_F(CudaDriverTest, FunctionsThatChangedAreAskedForByTheirSymbol) {
  std::map<std::string, std::string> symbols;
  CudaDriver([&symbols](const char* name, const char* symbol) {
    symbols[name] = symbol;
    return address(not_called);
  });
  EXPECT_EQ(symbols["cuMemcpyHtoDAsync"], "cuMemcpyHtoDAsync_v2");
  EXPECT_EQ(symbols["cuStreamDestroy"], "cuStreamDestroy_v2");
  EXPECT_EQ(symbols["cuMemMap"], "cuMemMap");
}

TEST_F(CudaDriverTest, ASecondAttemptIsMadeAfterErrorsThatMayPass) {
  for (const auto& [error, attempts] : std::map<Result, int>{{cuda::kSuccess, 1},
                                                             {cuda::kUnknown, 2},
                                                             {cuda::kOutOfMemory, 2},
                                                             {cuda::kDeinitialized, 1},
                                                             {cuda::kInvalidHandle, 1},
                                                             {700, 1}}) {
    int calls = 0;
    EXPECT_EQ(CudaDriver::insist([&calls, code = error] {
                ++calls;
                return code;
              }),
              error);
    EXPECT_EQ(calls, attempts) << error;
  }
}

// --- opening a GPU ------------------------------------------------------------------------------

TEST_F(CudaDriverTest, WithoutAGpuTheEnvironmentIsBlamedIfItHidesThem) {
  {
    const ScopedVariable variable("CUDA_VISIBLE_DEVICES", nullptr);
    fake.results["cuInit"] = cuda::kNoDevice;
    const std::string message = refusal();
    EXPECT_TRUE(has(message, "No NVIDIA GPU is visible")) << message;
    EXPECT_TRUE(has(message, "--gpus all")) << message;
    EXPECT_FALSE(has(message, "CUDA_VISIBLE_DEVICES")) << message;
  }
  for (const bool initialized : {false, true}) {
    const ScopedVariable variable("CUDA_VISIBLE_DEVICES", "");
    fake.results["cuInit"] = initialized ? cuda::kSuccess : cuda::kNoDevice;
    fake.devices = 0;
    const std::string message = refusal();
    EXPECT_TRUE(has(message, "CUDA_VISIBLE_DEVICES='' hides others")) << message;
    EXPECT_TRUE(has(message, "device=\"cpu\"")) << message;
  }
}

TEST_F(CudaDriverTest, WhyTheDriverDoesNotStartIsSaid) {
  for (const auto& [error, advice] :
       std::map<Result, std::string>{{cuda::kNotInitialized, "forked"},
                                     {cuda::kStubLibrary, "LD_LIBRARY_PATH"},
                                     {cuda::kSystemDriverMismatch, "reboot"},
                                     {cuda::kUnknown, "nvidia-uvm"},
                                     {304, "nvidia-smi"}}) {
    fake.results["cuInit"] = error;
    const std::string message = refusal();
    EXPECT_TRUE(has(message, "(" + std::to_string(error) + ")")) << message;
    EXPECT_TRUE(has(message, advice)) << message;
    EXPECT_TRUE(has(message, "device=\"cpu\"")) << message;
  }
}

TEST_F(CudaDriverTest, AGpuThatDoesNotExistIsNamed) {
  fake.devices = 2;
  for (const int index : {2, -1}) {
    const std::string message = refusal(index);
    EXPECT_TRUE(has(message, "GPU " + std::to_string(index) + " does not exist: 2 GPUs are"))
        << message;
  }
  EXPECT_EQ(open(1)->name(), "Fake GPU");
}

TEST_F(CudaDriverTest, AGpuWithoutVirtualMemoryManagementIsNamed) {
  fake.virtual_memory = 0;
  const std::string message = refusal();
  EXPECT_TRUE(has(message, "GPU 0 (Fake GPU) has no virtual memory management")) << message;
}

TEST_F(CudaDriverTest, AGpuThatAnotherProcessHasForItselfIsNamed) {
  fake.results["cuDevicePrimaryCtxRetain"] = cuda::kDeviceUnavailable;
  EXPECT_TRUE(has(refusal(), "in use by another process")) << refusal();
}

TEST_F(CudaDriverTest, AGpuWithoutRoomForAContextIsOutOfMemory) {
  fake.results["cuDevicePrimaryCtxRetain"] = cuda::kOutOfMemory;
  EXPECT_TRUE(has(refusal<OutOfMemory>(), "nvidia-smi"));
}

TEST_F(CudaDriverTest, PagesThatDoNotFitOursAreRefused) {
  for (const std::size_t granularity : {std::size_t{0}, std::size_t{4} << 20}) {
    fake.granularity = granularity;
    EXPECT_TRUE(has(refusal(), "has pages of " + format_bytes(granularity)));
    EXPECT_EQ(fake.retained, 0);
  }
  fake.granularity = std::size_t{64} << 10;
  open();
}

TEST_F(CudaDriverTest, EveryFunctionThatFailsWhileOpeningIsNamedAndTheContextGivenBack) {
  for (const char* function :
       {"cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute",
        "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent", "cuCtxPushCurrent",
        "cuMemGetAllocationGranularity"}) {
    fake.results = {{function, cuda::kUnknown}};
    const std::string message = refusal<DeviceError>();
    EXPECT_TRUE(has(message, function)) << message;
    EXPECT_EQ(fake.retained, 0) << function;
  }
}

// --- the current context ------------------------------------------------------------------------

TEST_F(CudaDriverTest, AGuardLeavesTheThreadsContextAsItWas) {
  const auto context = open();
  EXPECT_TRUE(fake.stack.empty());  // opening did so too
  for (const auto& before :
       {std::vector<cuda::ContextHandle>{}, {kForeign}, {kForeign, kPrimary}}) {
    fake.stack = before;
    {
      const CudaContext::Guard guard(*context);
      EXPECT_TRUE(guard.entered());
      EXPECT_EQ(fake.stack.back(), kPrimary);
    }
    EXPECT_EQ(fake.stack, before);
  }
}

TEST_F(CudaDriverTest, WhereTheContextIsCurrentAlreadyNothingIsPushed) {
  const auto context = open();
  fake.stack = {kPrimary};
  fake.calls.clear();
  {
    const CudaContext::Guard guard(*context);
  }
  EXPECT_EQ(fake.calls, std::vector<std::string>{"cuCtxGetCurrent"});
}

TEST_F(CudaDriverTest, AGuardThatCannotEnterSaysSoOrIsSilentInDestructors) {
  const auto context = open();
  for (const char* function : {"cuCtxGetCurrent", "cuCtxPushCurrent"}) {
    fake.results = {{function, cuda::kUnknown}};
    const std::string message =
        message_of<DeviceError>([&] { const CudaContext::Guard guard(*context); });
    EXPECT_TRUE(has(message, function)) << message;
    EXPECT_FALSE(CudaContext::Guard(*context, std::nothrow).entered());
    EXPECT_TRUE(fake.stack.empty());
  }
}

// --- errors of calls ----------------------------------------------------------------------------

TEST_F(CudaDriverTest, AnErrorNamesOperationFunctionAndGpu) {
  const auto context = open();
  EXPECT_NO_THROW(context->check(cuda::kSuccess, "map", "cuMemMap"));
  const std::string message =
      message_of<DeviceError>([&] { context->check(cuda::kInvalidValue, "map", "cuMemMap"); });
  EXPECT_EQ(message, "map: cuMemMap failed on GPU 0 (Fake GPU): CUDA_ERROR_SOME (1): some text");
}

TEST_F(CudaDriverTest, OutOfMemorySaysHowMuchIsFree) {
  const auto context = open();
  const std::string message =
      message_of<OutOfMemory>([&] { context->check(cuda::kOutOfMemory, "create", "cuMemCreate"); });
  EXPECT_TRUE(has(message, "1.00 GiB of 24.00 GiB are free")) << message;
}

TEST_F(CudaDriverTest, ALostContextIsRememberedWithItsFirstError) {
  const auto context = open();
  EXPECT_FALSE(context->lost());
  EXPECT_TRUE(has(message_of<DeviceError>([&] { context->check(719, "record", "cuEventRecord"); }),
                  "CUDA context is lost"));
  EXPECT_TRUE(context->lost());
  const std::string later =
      message_of<DeviceError>([&] { context->check(719, "map", "cuMemMap"); });
  EXPECT_TRUE(has(later, "first noticed by cuEventRecord")) << later;
}

}  // namespace
}  // namespace trae_mem::test
