#include <cxxabi.h>
#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iomanip>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>

#include "device/cuda.h"
#include "device/trace.h"

namespace pentatron::trace {
namespace {

struct Recorded {
  const char* name;
  cudaStream_t stream;
  cudaEvent_t begin, end;
};

constexpr size_t most_recorded = 250'000;  // operations: that many rows a viewer can still show
bool recording = false;
cudaEvent_t origin = nullptr;  // time zero
std::vector<Recorded> recorded;
std::map<cudaStream_t, std::string> stream_names;

cudaEvent_t record_event(cudaStream_t stream) {
  cudaEvent_t event;
  CUDA_CHECK(cudaEventCreate(&event));
  CUDA_CHECK(cudaEventRecord(event, stream));
  return event;
}

double seconds_since_origin(cudaEvent_t event) {
  float milliseconds = 0;
  CUDA_CHECK(cudaEventElapsedTime(&milliseconds, origin, event));
  return milliseconds * 1e-3;
}

// "void pentatron::rmsnorm_forward_kernel<float>(float*)" -> "rmsnorm_forward_kernel"
std::string unqualified(std::string name) {
  name = name.substr(0, name.find_first_of("(<"));
  return name.substr(name.find_last_of(": ") + 1);
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

void name_stream(cudaStream_t stream, std::string name) { stream_names[stream] = std::move(name); }

Range::Range(cudaStream_t stream, const char* name) : stream_(stream), name_(name) {
  nvtxRangePushA(name);
  if (!recording || recorded.size() == most_recorded) return;
  interval_ = static_cast<int>(recorded.size());
  recorded.push_back({name, stream, record_event(stream), nullptr});
}

Range::~Range() {
  if (interval_ >= 0) recorded[interval_].end = record_event(stream_);
  nvtxRangePop();
}

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

std::vector<Interval> intervals() {
  CUDA_CHECK(cudaDeviceSynchronize());
  std::vector<Interval> result;
  for (const Recorded& r : recorded) {
    result.push_back(
        {r.name, stream_names[r.stream], seconds_since_origin(r.begin), seconds_since_origin(r.end)});
  }
  return result;
}

void print_profile(std::ostream& out) {
  struct Total {
    std::string name;
    int64_t calls = 0;
    double seconds = 0;
  };
  std::map<std::string, Total> by_name;
  double all = 0, products = 0;
  for (const Interval& i : intervals()) {
    Total& total = by_name[i.name];
    total.name = i.name;
    total.calls += 1;
    total.seconds += i.end - i.begin;
    all += i.end - i.begin;
    if (i.name.starts_with("gemm")) products += i.end - i.begin;
  }
  std::vector<Total> totals;
  for (const auto& [name, total] : by_name) totals.push_back(total);
  std::sort(totals.begin(), totals.end(),
            [](const Total& a, const Total& b) { return a.seconds > b.seconds; });

  const auto row = [&](const std::string& name, int64_t calls, double seconds) {
    out << std::left << std::setw(36) << name << std::right << std::setw(10) << calls << std::setw(12)
        << std::setprecision(2) << seconds * 1e3 << std::setw(12) << seconds * 1e6 / calls << std::setw(8)
        << std::setprecision(1) << 100 * seconds / all << " %\n";
  };
  out << std::fixed << "\nTime by kernel                           calls      all, ms    each, us   share\n";
  for (const Total& total : totals) row(total.name, total.calls, total.seconds);
  out << "Share of the products (cuBLAS): " << 100 * products / all << " %\n";
}

std::string chrome_events(int rank) {
  auto events = nlohmann::json::array();
  std::map<std::string, int> rows;
  for (const Interval& i : intervals()) {
    const int row = rows.try_emplace(i.stream, static_cast<int>(rows.size())).first->second;
    events.push_back({{"ph", "X"},
                      {"name", i.name},
                      {"pid", rank},
                      {"tid", row},
                      {"ts", i.begin * 1e6},
                      {"dur", (i.end - i.begin) * 1e6}});
  }
  for (const auto& [stream, row] : rows) {
    events.push_back(
        {{"ph", "M"}, {"name", "thread_name"}, {"pid", rank}, {"tid", row}, {"args", {{"name", stream}}}});
  }
  events.push_back({{"ph", "M"},
                    {"name", "process_name"},
                    {"pid", rank},
                    {"args", {{"name", "rank " + std::to_string(rank)}}}});
  return events.dump();
}

void write_chrome(const std::string& path, const std::vector<std::string>& events) {
  std::ofstream file(path);
  file << "{\"traceEvents\":[";
  for (const std::string& of_rank : events) {
    file << (&of_rank == &events.front() ? "" : ",\n")
         << of_rank.substr(1, of_rank.size() - 2);  // without brackets
  }
  file << "]}\n";
}

}  // namespace pentatron::trace
