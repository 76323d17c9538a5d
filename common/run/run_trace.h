// What a run does with its trace. With modelled time it finds for each step how much communication hid behind
// compute. At the end it shows the last step: a picture, --profile, --trace.
#pragma once

#include <optional>
#include <vector>

#include "clock/timeline.h"
#include "options/options.h"

namespace pentatron {

class RunTrace {
 public:
  explicit RunTrace(const Options& options) : options_(options) {}

  // All ranks call these. Steps count from 0, times are seconds of now().
  // With modelled time every step is recorded; else only the last one, if an option asks for it.
  void start();
  void begin_step(int64_t step);  // before its work is issued
  // With modelled time: the overlap of this step, which took `seconds` from `begin` on; the mean of all
  // ranks.
  std::optional<trace::Overlap> end_step(int64_t step, double begin, double seconds);
  void stop();
  // The overlap on this rank: the sum of all steps but the first one, which waits for nothing that a step
  // before it left running. If there is no other, it is that of the first one.
  const trace::Overlap& overlap() const { return overlap_; }
  void show(int64_t last_step);  // throws RunError if --trace can not be written

 private:
  const Options& options_;
  double origin_ = 0;  // when the trace began: intervals and the following times count from there
  double step_begin_ = 0, step_end_ = 0;  // of the last step that has ended
  int ended_ = 0;                         // steps
  trace::Overlap overlap_;
  std::vector<trace::Interval> last_step_;
};

}  // namespace pentatron
