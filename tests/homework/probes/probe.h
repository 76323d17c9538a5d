// What the probes of the exercises share. A probe calls a body with inputs that make its answer readable, and
// tells the first thing that is wrong in one line, "hint: ...". observe.py builds and runs them.
//
//   sums      contributor c adds 16^c: each hexadecimal digit of a sum says how often one was counted
//   copies    a value is its owner and its place
//   waits     in virtual time each operation has a begin and an end: who does not wait begins too early
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "clock/device_profile.h"
#include "cuda_cpu.h"
#include "device/errors.h"
#include "device/kernel.h"
#include "device/tensor.h"
#include "mpi/mpi_tests.h"
#include "ranks/comm.h"

namespace pentatron::probes {

// A stream that waits must hold up no other one, and a case hangs after 20 s.
inline const int settings =
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1) + setenv("TEST_CASE_TIMEOUT", "20", 0);

inline std::string number(int64_t n) { return std::to_string(n); }
inline std::string rank_name(int rank) { return "rank " + number(rank); }
inline std::string here() { return rank_name(mpi_tests::rank()) + ": "; }

// What follows, as the hint of a body that hangs or ends the process in it. "right alone" says that an
// exercise is right without those behind it. If one of them is not written yet, that has to do.
void doing(const auto&... words) {
  if (mpi_tests::rank() == 0) std::printf("doing: %s\n", text(words...).c_str());
  std::fflush(stdout);
}

inline void stop(int teller, const std::string& wrong) {
  if (teller == mpi_tests::rank()) std::printf("hint: %s\n", wrong.c_str());
  std::fflush(stdout);
  FAIL("told");
}
// All ranks call it, with what is wrong on theirs or nothing. The first one that has something tells it.
inline void tell(const std::string& wrong) {
  const std::vector<double> all = mpi_tests::all_gather(wrong.empty() ? 0 : 1);
  CHECK(wrong.empty());
  const auto first = std::ranges::find(all, 1) - all.begin();
  if (first < mpi_tests::ranks()) stop(static_cast<int>(first), wrong);
}
void tell_if(bool wrong, const auto&... words) { tell(wrong ? text(words...) : ""); }
// The same of what is wrong on all ranks or on none, without asking the others.
void tell_alike(bool wrong, const auto&... words) {
  if (wrong) stop(0, text(words...));
  SUCCEED();
}

// ---- Sums

constexpr double untouched = -2;  // memory before a result comes

// Contributors are ranks, or with several parts of each (micro-batches, say) rank + ranks * part. `counted`:
// those who shall add up to the sum; empty: all.
struct Sum {
  int parts = 1;
  std::vector<int> counted = {};
  std::string part = "micro-batch";
  int ranks = mpi_tests::ranks();
  std::function<std::string(int64_t)> place_name = [](int64_t place) { return "element " + number(place); };

  int contributors() const { return ranks * parts; }
  bool counts(int c) const { return counted.empty() || std::ranges::find(counted, c) != counted.end(); }
  double value(int contributor, int64_t place) const {
    return std::ldexp(1, 4 * contributor) + std::ldexp(static_cast<double>(place), 4 * contributors());
  }
  std::string name(int contributor) const {
    const std::string of = parts == 1 ? "" : "'s " + part + " " + number(contributor / ranks);
    return rank_name(contributor % ranks) + of;
  }

