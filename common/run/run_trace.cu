#include <algorithm>
#include <iostream>
#include <iterator>

#include "device/cuda.h"
#include "run/program.h"
#include "run/run_trace.h"

namespace pentatron {

void RunTrace::start() {
  if (is_modelled()) trace::start();
  origin_ = now();
}

void RunTrace::begin_step(int64_t step) {
  trace::here = {.step = step};
  const bool is_traced = step + 1 == options_.steps && (!options_.trace.empty() || options_.profile);
  if (!is_traced || is_modelled()) return;
  peers().largest({0});  // all ranks meet here, so their traces begin together
  trace::start();
}

std::optional<trace::Overlap> RunTrace::end_step(int64_t step, double begin, double seconds) {
  if (!is_modelled()) return {};
  step_begin_ = begin - origin_;
  step_end_ = step_begin_ + seconds;
  // What was taken may run across the border of two steps, or in the next one, which has been issued.
  std::erase_if(last_step_, [&](const trace::Interval& i) { return i.end <= step_begin_ && i.step < step; });
  std::ranges::move(trace::take(), std::back_inserter(last_step_));
  const trace::Overlap mine = trace::overlap_of(last_step_, step_begin_, step_end_);
  const bool is_second = ++ended_ == 2;
  if (is_second) overlap_ = {};  // leaves out the first one
  overlap_ += mine;
  const trace::Overlap::Stream communication = mine.all_communication();
  const std::vector<double> sums = peers().sum({mine.compute, communication.seconds, communication.hidden});
  const double ranks = peers().ranks();
  return trace::Overlap{mine.seconds, sums[0] / ranks, {{"", {sums[1] / ranks, sums[2] / ranks}}}};
}

void RunTrace::stop() { trace::stop(); }

void RunTrace::show(int64_t last_step) {
  const bool is_first = peers().rank() == 0;
  if (is_first && step_end_ > step_begin_) {
    constexpr int width = 96;  // characters
    std::cout << "\nThe last step of rank 0: f forward, b backward, w weight gradients, o the rest, "
                 "# communication (+ under half), . an eighth or less\n"
              << trace::draw_timeline(last_step_, step_begin_, step_end_, width);
  }
  if (!is_modelled()) last_step_ = trace::take();
  std::erase_if(last_step_, [&](const trace::Interval& i) { return i.step != last_step; });
  if (options_.profile && is_first && !last_step_.empty()) trace::print_profile(std::cout, last_step_);
  if (!options_.trace.empty()) {
    const std::vector<std::string> events =
        peers().gather(trace::chrome_events(last_step_, peers().rank(), peers().stands_for()));
    require_written("--trace", options_.trace, !is_first || trace::write_chrome(options_.trace, events));
  }
}

}  // namespace pentatron
