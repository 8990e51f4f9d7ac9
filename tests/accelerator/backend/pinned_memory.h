// Pinned memory of the host. It is kept until the copies that use it are through, and is NaN afterwards.
#pragma once

#include "device_memory.h"

#include <ATen/core/CachingHostAllocator.h>

#include <cstdlib>

namespace late {

struct Pinned {
  char* pointer;
  size_t size;
  std::vector<Moment> users = {};
};

class PinnedMemory final : public at::HostAllocator {
 public:
  at::DataPtr allocate(size_t nbytes) override {
    InBackend timed;
    if (!nbytes) return {nullptr, nullptr, &DeviceMemory::nothing, at::kCPU};
    Lock lock(machine);
    settle();
    void* made = settings.dry ? ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                              : std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
    TORCH_CHECK(made && made != MAP_FAILED, "The system gives no ", nbytes, " bytes of pinned memory.");
    count("pinned bytes", nbytes);
    auto* block = new Pinned{static_cast<char*>(made), nbytes};
    live[block->pointer] = block;
    return {made, block, &give_back, at::kCPU};
  }
  // The block that an address is in, or null: then it is pageable.
  Pinned* find(const void* pointer) {
    Lock lock(machine);
    auto after = live.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
    if (after == live.begin()) return nullptr;
    Pinned* block = std::prev(after)->second;
    return pointer < block->pointer + block->size ? block : nullptr;
  }
  bool record_event(void* pointer, void*, c10::Stream stream) override {
    Lock lock(machine);
    Pinned* block = find(pointer);
    if (block) block->users.push_back(now(stream_at(stream.device_index(), stream.id())));
    return block;
  }
  at::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  std::map<char*, Pinned*> live;
  std::vector<Pinned*> pending;

  static void give_back(void* context);
  void settle() {
    std::vector<Pinned*> still;
    for (Pinned* block : std::exchange(pending, {})) {
      bool all = true;
      for (auto& user : block->users) all = all && passed(user);
      if (!all) {
        still.push_back(block);
        continue;
      }
      if (settings.dry) {
        ::munmap(block->pointer, block->size);
      } else {
        std::memset(block->pointer, 0xFF, block->size);
        std::free(block->pointer);
      }
      delete block;
    }
    pending = std::move(still);
  }
};
inline PinnedMemory pinned_memory;

inline void PinnedMemory::give_back(void* context) {
  auto* block = static_cast<Pinned*>(context);
  if (!block) return;
  InBackend timed;
  Lock lock(machine);
  pinned_memory.live.erase(block->pointer);
  pinned_memory.pending.push_back(block);
  pinned_memory.settle();
}

} // namespace late
