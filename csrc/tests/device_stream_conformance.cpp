// Streams and events: what runs before what, and where a failure is found.
#include <atomic>

#include "core/clock.h"
#include "device_conformance.h"

namespace trae_mem::test {
namespace {

TEST_P(DeviceConformance, AStreamRunsItsWorkInOrder) {
  const Stream stream(*device_);
  std::vector<int> order;
  std::vector<int> expected;
  for (int i = 0; i < 200; ++i) {
    device_->run([&order, i] { order.push_back(i); }, stream.handle());
    expected.push_back(i);
  }
  device_->synchronize(stream.handle());
  EXPECT_EQ(order, expected);
}

TEST_P(DeviceConformance, StreamsRunSideBySide) {
  if (!GetParam().host_work_side_by_side) {
    GTEST_SKIP() << "this driver may run the host work of all streams one behind the other";
  }
  const Stream held(*device_);
  const Stream free(*device_);
  Gate gate;
  device_->run(gate.task(), held.handle());
  bool ran = false;
  device_->run([&ran] { ran = true; }, free.handle());
  device_->synchronize(free.handle());
  EXPECT_TRUE(ran);
}

TEST_P(DeviceConformance, AnEventMakesAnotherStreamWait) {
  const Stream first(*device_);
  const Stream second(*device_);
  const Event event(*device_);
  Gate gate;
  std::atomic<bool> first_ran = false;
  std::atomic<bool> second_ran = false;
  bool in_order = false;
  device_->run(gate.task(), first.handle());
  device_->run([&] { first_ran = true; }, first.handle());
  device_->record(event.handle(), first.handle());
  device_->wait(second.handle(), event.handle());
  device_->run(
      [&] {
        in_order = first_ran;
        second_ran = true;
      },
      second.handle());
  EXPECT_FALSE(happens([&] { return second_ran.load(); }));
  gate.open();
  device_->synchronize(second.handle());
  EXPECT_TRUE(in_order);
}

TEST_P(DeviceConformance, AWaitDoesNotBlockTheHost) {
  const Stream first(*device_);
  const Stream second(*device_);
  const Event event(*device_);
  Gate gate;
  device_->run(gate.task(), first.handle());
  device_->record(event.handle(), first.handle());
  device_->wait(second.handle(), event.handle());  // would never return otherwise
  EXPECT_FALSE(device_->query(event.handle()));
}

TEST_P(DeviceConformance, AnEventIsNotBehindLaterWork) {
  const Stream first(*device_);
  const Stream second(*device_);
  const Event event(*device_);
  Gate gate;
  device_->record(event.handle(), first.handle());
  device_->run(gate.task(), first.handle());
  device_->wait(second.handle(), event.handle());
  device_->synchronize(second.handle());
  device_->synchronize(event.handle());
  EXPECT_TRUE(device_->query(event.handle()));
}

TEST_P(DeviceConformance, AnEventIsDoneWhenTheWorkBeforeItIs) {
  const Stream stream(*device_);
  const Event event(*device_);
  Gate gate;
  device_->run(gate.task(), stream.handle());
  device_->record(event.handle(), stream.handle());
  EXPECT_FALSE(device_->query(event.handle()));
  gate.open();
  device_->synchronize(event.handle());
  EXPECT_TRUE(device_->query(event.handle()));
}

TEST_P(DeviceConformance, AnEventThatWasNeverRecordedHoldsNobody) {
  const Stream stream(*device_);
  const Event event(*device_);
  EXPECT_TRUE(device_->query(event.handle()));
  device_->wait(stream.handle(), event.handle());
  device_->synchronize(stream.handle());
  device_->synchronize(event.handle());
}

TEST_P(DeviceConformance, RecordingAgainDoesNotHoldEarlierWaiters) {
  const Stream first(*device_);
  const Stream second(*device_);
  const Event event(*device_);
  Gate early;
  Gate late;
  device_->run(early.task(), first.handle());
  device_->record(event.handle(), first.handle());
  device_->wait(second.handle(), event.handle());
  device_->run(late.task(), first.handle());
  device_->record(event.handle(), first.handle());
  early.open();
  device_->synchronize(second.handle());  // not behind the second record
  EXPECT_FALSE(device_->query(event.handle()));
}

TEST_P(DeviceConformance, RecordingAgainDoesNotFreeEarlierWaiters) {
  const Stream held(*device_);
  const Stream waiting(*device_);
  const Stream idle(*device_);
  const Event event(*device_);
  Gate gate;
  std::atomic<bool> ran = false;
  device_->run(gate.task(), held.handle());
  device_->record(event.handle(), held.handle());
  device_->wait(waiting.handle(), event.handle());
  device_->run([&ran] { ran = true; }, waiting.handle());
  device_->record(event.handle(), idle.handle());
  device_->synchronize(event.handle());  // that of the idle stream
  EXPECT_FALSE(happens([&ran] { return ran.load(); }));
  gate.open();
  device_->synchronize(waiting.handle());
  EXPECT_TRUE(ran);
}

TEST_P(DeviceConformance, DestroyingAnEventDoesNotFreeItsWaiters) {
  const Stream first(*device_);
  const Stream second(*device_);
  Gate gate;
  std::atomic<bool> ran = false;
  device_->run(gate.task(), first.handle());
  {
    const Event event(*device_);
    device_->record(event.handle(), first.handle());
    device_->wait(second.handle(), event.handle());
  }
  device_->run([&ran] { ran = true; }, second.handle());
  EXPECT_FALSE(happens([&ran] { return ran.load(); }));
  gate.open();
  device_->synchronize(second.handle());
  EXPECT_TRUE(ran);
}

TEST_P(DeviceConformance, AStreamThatWaitsForItsOwnEventGoesOn) {
  const Stream stream(*device_);
  const Event event(*device_);
  device_->record(event.handle(), stream.handle());
  device_->wait(stream.handle(), event.handle());
  device_->synchronize(stream.handle());
}

TEST_P(DeviceConformance, SynchronizingAStreamWaitsForAllItsWork) {
  const Stream stream(*device_);
  Gate gate;
  std::atomic<bool> synchronized = false;
  int ran = 0;
  device_->run(gate.task(), stream.handle());
  device_->run([&ran] { ++ran; }, stream.handle());
  std::thread waiting([&] {
    device_->synchronize(stream.handle());
    synchronized = true;
  });
  EXPECT_FALSE(happens([&] { return synchronized.load(); }));
  gate.open();
  waiting.join();
  EXPECT_EQ(ran, 1);
}

TEST_P(DeviceConformance, AStreamIsDestroyedAfterItsWorkIsDone) {
  int ran = 0;
  {
    const Stream stream(*device_);
    for (int i = 0; i < 50; ++i) device_->run([&ran] { ++ran; }, stream.handle());
  }
  EXPECT_EQ(ran, 50);
}

TEST_P(DeviceConformance, WhatWasDestroyedIsRefused) {
  const StreamHandle stream = device_->create_stream();
  const EventHandle event = device_->create_event(/*timed=*/false);
  device_->destroy_stream(stream);
  EXPECT_THROW(device_->run([] {}, stream), InvalidArgument);
  EXPECT_THROW(device_->synchronize(stream), InvalidArgument);
  EXPECT_THROW(device_->record(event, stream), InvalidArgument);
  EXPECT_THROW(device_->destroy_stream(stream), InvalidArgument);
  device_->destroy_event(event);
  EXPECT_THROW(device_->record(event, probe()), InvalidArgument);
  EXPECT_THROW(device_->wait(probe(), event), InvalidArgument);
  EXPECT_THROW(static_cast<void>(device_->query(event)), InvalidArgument);
  EXPECT_THROW(device_->synchronize(event), InvalidArgument);
  EXPECT_THROW(device_->destroy_event(event), InvalidArgument);
}

// --- times --------------------------------------------------------------------------------------

TEST_P(DeviceConformance, ATimedEventTellsWhenTheStreamPassedIt) {
  const Stream stream(*device_);
  const Event first(*device_, /*timed=*/true);
  const Event second(*device_, /*timed=*/true);
  EXPECT_FALSE(device_->time_ns(first.handle()).has_value());  // never recorded
  const auto known = [&](const Event& event) {
    return eventually([&] { return device_->time_ns(event.handle()).has_value(); });
  };
  Gate gate;
  device_->record(first.handle(), stream.handle());
  device_->run(gate.task(), stream.handle());
  device_->record(second.handle(), stream.handle());
  ASSERT_TRUE(known(first));
  EXPECT_FALSE(device_->time_ns(second.handle()).has_value());
  const std::int64_t opened = now_ns();
  gate.open();
  ASSERT_TRUE(known(second));
  // The clocks of a GPU and of its host agree to some microseconds.
  constexpr std::int64_t kTolerance = 1'000'000;
  EXPECT_LE(*device_->time_ns(first.handle()), opened + kTolerance);
  EXPECT_GE(*device_->time_ns(second.handle()), opened - kTolerance);
  EXPECT_LE(*device_->time_ns(second.handle()), now_ns() + kTolerance);
  device_->synchronize(second.handle());
}

// --- failures -----------------------------------------------------------------------------------

TEST_P(DeviceConformance, AnEventReportsWhatTheWorkBeforeItThrew) {
  const Stream stream(*device_);
  device_->run(failing("first"), stream.handle());
  device_->run(failing("second"), stream.handle());
  EXPECT_EQ(message_of<std::runtime_error>([&] { finish(stream.handle()); }), "first");
}

TEST_P(DeviceConformance, EveryoneWhoWaitsForAFailedEventLearnsOfIt) {
  const Stream stream(*device_);
  const Event event(*device_);
  device_->run(failing("lost"), stream.handle());
  device_->record(event.handle(), stream.handle());
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(message_of<std::runtime_error>([&] { device_->synchronize(event.handle()); }),
              "lost");
  }
  EXPECT_TRUE(device_->query(event.handle()));  // done, though it failed
}

TEST_P(DeviceConformance, AStreamGoesOnBehindAFailure) {
  const Stream stream(*device_);
  bool ran = false;
  device_->run(failing("lost"), stream.handle());
  device_->run([&ran] { ran = true; }, stream.handle());
  EXPECT_THROW(finish(stream.handle()), std::runtime_error);
  EXPECT_TRUE(ran);
  finish(stream.handle());  // the failure was reported; the next event is a new one
}

TEST_P(DeviceConformance, SynchronizingAStreamLeavesFailuresWithTheEvents) {
  const Stream stream(*device_);
  device_->run(failing("lost"), stream.handle());
  device_->synchronize(stream.handle());
  EXPECT_THROW(finish(stream.handle()), std::runtime_error);
}

TEST_P(DeviceConformance, AMarkLeavesAFailureToTheNextRecord) {
  const Stream stream(*device_);
  const Event mark(*device_, /*timed=*/true);
  device_->run(failing("lost"), stream.handle());
  device_->mark(mark.handle(), stream.handle());
  device_->synchronize(mark.handle());
  EXPECT_TRUE(device_->query(mark.handle()));
  EXPECT_EQ(message_of<std::runtime_error>([&] { finish(stream.handle()); }), "lost");
}

TEST_P(DeviceConformance, AFailureTravelsThroughAWait) {
  const Stream first(*device_);
  const Stream second(*device_);
  const Event event(*device_);
  bool ran = false;
  device_->run(failing("lost"), first.handle());
  device_->record(event.handle(), first.handle());
  device_->wait(second.handle(), event.handle());
  device_->run([&ran] { ran = true; }, second.handle());
  EXPECT_EQ(message_of<std::runtime_error>([&] { finish(second.handle()); }), "lost");
  EXPECT_TRUE(ran);
  finish(second.handle());
  finish(first.handle());
}

// --- faults -------------------------------------------------------------------------------------

// Every operation that a fault plan can fail, once, with owners that give everything back.
void use_everything(const std::shared_ptr<Device>& device) {
  const std::unique_ptr<HostBuffer> buffer = device->allocate_host(4096);
  const Pages pages(device, kPageBytes);
  AddressRange range(device, kPageBytes);
  range.map(0, kPageBytes, pages.handle());
  const Stream stream(*device);
  const Stream other(*device);
  const Event event(*device);
  device->copy_to_device(range.begin(), buffer->data(), buffer->bytes(), stream.handle());
  device->record(event.handle(), stream.handle());
  device->wait(other.handle(), event.handle());
  device->synchronize(event.handle());
  const Event timed(*device, /*timed=*/true);
  device->mark(timed.handle(), stream.handle());
  device->synchronize(timed.handle());
}

TEST_P(DeviceConformance, AnyOperationMayFailOnceAndLeavesNothingBehind) {
  if (GetParam().fallible.empty()) GTEST_SKIP() << "nothing lets this device fail on demand";
  for (const std::string& operation : GetParam().fallible) {
    SCOPED_TRACE(operation);
    make_device({.faults = operation + ":1"});
    const std::string message = message_of<DeviceError>([&] { use_everything(device_); });
    EXPECT_NE(message.find(operation), std::string::npos) << message;
    EXPECT_EQ(device_->info().used_bytes, 0U);
    GetParam().check_invariants(*device_);
    use_everything(device_);
  }
}

TEST_P(DeviceConformance, AFailedCopyIsReportedByItsEventOnly) {
  if (GetParam().fallible.empty()) GTEST_SKIP() << "nothing lets this device fail on demand";
  make_device({.faults = "copy:2"});
  const Pages pages(device_, kPageBytes);
  const auto range = mapped(kPageBytes, pages.handle());
  const auto before = test_bytes(4096, 1);
  const auto lost = test_bytes(4096, 2);
  const Stream stream(*device_);
  const auto copy = [&](const std::vector<std::byte>& bytes) {
    device_->copy_to_device(range->begin(), bytes.data(), bytes.size(), stream.handle());
    finish(stream.handle());
  };
  copy(before);
  EXPECT_THROW(copy(lost), DeviceError);
  EXPECT_EQ(read(range->begin(), before.size()), before);
  copy(lost);
  EXPECT_EQ(read(range->begin(), lost.size()), lost);
}

}  // namespace
}  // namespace trae_mem::test