  // What is wrong with the sum of the contributors' values of this place; empty: nothing.
  std::string wrong(double found, int64_t place) const {
    if (std::isnan(found)) return "was never written";
    int64_t divided = 1;  // by so much, at most
    while (divided < 16 && std::abs(std::remainder(found * divided, 1)) > 1e-6 * divided) ++divided;
    int64_t digits = std::llround(found * divided);
    std::vector<int64_t> times;
    for (int c = 0; c < contributors(); ++c, digits /= 16) times.push_back(digits % 16);
    const auto all = std::accumulate(times.begin(), times.end(), int64_t{0});
    const bool equal = all == times[0] * contributors();
    if (equal && divided > 1) return "is divided by " + number(divided) + ": a sum is asked for, no mean";
    const auto often = [&](int64_t n) {
      if (divided > 1) return number(n) + "/" + number(divided) + " times";
      return n > 2 ? number(n) + " times" : std::string(n == 0 ? "never" : n == 1 ? "once" : "twice");
    };
    std::string has, due;
    bool once = true;
    for (int c = 0; c < contributors(); ++c) {
      const bool right = times[c] == counts(c), few = contributors() <= 4 || divided > 1;
      once = once && right;
      if (!counted.empty() && counts(c) && few)
        due += (due.empty() ? ", and should have " : " and ") + name(c);
      const auto of_part = times.begin() + c / ranks * ranks;
      const bool alike = parts > 1 && std::equal(of_part + 1, of_part + ranks, of_part);
      if ((alike && c % ranks > 0) || (right && !few)) continue;
      has += (has.empty() ? "" : ", ") +
             (alike ? "every rank's " + part + " " + number(c / ranks) : name(c)) + " " + often(times[c]) +
             (few || counts(c) ? "" : ", who should not be in it");
    }
    if (divided > 1) return "is divided on its way: it has " + has;
    const bool other_place = digits != all * place;
    if (once && other_place)
      return "is the sum of each rank's " + place_name(digits / std::max<int64_t>(all, 1)) +
             ", and should be of " + place_name(place);
    if (once) return "";
    has = "has " + has + due;
    if (all == 1 && counted.size() != 1) return has + ": nothing was added to it";
    if (equal && times[0] == ranks) return has + ": what was a sum already was summed again";
    if (parts > 1 && all == ranks && std::count(times.end() - ranks, times.end(), 1) == ranks)
      return has + ": what came last has taken the place of what was there";
    return has + (other_place ? ", and of other elements: what came was added in another place" : "");
  }
  // The first element that is wrong in `data`, whose places begin at `place`.
  std::string wrong(const std::string& what, const auto& data, int64_t place = 0) const {
    for (size_t i = 0; i < data.size(); ++i) {
      const std::string is = wrong(data[i], place + static_cast<int64_t>(i));
      if (!is.empty())
        return here() + what + ", element " + number(i) + " of " + number(data.size()) + ", " + is;
    }
    return "";
  }
  // What one contributor adds to so many elements.
  std::vector<accum> values(int contributor, size_t size, int64_t place = 0) const {
    std::vector<accum> all(size);
    for (size_t i = 0; i < size; ++i) all[i] = value(contributor, place + static_cast<int64_t>(i));
    return all;
  }
};

// ---- Copies

// A value that is its owner and its place in the owner's array.
inline double owned(int owner, int64_t place) { return 1000.0 * owner + static_cast<double>(place); }
template <class T>
std::vector<T> owned_values(int owner, size_t size, int64_t place = 0) {
  std::vector<T> all(size);
  for (size_t i = 0; i < size; ++i) all[i] = static_cast<T>(owned(owner, place + static_cast<int64_t>(i)));
  return all;
}

// The first element of `data` that is not owned(owner, place...). `name`: what an owner is called.
std::string wrong_copy(const std::string& what, const auto& data, int owner, int64_t place = 0,
                       const std::function<std::string(int)>& name = rank_name) {
  for (size_t i = 0; i < data.size(); ++i) {
    const auto found = static_cast<double>(data[i]);
    if (found == owned(owner, place + static_cast<int64_t>(i))) continue;
    const std::string begin = here() + what + ", element " + number(i) + " of " + number(data.size()) + ", ";
    if (std::isnan(found) || found == untouched) return begin + "was never written";
    return begin + "is element " + number(std::llround(found) % 1000) + " of " +
           name(static_cast<int>(found / 1000)) + ", and should be element " +
           number(place + static_cast<int64_t>(i)) + " of " + name(owner);
  }
  return "";
}

// ---- Streams

