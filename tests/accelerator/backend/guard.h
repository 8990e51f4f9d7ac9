// What torch asks a backend for: generators, the hooks of torch.accelerator, streams and events.
#pragma once

#include "pinned_memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace late {

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex device) {
    device_ = Device(KIND, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};
inline const at::Generator& default_generator(DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < settings.devices; i++) made->push_back(at::make_generator<Generator>(static_cast<DeviceIndex>(i)));
    return made;
  }();
  return all->at(device < 0 ? current : device);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(settings.devices); }
  void setCurrentDevice(DeviceIndex device) const override { set_current(device); }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(current); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto before = static_cast<DeviceIndex>(current);
    set_current(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 || device >= settings.devices ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override {
    InBackend timed;
    return pinned_memory.find(data);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Device getDeviceFromPtr(void* data) const override {
    TORCH_CHECK(owner(data) >= 0, "This is no memory of late.");
    return Device(KIND, static_cast<DeviceIndex>(owner(data)));
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? getCurrentDevice() : device);
  }
};

struct Event {
  Moment moment;
  bool has_timing = false;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = KIND;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  // devices
  c10::DeviceType type() const override { return KIND; }
  Device getDevice() const override { return Device(KIND, static_cast<DeviceIndex>(current)); }
  void setDevice(Device device) const override {
    if (device.index() >= 0) set_current(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(settings.devices); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }
  void synchronizeDevice(DeviceIndex device) const override { synchronize_device(device < 0 ? current : device); }

  // streams
  static int index(Device device) { return device.index() < 0 ? current : device.index(); }
  static Stream& ours(const c10::Stream& stream) { return stream_at(stream.device_index(), stream.id()); }
  static c10::Stream theirs(const Stream& stream) {
    return c10::Stream(c10::Stream::UNSAFE, Device(KIND, static_cast<DeviceIndex>(stream.device)), stream.id);
  }
  c10::Stream getStream(Device device) const override {
    InBackend timed;
    return theirs(here(index(device)));
  }
  c10::Stream getDefaultStream(Device device) const override { return theirs(stream_at(index(device), 0)); }
  c10::Stream getNewStream(Device device, int = 0) const override {
    Lock lock(machine);
    return theirs(stream_at(index(device), 1 + next_in_pool[index(device)]++ % POOL));
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    InBackend timed;
    c10::Stream before = theirs(here(stream.device_index()));
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return query(now(ours(stream))); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(ours(stream)); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_memory.recordStream(pointer, stream);
  }

  // events; one that was not recorded has passed
  static bool is_recorded(void* event) { return event && static_cast<Event*>(event)->moment.stream; }
  void record(void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag flag) const override {
    InBackend timed;
    check_not_lost(stream.device_index());
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = {mark(ours(stream)), flag == c10::EventFlag::BACKEND_DEFAULT};
  }
  void block(void* event, const c10::Stream& stream) const override {
    InBackend timed;
    check_not_lost(stream.device_index());
    if (is_recorded(event)) wait_for(ours(stream), static_cast<Event*>(event)->moment);
  }
  bool queryEvent(void* event) const override { return !is_recorded(event) || query(static_cast<Event*>(event)->moment); }
  void synchronizeEvent(void* event) const override {
    InBackend timed;
    if (is_recorded(event)) host_waits_for(static_cast<Event*>(event)->moment, "event");
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* one, void* other, DeviceIndex) const override {
    auto *start = static_cast<Event*>(one), *end = static_cast<Event*>(other);
    TORCH_CHECK(start && end && start->has_timing && end->has_timing, "Both events need enable_timing=True and a record.");
    TORCH_CHECK(passed(start->moment) && passed(end->moment), "Wait for both events before you ask for the time between them.");
    return (*end->moment.time - *start->moment.time) * 1e3;
  }
};

} // namespace late
