#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <sstream>

#include "checkpoint/preemption.h"
#include "run/entropy.h"
#include "run/program.h"

namespace pentatron {
namespace {

// What is taken of this rank's GPU, without the tensors; 0 where others use it, too, or where there is none.
size_t measured_libraries() {
  if (is_modelled() || processes_of_device > 1) return 0;
  size_t free = 0, total = 0;
  CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return total - free - sum_of(memory_in_use());
}

void print_banner(const Options& options, const TokenData& data, int64_t parameters, int ranks, int present,
                  const std::string& hosts) {
  const ModelConfig& m = options.model;
  const cudaDeviceProp device = this_device();
  std::printf("device      %s, %s, %d rank%s", device.name, precision_name, ranks, ranks == 1 ? "" : "s");
  if (present < ranks) std::printf(", of which %d are there and stand for all", present);
  std::printf("\n");
  const auto print_lines = [](const char* label, const std::string& text) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) std::printf("%-11s %s\n", label, line.c_str());
  };
  print_lines("host", hosts);
  if (is_modelled()) {
    std::printf("time        modelled for %s GPUs; %s\n", modelled_gpu().c_str(),
                is_dry_run() ? "a dry run: nothing is computed" : "the losses are computed");
    if (PRECISION == 16 && options.attention != Attention::tensor_core)
      print_lines("attention", slow_heads(m.head_size()));
  }
  std::printf("model       %s: %d layers, width %d, %d heads (%d kv), MLP %d, vocabulary %d: %s parameters\n",
              m.name.c_str(), m.layers, m.d_model, m.heads, m.kv_heads, m.d_ff, m.vocab_size,
              human_count(parameters).c_str());
  print_lines("model", m.remarks);
  std::printf("data        %s: %s tokens, unigram entropy %.3f nats a token\n", options.data.c_str(),
              human_count(data.size()).c_str(), unigram_entropy(data));
  std::printf("batch       %d sequences of %d tokens, %d at a time, %d steps\n", options.global_batch_size,
              options.sequence_length, options.micro_batch_size, options.steps);
  std::printf("optimizer   %s, lr %g after %d steps, attention %s, recompute %s\n\n",
              to_string(options.optimizer).c_str(), options.lr, options.warmup_steps,
              to_string(options.attention).c_str(), to_string(options.recompute).c_str());
  std::fflush(stdout);
}

}  // namespace

int run_program(const std::function<void()>& program) try {
  set_work_queues();
  try {
    program();
  } catch (const HelpRequest& help) {
    if (peers().rank() == 0) std::cout << help.what();
  }
  std::fflush(stdout);
  require_written("stdout", "what was printed", std::ferror(stdout) == 0);
  return 0;
} catch (const UsageError& error) {
  // Usually all ranks find the same fault, and rank 0 prints it. A rank that finds one alone prints it and
  // ends the others.
  constexpr double patience = 3;  // seconds
  const bool all = peers().all_arrive(patience);
  if (!all || peers().rank() == 0) std::cerr << error.what() << '\n';
  if (!all) peers().end_all(error.status);
  return error.status;
}

int run_program(int argc, char** argv, std::string_view description, void (*train)(const Options&)) {
  return run_program([&] {
    const auto options = parse_options<Options>(argc, argv, description);
    configure_device(options);
    train(options);
  });
}

void require_written(const std::string& option, const std::string& what, bool written) {
  if (peers().largest({written ? 0.0 : 1.0})[0] > 0)
    throw RunError(option + ": cannot write " + what + "; is the disk full?");
}

size_t free_device_memory() {
  size_t free = 0, total = 0;
  CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return std::min(free, total / processes_of_device);
}

MemoryPrediction require_memory(const MemoryPrediction& predicted, int channels_to_come) {
  const Peers& ranks = peers();
  size_t of_libraries = 0;  // the context of a real GPU is there, and on a CPU nothing of it
  if (is_dry_run()) of_libraries = ranks.library_bytes(channels_to_come);
  if (!is_modelled()) of_libraries = ranks.library_bytes(channels_to_come) - ranks.context_bytes();
  // Ranks may need different amounts, and all refuse together. Some of the memory may have been allocated.
  const double needed = sum_of(predicted.total()), there = free_device_memory() + sum_of(memory_in_use());
  const std::vector<double> most =
      ranks.largest({needed + of_libraries - there, needed, double(of_libraries), -there});
  const double lack = most[0], total = most[1], libraries = most[2], available = -most[3];
  if (lack <= 0) return predicted;
  const std::string needs = human_bytes(total) + ", and CUDA and NCCL about " + human_bytes(libraries);
  if (is_dry_run()) {
    throw RunError("memory: a rank needs " + needs + "; the modelled " + modelled_gpu() + " has " +
                   human_bytes(available));
  }
  throw UsageError("--model, --micro-batch-size, --seq-len",
                   "a run that needs " + (libraries > 0 ? needs : human_bytes(total)),
                   "at most the " + human_bytes(available) + " of device memory that are free");
}

double flops_per_token(const TrainingConfig& training) {
  const ModelConfig& m = training.model;
  const double in_products =
      static_cast<double>(active_parameter_count(m) - int64_t{m.vocab_size} * m.d_model);
  return 6 * in_products + 12.0 * m.layers * m.d_model * training.sequence_length;
}

