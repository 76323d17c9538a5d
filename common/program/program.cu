#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <numeric>

#include "program/program.h"

namespace pentatron {
namespace {

void print_banner(const Options& options, const TokenData& data, int64_t parameters, int ranks) {
  const ModelConfig& m = options.model;
  const cudaDeviceProp device = this_device();
  std::printf("device      %s, %s, %d rank%s\n", device.name, precision_name, ranks, ranks == 1 ? "" : "s");
  std::printf("model       %s: %d layers, width %d, %d heads (%d kv), MLP %d, vocabulary %d: %s parameters\n",
              m.name.c_str(), m.layers, m.d_model, m.heads, m.kv_heads, m.d_ff, m.vocab_size,
              human_count(static_cast<double>(parameters)).c_str());
  std::printf("data        %s: %s tokens, unigram entropy %.3f nats a token\n", options.data.c_str(),
              human_count(static_cast<double>(data.size())).c_str(), data.unigram_entropy());
  std::printf("batch       %d sequences of %d tokens, %d at a time, %d steps\n", options.global_batch_size,
              options.sequence_length, options.micro_batch_size, options.steps);
  std::printf("optimizer   %s, lr %g after %d steps, attention %s, recompute %s\n\n",
              std::string(to_string(options.optimizer)).c_str(), options.lr, options.warmup_steps,
              std::string(to_string(options.attention)).c_str(),
              std::string(to_string(options.recompute)).c_str());
  std::fflush(stdout);
}

}  // namespace

int run_program(const std::function<void()>& train) try {
  set_environment();
  train();
  return 0;
} catch (const HelpRequest& help) {
  std::cout << help.what();
  return 0;
} catch (const UsageError& error) {
  std::cerr << error.what() << '\n';
  return exit_bad_usage;
}

size_t free_device_memory() {
  size_t free = 0, total = 0;
  CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return free;
}

void require_memory(const MemoryPrediction& predicted, size_t available) {
  const MemoryBytes bytes = predicted.total();
  const size_t total = std::accumulate(bytes.begin(), bytes.end(), size_t{0});
  if (total <= available) return;
  throw UsageError(
      "--model, --micro-batch-size, --seq-len", "a run that needs " + human_bytes(static_cast<double>(total)),
      "at most the " + human_bytes(static_cast<double>(available)) + " of device memory that are free");
}

double peak_flops() {
  const cudaDeviceProp device = this_device();
  const std::string_view name = device.name;
  const auto has = [&](const char* part) { return name.find(part) != name.npos; };
  if (PRECISION != 16) return 0;
  if (has("H100") || has("H200")) return has("PCIe") ? 756e12 : has("NVL") ? 835e12 : 989e12;
  if (has("A100")) return 312e12;
  return 0;
}

double flops_per_token(const Options& options) {
  const ModelConfig& m = options.model;
  const double in_products =
      static_cast<double>(active_parameter_count(options) - int64_t{m.vocab_size} * m.d_model);
  return 6 * in_products + 12.0 * m.layers * m.d_model * options.sequence_length;
}

Run::Run(const Options& options, const TokenData& data, const Parameters& parameters, Peers& peers)
    : options_(options), peers_(peers), parameters_(parameters.global_size()) {
  if (peers.rank() == 0) {
    log_.emplace(std::cout, options.log_json, options.steps, options.log_every, flops_per_token(options),
                 peers.ranks() * peak_flops());
    print_banner(options, data, parameters_, peers.ranks());
  }
  peers.begin_counting();
  peers.largest({0});  // all begin at about the same time, and so do their traces
  if (!options.trace.empty() || options.profile) trace::start();
}

void Run::begin_step() { begin_ = std::chrono::steady_clock::now(); }

void Run::end_step(int64_t step, const StepTotals& totals) {
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  const MemoryBytes& peak = memory_peak();
  const double memory = static_cast<double>(std::accumulate(peak.begin(), peak.end(), size_t{0}));
  const double sent = sent_bytes(peers_.traffic());
  const std::vector<double> largest = peers_.largest({seconds, memory, sent - sent_bytes_});
  sent_bytes_ = sent;
  seconds_ += largest[0];
  final_loss_ = totals.host_loss();
  if (!log_) return;
  log_->step({step + 1, final_loss_, totals.host_norm(), learning_rate(options_, step),
              int64_t{options_.global_batch_size} * options_.sequence_length, largest[0],
              static_cast<size_t>(largest[1]), static_cast<size_t>(largest[2] + 0.5)});
}

void Run::summarize(const MemoryPrediction& predicted,
                    const std::vector<std::pair<std::string, int>>& layout) {
  trace::stop();
  const std::vector<std::string> reports =
      peers_.gather(to_text(RankReport{{predicted, memory_peak()}, peers_.traffic()}));
  if (log_) {
    Summary summary{layout, parameters_, final_loss_, seconds_, {}};
    for (const std::string& report : reports) summary.ranks.push_back(rank_report(report));
    log_->summary(summary);
  }
  if (options_.profile && log_) trace::print_profile(std::cout);
  if (!options_.trace.empty()) {
    const std::vector<std::string> events = peers_.gather(trace::chrome_events(peers_.rank()));
    if (log_) trace::write_chrome(options_.trace, events);
  }
}

void Run::show_sample(const std::string& text) const {
  if (log_ && !text.empty()) std::cout << "\nThe model writes:\n" << text << '\n';
}

}  // namespace pentatron
