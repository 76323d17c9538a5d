#include <cxxabi.h>
#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iomanip>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>
#include <set>

#include "device/cuda.h"
#include "device/trace.h"

namespace pentatron::trace {
namespace {

constexpr size_t most_recorded = 250'000;  // operations; a viewer can still show so many
bool recording = false;
std::map<cudaStream_t, std::string> stream_names;

// "void pentatron::rmsnorm_forward_kernel<float>(float*)" -> "rmsnorm_forward_kernel"
// A kernel for tensor cores is a template parameter of what runs its warps (kernels/tensor_core.h).
std::string unqualified(std::string name) {
  const size_t kernel = name.find("_kernel<");
  name = name.substr(0, kernel != name.npos ? kernel + 7 : name.find_first_of("(<"));
  return name.substr(name.find_last_of(": (&") + 1);
}

}  // namespace

void name_stream(cudaStream_t stream, std::string name) { stream_names[stream] = std::move(name); }

// ---- With a GPU: two events for each range ----------------------------------------------------------------

#ifndef CUDA_CPU
namespace {

struct Recorded {
  Interval interval;
  cudaStream_t stream;
  cudaEvent_t begin, end;
};
cudaEvent_t origin = nullptr;  // time zero
std::vector<Recorded> recorded;

cudaEvent_t record_event(cudaStream_t stream) {
  cudaEvent_t event;
  CUDA_CHECK(cudaEventCreate(&event));
  CUDA_CHECK(cudaEventRecord(event, stream));
  return event;
}

double seconds_since_origin(cudaEvent_t event) {
  float milliseconds = 0;
  CUDA_CHECK(cudaEventElapsedTime(&milliseconds, origin, event));
  CUDA_CHECK(cudaEventDestroy(event));
  return milliseconds * 1e-3;
}

}  // namespace

void start() {
  recorded.clear();
  cudaStream_t idle;
  CUDA_CHECK(cudaStreamCreateWithFlags(&idle, cudaStreamNonBlocking));
  origin = record_event(idle);
  CUDA_CHECK(cudaStreamDestroy(idle));
  recording = true;
}

void stop() { recording = false; }

Range::Range(cudaStream_t stream, const char* name, const Cost& cost) : stream_(stream), name_(name) {
  nvtxRangePushA(name);
  declared_costs += cost;
  if (!recording || recorded.size() == most_recorded) return;
  interval_ = static_cast<int>(recorded.size());
  Interval interval{here};
  interval.name = name, interval.bytes = cost.bytes;
  recorded.push_back({interval, stream, record_event(stream), nullptr});
}

Range::~Range() {
  if (interval_ >= 0) recorded[interval_].end = record_event(stream_);
  nvtxRangePop();
}

std::vector<Interval> take() {
  CUDA_CHECK(cudaDeviceSynchronize());
  std::vector<Interval> result;
  for (Recorded& r : recorded) {
    r.interval.stream = stream_names[r.stream];
    r.interval.begin = seconds_since_origin(r.begin);
    r.interval.end = seconds_since_origin(r.end);
    result.push_back(std::move(r.interval));
  }
  recorded.clear();
  return result;
}

// ---- Without: what the stand-in has counted ---------------------------------------------------------------

#else
namespace {

int64_t origin = 0;                        // time zero, in nanoseconds
std::vector<cuda_cpu::Description> outer;  // of the ranges that are open

}  // namespace

void start() {
  cuda_cpu::take_activities();
  origin = cuda_cpu::clock();
  recording = true;
  cuda_cpu::set_labeller([](const char* name) { return Label{here, name}; });
}

void stop() {
  recording = false;
  cuda_cpu::set_labeller(nullptr);
}

Range::Range(cudaStream_t stream, const char* name, const Cost& cost) : stream_(stream), name_(name) {
  declared_costs += cost;
  cuda_cpu::Description description;
  description.nanoseconds = cuda_cpu::nanoseconds(cuda_cpu::profile().seconds(cost));
  if (recording) description.label = {here, name, cost.bytes};
  outer.push_back(cuda_cpu::describe(description));
}

Range::~Range() {
  cuda_cpu::describe(outer.back());
  outer.pop_back();
}

std::vector<Interval> take() {
  std::vector<Interval> result;
  for (const cuda_cpu::Activity& a : cuda_cpu::take_activities()) {
    const auto seconds = [](int64_t time) { return static_cast<double>(time - origin) * 1e-9; };
    Interval i{a.label};  // its position
    i.name = a.label.name, i.stream = stream_names[a.stream], i.bytes = a.label.bytes;
    i.begin = seconds(a.begin), i.end = seconds(a.end), i.id = a.id, i.waited_for = a.waited_for;
    for (const cuda_cpu::Activity::Message& m : a.messages) {
      (m.sent ? i.sent : i.received).push_back(m.number);
      if (m.sent && i.name == "group") i.bytes += m.bytes;
    }
    result.push_back(std::move(i));
  }
  return result;
}

#endif

// ---- What is made of it -----------------------------------------------------------------------------------

const char* kernel_name(const void* kernel) {
  static std::map<const void*, std::string> names;
  auto [entry, is_new] = names.try_emplace(kernel);
  if (is_new) {
    const char* mangled = "kernel";
    if (cudaFuncGetName(&mangled, kernel) != cudaSuccess) cudaGetLastError();
    int status = -1;
    char* demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
    entry->second = unqualified(status == 0 ? demangled : mangled);
    std::free(demangled);
  }
  return entry->second.c_str();
}

void print_profile(std::ostream& out, const std::vector<Interval>& intervals) {
  struct Total {
    int64_t calls = 0;
    double seconds = 0;
  };
  std::map<std::string, Total> by_name;
  double all = 0, products = 0;
  std::map<char, double> by_pass;
  std::set<std::pair<int64_t, int>> micro_batches;
  for (const Interval& i : intervals) {
    if (i.stream == compute_stream && i.micro_batch >= 0) {
      by_pass[i.pass] += i.end - i.begin;
      micro_batches.insert({i.step, i.micro_batch});
    }
    Total& total = by_name[i.name];
    total.calls += 1;
    total.seconds += i.end - i.begin;
    all += i.end - i.begin;
    if (i.name.starts_with("gemm")) products += i.end - i.begin;
  }
  std::vector<std::pair<std::string, Total>> rows(by_name.begin(), by_name.end());
  std::ranges::sort(rows, std::greater(), [](const auto& row) { return row.second.seconds; });

  out << std::fixed << "\nTime by kernel                           calls      all, ms    each, us   share\n";
  for (const auto& [name, total] : rows) {
    out << std::left << std::setw(36) << name << std::right << std::setw(10) << total.calls << std::setw(12)
        << std::setprecision(2) << total.seconds * 1e3 << std::setw(12) << total.seconds * 1e6 / total.calls
        << std::setw(8) << std::setprecision(1) << 100 * total.seconds / all << " %\n";
  }
  out << "Share of the products (cuBLAS): " << 100 * products / all << " %\n";
  if (micro_batches.empty()) return;
  const auto of_each = [&](char pass) {
    return 1e3 * by_pass[pass] / static_cast<double>(micro_batches.size());
  };
  out << "A micro-batch computes " << of_each('f') << " ms forward, " << of_each('b') << " ms backward";
  if (by_pass.contains('w')) out << ", " << of_each('w') << " ms weight gradients on their own";
  out << '\n';
}

std::string chrome_events(const std::vector<Interval>& intervals, int rank) {
  auto events = nlohmann::json::array();
  std::map<std::string, int> rows;
  std::map<uint64_t, const Interval*> by_id;
  const auto row_of = [&](const Interval& i) {
    return rows.try_emplace(i.stream, static_cast<int>(rows.size())).first->second;
  };
  const auto event = [&](const char* phase, const std::string& name, const Interval& i, double time) {
    return nlohmann::json{
        {"ph", phase}, {"name", name}, {"pid", rank}, {"tid", row_of(i)}, {"ts", time * 1e6}};
  };
  // One end of an arrow. A viewer joins ends of the same id.
  const auto arrow = [&](const Interval& i, double time, bool from, const std::string& id) {
    events.push_back(event(from ? "s" : "f", "order", i, time));
    events.back().update({{"bp", "e"}, {"cat", "order"}, {"id", id}});
  };
  const size_t shown = std::min(intervals.size(), most_recorded);
  for (size_t n = 0; n < shown; ++n) by_id[intervals[n].id] = &intervals[n];
  for (size_t n = 0; n < shown; ++n) {
    const Interval& i = intervals[n];
    nlohmann::json arguments = {{"bytes", i.bytes}, {"pass", std::string(1, i.pass)}};
    if (i.step >= 0) arguments["step"] = i.step + 1;
    if (i.micro_batch >= 0) arguments["micro_batch"] = i.micro_batch;
    if (i.layer >= 0) arguments["layer"] = i.layer;
    events.push_back(event("X", i.name, i, i.begin));
    events.back().update({{"dur", (i.end - i.begin) * 1e6}, {"args", arguments}});
    for (const uint64_t message : i.sent) arrow(i, i.begin, true, "message " + std::to_string(message));
    for (const uint64_t message : i.received) arrow(i, i.end, false, "message " + std::to_string(message));
    const auto other = by_id.find(i.waited_for);
    if (i.waited_for == 0 || other == by_id.end()) continue;
    const std::string id = "wait " + std::to_string(rank) + " " + std::to_string(i.id);
    arrow(*other->second, other->second->end, true, id);
    arrow(i, i.begin, false, id);
  }
  for (const auto& [stream, row] : rows) {
    events.push_back(
        {{"ph", "M"}, {"name", "thread_name"}, {"pid", rank}, {"tid", row}, {"args", {{"name", stream}}}});
  }
  events.push_back(
      {{"ph", "M"}, {"name", "process_name"}, {"pid", rank}, {"args", {{"name", rank_name(rank)}}}});
  return events.dump();
}

void write_chrome(const std::string& path, const std::vector<std::string>& events) {
  std::ofstream file(path);
  file << "{\"traceEvents\":[";
  for (const std::string& of_rank : events) {
    file << (&of_rank == &events.front() ? "" : ",\n")
         << of_rank.substr(1, of_rank.size() - 2);  // without brackets
  }
  file << "]}" << std::endl;
  if (!file) fail("--trace", ("cannot write " + path + "; is the disk full?").c_str(), __FILE__, __LINE__);
}

}  // namespace pentatron::trace