Run::Run(const Options& options, const TokenData& data, const Parameters& parameters, StepTotals& totals,
         Checkpoint& checkpoint)
    : options_(options),
      trained_(parameters),
      totals_(totals),
      checkpoint_(checkpoint),
      step_(checkpoint.first_step() - 1) {
  if (!options.save.empty()) listen_for_preemption();
  check_work_queues(static_cast<int>(peers_.largest({static_cast<double>(streams_in_use)})[0]));
  const std::string hosts = peers_.hosts();
  const auto present = static_cast<int>(peers_.gather("").size());  // known on rank 0
  if (peers_.rank() == 0) {
    log_.emplace(std::cout,
                 RunLog::Config{options.log_json, options.steps, options.log_every, flops_per_token(options),
                                peak_flops(sizeof(real)), peers_.ranks()});
    log_->begin(options.as_json, precision_name);
    print_banner(options, data, parameters.global_size(), peers_.ranks(), present, hosts);
  }
  peers_.begin_counting();
  peers_.largest({0});  // all ranks meet here, so their times begin together
  trace_.start();
  begin_ = now();
  wall_begin_ = std::chrono::steady_clock::now();
}

bool Run::next_step() {
  if (step_ >= checkpoint_.first_step()) end_step();
  if (preempted_ || step_ + 1 >= options_.steps) {
    while (!issued_.empty()) log_step();
    checkpoint_.finish();
    return false;
  }
  ++step_;
  trace_.begin_step(step_);
  totals_.reset();
  return true;
}

void Run::end_step() {
  totals_.send(trained_.loss_scale());
  const double memory = static_cast<double>(sum_of(memory_peak()));
  issued_.push_back({step_, memory, sent_bytes(peers_.traffic())});
  // A save waits for the device anyway. So what is saved has been logged, and has no NaN in it.
  while (issued_.size() > (checkpoint_.is_due(step_) ? 0 : 1)) log_step();
  checkpoint_.after_update(step_);
}

// The line has the loss and the norm of the first rank where one of them is NaN or infinite. Rank 0 prints it
// (run_program_on_ranks).
void Run::end_at(int64_t step, bool is_finite) {
  CUDA_CHECK(cudaDeviceSynchronize());  // the next step has been issued, and needs what ends with the run
  const auto word = [](double x) { return std::isnan(x) ? "nan" : text(x); };  // without its sign
  std::string words = "step " + std::to_string(step + 1) + ": the loss is " + word(totals_.host_loss()) +
                      ", the gradient norm " + word(totals_.host_norm());
  const std::vector<std::string> all = peers_.gather(is_finite ? "" : words);
  std::vector<std::string> names;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty()) continue;
    if (names.empty()) words = all[rank];
    names.push_back(rank_name(static_cast<int>(rank)));
  }
  if (names.size() < all.size()) words += ", on " + join(names, ", ") + " alone";
  throw RunError(words);
}

void Run::log_step() {
  const Issued issued = issued_.front();
  issued_.pop_front();
  totals_.receive();
  const double seconds = totals_.ended().time - begin_;
  const std::chrono::duration<double> wall = totals_.ended().wall - wall_begin_;
  const bool is_finite = is_dry_run() || has_loss_scale ||
                         (std::isfinite(totals_.host_loss()) && std::isfinite(totals_.host_norm()));
  const std::vector<double> largest =
      peers_.largest({seconds, issued.memory, issued.sent - sent_bytes_, wall.count(),
                      static_cast<double>(is_preempted()), is_finite ? 0.0 : 1.0});
  preempted_ = largest[4] > 0;  // on all ranks after the same step, whichever of them was asked
  sent_bytes_ = issued.sent;
  wall_seconds_ += largest[3];
  final_loss_ = totals_.host_loss();
  StepRecord record{.step = issued.step + 1,
                    .loss = final_loss_,
                    .grad_norm = totals_.host_norm(),
                    .lr = learning_rate(options_, issued.step),
                    .tokens = int64_t{options_.global_batch_size} * options_.sequence_length,
                    .seconds = largest[3],
                    .memory_peak = static_cast<size_t>(largest[1]),
                    .comm_bytes = static_cast<size_t>(largest[2] + 0.5),
                    .computed = !is_dry_run()};
  if (trained_.loss_scale() != nullptr) {
    const LossScale scale = totals_.host_loss_scale();
    record.scale = {scale.factor, static_cast<int64_t>(scale.skipped)};
  }
  record.modelled = trace_.end_step(issued.step, begin_, largest[0]);
  if (log_) log_->step(record);
  if (largest[5] > 0) end_at(issued.step, is_finite);
  begin_ += largest[0];
  wall_begin_ = totals_.ended().wall;
}

void Run::summarize(const MemoryPrediction& predicted,
                    const std::vector<std::pair<std::string, int>>& layout) {
  trace_.stop();
  const RankMemory memory = {predicted, memory_peak(), peers_.library_bytes(0), measured_libraries()};
  const std::vector<std::string> reports = peers_.gather(
      to_text({memory, peers_.traffic(), trace_.overlap(), peers_.rank(), peers_.stands_for()}));
  if (log_) {
    Summary summary{layout, trained_.global_size(), final_loss_, wall_seconds_, {}};
    for (const std::string& report : reports) summary.ranks.push_back(rank_report(report));
    log_->summary(summary);
  }
  trace_.show(step_);
  require_written("--log-json", options_.log_json, !log_ || log_->is_written());
  compare_weights(trained_, step_ + 1);
  if (preempted_ && step_ + 1 < options_.steps) {
    throw RunError("a signal ended the run after step " + std::to_string(step_ + 1) + " of " +
                       std::to_string(options_.steps) + "; with --save " + options_.save +
                       " --resume it goes on",
                   exit_preempted);
  }
}

void Run::show_sample(const std::string& text) const {
  if (log_ && !text.empty()) std::cout << "\nThe model writes:\n" << printable(text) << '\n';
}

}  // namespace pentatron