// What lies in device memory when all streams are done.
template <class T>
std::vector<T> at(const T* data, size_t size) {
  std::vector<T> values(size);
  CUDA_CHECK(cudaDeviceSynchronize());
  CUDA_CHECK(cudaMemcpy(values.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}
template <class T>
std::vector<T> at(Matrix<T> x) {
  return at(x.data, x.size());
}
// A stream is busy in virtual time alone (common/clock): for milliseconds, or for as long as `cost` says.
__global__ inline void busy_kernel() {}
inline void busy(cudaStream_t stream, Cost cost = moves(1e10)) { launch(busy_kernel, dim3(1), cost, stream); }
// While it lives, compute's kernels take longer than messages, or messages longer than kernels, in virtual
// time. So who does not wait begins too early.
struct Slow {
  const bool kernels;
  const DeviceProfile gpu = cuda_cpu::profile();
  explicit Slow(bool are_kernels) : kernels(are_kernels) {
    DeviceProfile slow = gpu;
    (kernels ? slow.kernel_seconds : slow.link_latency) = 3e-4;
    slow.ll_bandwidth = 0;  // messages of all sizes have the link's latency
    cuda_cpu::set_profile(slow);
  }
  ~Slow() { cuda_cpu::set_profile(gpu); }
  Slow(const Slow&) = delete;
};
// What the streams did since the last call, in virtual time, by stream and begin. So who waited for whom does
// not depend on the machine. The first call begins it, and returns nothing.
inline std::vector<trace::Interval> ran() {
  static bool started = false;
  if (!started) trace::start();
  started = true;
  return trace::take();
}
// When the first operation of this name (empty: of any) began, and the last one ended; where there is none,
// later than all, and before all.
struct Time {
  double begin = 1e9, end = 0;
};
inline Time time_of(const std::vector<trace::Interval>& all, const std::string& name,
                    const std::string& stream) {
  Time time;
  for (const trace::Interval& i : all) {
    if ((name.empty() || i.name == name) && i.stream == stream)
      time = {std::min(time.begin, i.begin), std::max(time.end, i.end)};
  }
  return time;
}
// When a stream that is busy from now on begins with that, and ends.
inline Time busy_time(cudaStream_t stream, Cost cost = moves(1e10)) {
  ran();
  busy(stream, cost);
  for (const trace::Interval& i : ran()) {
    if (i.name == "busy_kernel") return {i.begin, i.end};
  }
  return {};
}

template <class T>
const std::span<T>& pinned(size_t size) {  // a part of one allocation, as each waits for the device
  static const auto& all = *new PinnedArray<T>(1 << 20);
  static auto& parts = *new std::deque<std::span<T>>;
  static size_t used = 0;
  used += size;
  REQUIRE(used <= all.size());
  return parts.emplace_back(all.data() + used - size, size);
}
template <class T>
void write(cudaStream_t stream, T* data, const std::vector<T>& values) {
  const std::span<T>& from = pinned<T>(values.size());
  std::copy(values.begin(), values.end(), from.data());
  CUDA_CHECK(cudaMemcpyAsync(data, from.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice, stream));
}
template <class T>
const std::span<T>& read(cudaStream_t stream, const T* data, size_t size) {
  const std::span<T>& to = pinned<T>(size);
  CUDA_CHECK(cudaMemcpyAsync(to.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost, stream));
  return to;
}

// Bytes that have been allocated for a purpose since `before`, as elements.
template <class T>
int64_t elements_of(Purpose purpose, const MemoryBytes& before) {
  const auto index = static_cast<size_t>(purpose);
  return static_cast<int64_t>((memory_in_use()[index] - before[index]) / sizeof(T));
}

// Elements that this rank has sent or reduced so far, and calls.
inline Traffic traffic(const Communicator& ranks, const std::string& operation) {
  return ranks.traffic()[operation];
}

// Operations of which none hides the other.
bool apart(const auto& a, const auto& b) { return a.begin >= b.end || b.begin >= a.end; }

// What is told begins with the settings and the call that it is about.
struct About {
  std::string with = "", about = "";
  void calls(const std::string& call, const std::string& does = "") {
    about = call;
    doing(with, call, " ", does);
  }
  void tell_if(bool wrong, const auto&... words) {
    probes::tell_if(wrong, here(), with, about, " ", words...);
  }
};

}  // namespace pentatron::probes
