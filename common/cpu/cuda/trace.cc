// The operations of device/trace.h: the time that the stand-in counts for each, and the label that it keeps
// of it.
#include "device/trace.h"

#include <map>

#include "cuda_cpu.h"

namespace pentatron::trace {
namespace {

bool recording = false;
std::map<cudaStream_t, std::string> stream_names;
int64_t origin = 0;                        // time zero, in nanoseconds
std::vector<cuda_cpu::Description> outer;  // of the operations that are open

}  // namespace

void name_stream(cudaStream_t stream, std::string name) { stream_names[stream] = std::move(name); }

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

Operation::Operation(cudaStream_t stream, const char* name, const Cost& cost) : stream_(stream), name_(name) {
  declared_costs += cost;
  cuda_cpu::Description description;
  description.nanoseconds = cuda_cpu::nanoseconds(cuda_cpu::profile().seconds(cost));
  if (recording) description.label = {here, name, cost.bytes};
  outer.push_back(cuda_cpu::describe(description));
}

Operation::~Operation() {
  cuda_cpu::describe(outer.back());
  outer.pop_back();
}

std::vector<Interval> take() {
  std::vector<Interval> result;
  for (const cuda_cpu::Activity& a : cuda_cpu::take_activities()) {
    const auto seconds = [](int64_t time) { return static_cast<double>(time - origin) * 1e-9; };
    Interval i{a.label};  // its position
    i.name = a.label.name;
    i.stream = stream_names[a.stream];
    i.bytes = a.label.bytes;
    i.begin = seconds(a.begin);
    i.end = seconds(a.end);
    i.id = a.id;
    i.waited_for = a.waited_for;
    for (const Message& m : a.messages) {
      (m.sent ? i.sent : i.received).push_back(m.number);
      if (m.sent && i.name == "group") i.bytes += m.bytes;
    }
    result.push_back(std::move(i));
  }
  return result;
}

}  // namespace pentatron::trace
