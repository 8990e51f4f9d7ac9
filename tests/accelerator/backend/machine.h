// Streams, and when their work is done: as late as it may, in an order drawn from a seed, or at once.
//
// One lock guards everything. Whoever holds it runs kernels and moves numbers, and never asks for the interpreter: a thread
// that has the interpreter may wait for the lock. So no tensor that Python knows is copied or dropped under the lock.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <tuple>
#include <vector>

namespace late {

using c10::Device;
using c10::DeviceIndex;
using c10::StreamId;
constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr int MOST_DEVICES = 16, POOL = 32;

enum class Order { late, random, eager };

// Units are seconds and bytes.
struct Costs {
  double launch = 5e-6, link = 50e9, pageable_link = 8e9, memory = 4e12, flops = 500e12;
};

struct Settings {
  int devices = 2;
  Order order = Order::late;
  bool dry = false;  // compute nothing; the clocks go on by `costs`
  Costs costs;
};
inline Settings settings;

inline std::recursive_mutex machine;
using Lock = std::lock_guard<std::recursive_mutex>;

inline std::map<std::string, int64_t> counts;
inline void count(const std::string& what, int64_t by = 1) {
  Lock lock(machine);
  counts[what] += by;
}

// Nanoseconds that threads of the host spent in this backend, where a driver would take others; a benchmark leaves them
// out. Calls within calls count once, and calls in which the system gave the processor away do not count.
constexpr int64_t INTERRUPTED = 200'000;
inline std::atomic<int64_t> host_nanoseconds;
struct InBackend {
  using Clock = std::chrono::steady_clock;
  static int& depth() {
    thread_local int calls = 0;
    return calls;
  }
  Clock::time_point begin;
  InBackend() {
    if (!depth()++) begin = Clock::now();
  }
  ~InBackend() {
    if (--depth()) return;
    const int64_t taken = std::chrono::nanoseconds(Clock::now() - begin).count();
    if (taken < INTERRUPTED) host_nanoseconds += taken;
  }
};

// -- clocks ------------------------------------------------------------------------------------------------------------

// Each stream has a clock. No work begins before the host has given it, and a kernel takes the time that it took, or in a
// dry run what it would have taken; then each thread of the host and each copy engine has a clock, too.
inline int epoch = 0;
inline double latest_host = 0;
// A copy engine takes the copies of all streams that are ready by turns. So a copy begins when the one that is under way
// has ended, also where others were given before it; their time is known already, so the next one at the end pays for it.
struct Engine {
  std::map<double, double> busy;  // begin and end of copies
  double owed = 0;

  double begin(double ready, double seconds) {
    auto next = busy.upper_bound(ready);
    if (next != busy.begin()) ready = std::max(ready, std::prev(next)->second);
    next = busy.lower_bound(ready);
    if (next == busy.end()) {
      ready += std::exchange(owed, 0);
    } else if (next->first < ready + seconds) {
      owed += seconds;
      return ready;
    }
    if (seconds) busy[ready] = ready + seconds;
    return ready;
  }
};
inline Engine engines[MOST_DEVICES][2];
inline double& host_clock() {
  thread_local double clock = 0;
  thread_local int of_epoch = -1;
  if (of_epoch != epoch) of_epoch = epoch, clock = 0;
  return clock;
}
inline void host_waits(double until) {
  host_clock() = std::max(host_clock(), until);
  latest_host = std::max(latest_host, host_clock());
}
// Of a machine that computes: the clock of the host is the real one.
inline double real_clock() {
  static const auto origin = std::chrono::steady_clock::now();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - origin).count();
}
inline std::vector<std::tuple<int, StreamId, std::string, double, double>> spans;

// -- streams -----------------------------------------------------------------------------------------------------------

struct Work {
  std::function<void()> run;
  const char* name = nullptr;  // of a kernel or copy; a mark or a wait has none, and takes no time
  double seconds = 0;          // in a dry run
  int engine = -1;             // copy engine: 0 up, 1 down
  double given = 0;            // clock of the host
};

struct Stream {
  int device;
  StreamId id;
  std::deque<Work> queue;
  uint64_t given = 0, done = 0;
  double clock = 0;
};

inline std::vector<std::unique_ptr<Stream>> streams[MOST_DEVICES];
inline int next_in_pool[MOST_DEVICES];
inline thread_local int current = 0;
inline thread_local StreamId current_stream[MOST_DEVICES] = {};

inline Stream& stream_at(int device, StreamId id) {
  Lock lock(machine);
  auto& all = streams[device];
  while (static_cast<StreamId>(all.size()) <= id) all.emplace_back(new Stream{device, static_cast<StreamId>(all.size())});
  return *all[id];
}
inline Stream& here(int device) {
  return stream_at(device, current_stream[device]);
}
inline void set_current(int device) {
  TORCH_CHECK(device >= 0 && device < settings.devices, "There is no device late:", device, "; there are ", settings.devices, ".");
  current = device;
}

inline std::exception_ptr errors[MOST_DEVICES];  // the first one of a kernel; raised where the host waits next for the device
inline void raise_error(int device) {
  if (auto found = std::exchange(errors[device], nullptr)) std::rethrow_exception(found);
}

// A device that is lost does no work, and every call that concerns it is an error, until it is started again.
inline bool lost[MOST_DEVICES];
inline int64_t until_lost[MOST_DEVICES];  // kernels and copies that it still does; 0: it is not going to be lost
inline void check_not_lost(int device) {
  TORCH_CHECK(!lost[device], "late:", device, " is lost.");
}

