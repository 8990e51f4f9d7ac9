// Memory of the devices: addresses that the host may not touch, a cache per stream as CUDA has it, and a limit.
#pragma once

#include "machine.h"

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

namespace late {

// A tensor has an address of the first range, which nobody may read or write. Kernels use the second range, a fixed
// distance away. Addresses are never used twice for blocks of another size: there are enough of them.
constexpr size_t ADDRESSES = size_t(1) << 38;  // of each device
inline char *front = nullptr, *back = nullptr;

struct Block {
  int device;
  char* address;  // in the first range
  size_t size;
  Stream* stream;
  std::vector<Stream*> recorded = {};
  std::vector<Moment> users = {};
};

struct Memory {
  size_t limit = size_t(16) << 30, reserved = 0, allocated = 0, peak = 0, peak_reserved = 0, used_addresses = 0;
  std::map<std::pair<Stream*, size_t>, std::vector<Block*>> cached;
  std::vector<Block*> pending;  // freed, and another stream may still read them
};
inline Memory memories[MOST_DEVICES];

// The device that has this address, or -1.
inline int owner(const void* pointer) {
  auto at = static_cast<const char*>(pointer);
  return front && at >= front && at < front + settings.devices * ADDRESSES ? static_cast<int>((at - front) / ADDRESSES) : -1;
}
// Where a kernel finds what has this address.
inline char* inside(const void* pointer) {
  auto at = static_cast<char*>(const_cast<void*>(pointer));
  return owner(at) < 0 ? at : back + (at - front);
}

// The message is written from the handler of a signal, so nothing but write(2) is allowed. The handler before takes over.
inline struct sigaction before_ours;
inline void tell_of_access(int number, siginfo_t* info, void* context) {
  if (owner(info->si_addr) >= 0) {
    const char text[] = "late: the host read or wrote memory of a device. Copy the tensor with .cpu() first.\n";
    [[maybe_unused]] auto written = ::write(STDERR_FILENO, text, sizeof text - 1);
  }
  ::sigaction(number, &before_ours, nullptr);
}

inline void reserve_addresses() {
  auto map = [](int protection) {
    void* found = ::mmap(nullptr, settings.devices * ADDRESSES, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(found != MAP_FAILED, "The system gives no addresses for ", settings.devices, " devices.");
    return static_cast<char*>(found);
  };
  front = map(PROT_NONE);
  back = map(PROT_READ | PROT_WRITE);
  struct sigaction ours = {};
  ours.sa_sigaction = &tell_of_access;
  ours.sa_flags = SA_SIGINFO;
  ::sigaction(SIGSEGV, &ours, &before_ours);
}

inline void poison(char* address, size_t size) {
  if (!settings.dry) std::memset(inside(address), 0xFF, size);  // NaN in every floating type
}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  at::DataPtr allocate(size_t nbytes) override {
    InBackend timed;
    const int device = current;
    if (!nbytes) return {nullptr, nullptr, &nothing, Device(KIND, device)};
    check_not_lost(device);
    Lock lock(machine);
    Memory& memory = memories[device];
    Stream& stream = here(device);
    const size_t size = (nbytes + 511) / 512 * 512;
    settle(memory);
    Block* block = again(memory, stream, size);
    if (!block) block = made(memory, stream, size);
    if (!block) {  // as CUDA does: wait for everything, give back what is cached, try again
      count("allocator: cache flushed");
      synchronize_device(device);
      flush(memory);
      block = made(memory, stream, size);
    }
    if (!block)
      throw c10::OutOfMemoryError(
          {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
          c10::str("late:", device, " is out of memory: ", memory.allocated, " of ", memory.limit, " bytes are allocated, and ",
              size, " more were asked for."));
    memory.allocated += size;
    memory.peak = std::max(memory.peak, memory.allocated);
    return {block->address, block, &give_back, Device(KIND, device)};
  }

  static void nothing(void*) {}
  static void give_back(void* context) {
    auto* block = static_cast<Block*>(context);
    if (!block) return;
    InBackend timed;
    Lock lock(machine);
    Memory& memory = memories[block->device];
    memory.allocated -= block->size;
    for (Stream* stream : block->recorded) block->users.push_back(now(*stream));
    if (block->recorded.empty()) reuse(memory, block);
    else memory.pending.push_back(block);
    block->recorded.clear();
  }
  at::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    InBackend timed;
    if (pointer.get_deleter() != &give_back || !pointer.get()) return;
    Lock lock(machine);
    auto* block = static_cast<Block*>(pointer.get_context());
    Stream* user = &stream_at(stream.device_index(), stream.id());
    if (user != block->stream) block->recorded.push_back(user);
  }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    Lock lock(machine);
    for (int device = 0; device < settings.devices; device++) {
      synchronize_device(device);
      flush(memories[device]);
    }
  }
  bool initialized() override { return true; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "late: nothing copies by way of the allocator"); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    Lock lock(machine);
    const Memory& memory = memories[device];
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = memory.allocated;
    stats.allocated_bytes[0].peak = memory.peak;
    stats.reserved_bytes[0].current = memory.reserved;
    stats.reserved_bytes[0].peak = memory.peak_reserved;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override {
    Lock lock(machine);
    memories[device].peak = memories[device].allocated;
    memories[device].peak_reserved = memories[device].reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    Lock lock(machine);
    const Memory& memory = memories[device];
    return {memory.limit - std::min(memory.limit, memory.reserved), memory.limit};
  }

 private:
  // From here on the next kernel of its stream may write over it; a stream that was not recorded reads NaN.
  static void reuse(Memory& memory, Block* block) {
    enqueue(*block->stream, {[address = block->address, size = block->size] { poison(address, size); }});
    memory.cached[{block->stream, block->size}].push_back(block);
  }
  static Block* again(Memory& memory, Stream& stream, size_t size) {
    auto& blocks = memory.cached[{&stream, size}];
    if (blocks.empty()) return nullptr;
    Block* block = blocks.back();
    blocks.pop_back();
    return block;
  }
  static Block* made(Memory& memory, Stream& stream, size_t size) {
    const size_t room = (size + 4095) / 4096 * 4096;
    if (memory.reserved + size > memory.limit) return nullptr;
    TORCH_CHECK(memory.used_addresses + room <= ADDRESSES, "late: there are no addresses left");
    char* address = front + stream.device * ADDRESSES + memory.used_addresses;
    memory.used_addresses += room;
    memory.reserved += size;
    memory.peak_reserved = std::max(memory.peak_reserved, memory.reserved);
    poison(address, size);
    return new Block{stream.device, address, size, &stream};
  }
  static void settle(Memory& memory) {
    std::vector<Block*> still;
    for (Block* block : std::exchange(memory.pending, {})) {
      bool all = true;
      for (auto& user : block->users) all = all && passed(user);
      if (!all) {
        still.push_back(block);
        continue;
      }
      block->users.clear();
      reuse(memory, block);
    }
    memory.pending = std::move(still);
  }
  static void flush(Memory& memory) {
    settle(memory);
    for (auto& [key, blocks] : memory.cached)
      for (Block* block : blocks) {
        memory.reserved -= block->size;
        ::madvise(inside(block->address), (block->size + 4095) / 4096 * 4096, MADV_DONTNEED);
        delete block;
      }
    memory.cached.clear();
  }
};
inline DeviceMemory device_memory;

} // namespace late
