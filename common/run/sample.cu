#include <cmath>

#include "kernels/loss.h"
#include "run/program.h"

namespace pentatron {
namespace {

// Returns index i with probability proportional to exp(logits[i] / temperature). `uniform`: in [0, 1).
int draw(const std::vector<double>& logits, double temperature, double uniform) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  std::vector<double> cumulative;
  double sum = 0;
  for (const double logit : logits) cumulative.push_back(sum += std::exp((logit - largest) / temperature));
  const auto chosen = std::upper_bound(cumulative.begin(), cumulative.end(), uniform * sum);
  return static_cast<int>(std::min<ptrdiff_t>(chosen - cumulative.begin(), std::ssize(logits) - 1));
}

}  // namespace

std::string write_sample(const Options& options, const Parameter& head,
                         const std::function<Tensor(const Batch&)>& forward, cudaStream_t stream,
                         const Peers& peers, std::vector<int32_t> positions) {
  if (options.sample == 0) return "";
  constexpr double temperature = 0.8;  // below 1: likely tokens more often than the model says
  const int window = options.sequence_length, vocabulary = options.model.vocab_size;
  if (positions.empty()) positions = all_positions(options);
  BatchBuffer buffer(options, positions);
  std::vector<int32_t> input(int64_t{options.micro_batch_size} * window);  // the first sequence is used
  const std::vector<int32_t> targets(input.size(), ignored_target);
  std::vector<real> row(head.local_rows);

  std::vector<int32_t> tokens = {std::min<int32_t>('\n', vocabulary - 1)};
  while (std::ssize(tokens) <= options.sample) {
    const int64_t seen = std::min<int64_t>(std::ssize(tokens), window);
    std::copy(tokens.end() - seen, tokens.end(), input.begin());  // causality masks what follows
    buffer.write(input, targets);
    const auto newest = std::find(positions.begin(), positions.end(), seen - 1);
    std::vector<double> logits(vocabulary);
    const Tensor mine = forward(buffer.upload(1, 1, false, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    if (mine.data != nullptr && newest != positions.end()) {  // else another rank has its row
      const Tensor last = mine.row_range(newest - positions.begin(), 1);
      CUDA_CHECK(cudaMemcpy(row.data(), last.data, last.bytes(), cudaMemcpyDeviceToHost));
      for (int64_t i = 0; i < mine.columns; ++i)
        logits[head.first_row + i] = static_cast<double>(static_cast<accum>(row[i]));
    }
    const PhiloxBlock bits = philox4x32(0, tokens.size(), philox_key(options.seed, "sample"));
    tokens.push_back(draw(peers.sum(logits), temperature, bits.word[0] / 4294967296.0));
  }

  std::string text;
  for (size_t i = 1; i < tokens.size(); ++i) {
    text +=
        vocabulary <= 256 ? std::string(1, static_cast<char>(tokens[i])) : std::to_string(tokens[i]) + " ";
  }
  return text;
}

}  // namespace pentatron