inline int depth = 0;  // of pieces of work, one of which waits for the next
inline void run_next(Stream& stream) {
  depth++;
  Work work = std::move(stream.queue.front());
  stream.queue.pop_front();
  const auto begin = std::chrono::steady_clock::now();
  // Marks, too: what an idle stream is given it does at once, so clocks of devices agree with that of the host.
  if (!settings.dry) stream.clock = std::max(stream.clock, work.given);
  if (work.name && until_lost[stream.device] && !--until_lost[stream.device]) lost[stream.device] = true;
  if (!work.name || !(settings.dry || lost[stream.device])) try {
    work.run();
  } catch (...) {
    if (!errors[stream.device]) errors[stream.device] = std::current_exception();
  }
  if (work.name) {
    double start = stream.clock;
    if (settings.dry) {
      start = std::max(start, work.given);
      if (work.engine >= 0) start = engines[stream.device][work.engine].begin(start, work.seconds);
    } else {
      work.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }
    stream.clock = start + work.seconds;
    if (settings.dry) spans.emplace_back(stream.device, stream.id, work.name, start, stream.clock);
  }
  stream.done++;
  depth--;
}

// Do the first `place` pieces of work of a stream, and what they wait for.
inline void run_to(Stream& stream, uint64_t place) {
  Lock lock(machine);
  while (stream.done < place) run_next(stream);
}

inline std::mt19937_64 chance;
inline std::map<std::pair<int, StreamId>, int> haste;  // of each stream, drawn with the seed: some hurry, some never do

// Do some pieces of work of some streams.
inline void run_some() {
  while (chance() % 3 == 0) {
    std::vector<Stream*> candidates;
    for (int device = 0; device < settings.devices; device++)
      for (auto& one : streams[device]) {
        if (one->queue.empty()) continue;
        auto [found, is_new] = haste.try_emplace({one->device, one->id}, 0);
        if (is_new) found->second = std::array{0, 1, 8}[chance() % 3];
        candidates.insert(candidates.end(), found->second, one.get());
      }
    if (candidates.empty()) return;
    run_next(*candidates[chance() % candidates.size()]);
  }
}

inline void enqueue(Stream& stream, Work work) {
  Lock lock(machine);
  if (settings.dry && work.name) host_clock() += settings.costs.launch;
  work.given = settings.dry ? host_clock() : real_clock();
  stream.given++;
  stream.queue.push_back(std::move(work));
  if (depth) return;  // work that is given by work waits, so that the stream does not overtake itself
  if (settings.order == Order::eager) run_to(stream, stream.given);
  if (settings.order == Order::random) run_some();
}

// -- places in the work of a stream --------------------------------------------------------------------------------------

struct Moment {
  Stream* stream = nullptr;
  uint64_t place = 0;
  std::shared_ptr<double> time;  // clock of the stream there
  int of_epoch = epoch;          // clocks that were set to zero since then do not go on from it
  double seconds() const { return time && of_epoch == epoch ? *time : 0; }
};
inline Moment now(Stream& stream) {
  return {&stream, stream.given, nullptr};
}
inline bool passed(const Moment& moment) {
  return moment.stream->done >= moment.place;
}
inline Moment mark(Stream& stream) {
  Lock lock(machine);
  auto time = std::make_shared<double>(0);
  enqueue(stream, {[&stream, time] { *time = stream.clock; }});
  return {&stream, stream.given, time};
}
inline void wait_for(Stream& stream, const Moment& moment) {
  enqueue(stream, {[&stream, moment] {
    run_to(*moment.stream, moment.place);
    stream.clock = std::max(stream.clock, moment.seconds());
  }});
}
// Whether the work is done. Who asks again and again is told so one day.
inline bool query(const Moment& moment) {
  Lock lock(machine);
  check_not_lost(moment.stream->device);
  if (!passed(moment)) run_next(*moment.stream);
  if (settings.dry) {  // the work is done ahead of its time
    host_clock() += settings.costs.launch;
    return passed(moment) && moment.seconds() <= host_clock();
  }
  return passed(moment);
}
inline void host_waits_for(const Moment& moment, const char* what) {
  Lock lock(machine);
  count(std::string("host waits: ") + what);
  run_to(*moment.stream, moment.place);
  host_waits(moment.time ? moment.seconds() : moment.stream->clock);
  check_not_lost(moment.stream->device);
  raise_error(moment.stream->device);
}
inline void synchronize(Stream& stream, const char* what = "stream") {
  Lock lock(machine);
  host_waits_for(now(stream), what);
}
inline void synchronize_device(int device) {
  Lock lock(machine);
  for (size_t number = 0; number < streams[device].size(); number++) synchronize(*streams[device][number], "device");
}

// Lose a device after so many kernels and copies.
inline void lose(int device, int64_t after) {
  Lock lock(machine);
  until_lost[device] = after;
  lost[device] = !after;
}
// Start a device again that was lost. What it was given is gone, and so is the error of a kernel.
inline void start_again(int device) {
  Lock lock(machine);
  for (auto& one : streams[device]) run_to(*one, one->given);
  lost[device] = false;
  until_lost[device] = 0;
  errors[device] = nullptr;
}

// Start again with another order and seed, all clocks at zero. What was given before is done first.
inline void set_order(Order order, uint64_t seed) {
  Lock lock(machine);
  for (int device = 0; device < settings.devices; device++) synchronize_device(device);
  settings.order = order;
  chance.seed(seed);
  haste.clear();
  for (auto& of_device : streams)
    for (auto& one : of_device) one->clock = 0;
  for (auto& pair : engines) pair[0] = pair[1] = {};
  latest_host = 0;
  epoch++;
  spans.clear();
}

} // namespace late
