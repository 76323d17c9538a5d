#include <cmath>

#include "kernels.h"
#include "sample.h"

namespace pentatron {
namespace {

// Index i with probability proportional to exp(logits[i] / temperature); `uniform` in [0, 1) decides.
int draw(const std::vector<double>& logits, double temperature, double uniform) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  std::vector<double> cumulative;
  double sum = 0;
  for (const double logit : logits) cumulative.push_back(sum += std::exp((logit - largest) / temperature));
  const auto chosen = std::upper_bound(cumulative.begin(), cumulative.end(), uniform * sum);
  return static_cast<int>(std::min<ptrdiff_t>(chosen - cumulative.begin(), std::ssize(logits) - 1));
}

}  // namespace

std::string write_sample(const Options& options, const TransformerParameters& ids, Parameters& parameters,
                         Seams seams, cudaStream_t stream, const Peers& tensor_ranks) {
  if (options.sample == 0) return "";
  constexpr double temperature = 0.8;  // below 1: likely tokens more often than the model says
  const int window = options.sequence_length, vocabulary = options.model.vocab_size;
  Transformer model(options.model, ids, parameters, whole_model(options.model), 1, window, window,
                    Recompute::full, seams, stream);
  const auto activations = model.make_activations();
  BatchBuffer buffer(window);
  const Parameter& head = parameters[ids.head];
  PinnedArray<real> row(head.local_rows);

  std::vector<int32_t> tokens = {'\n'};
  while (std::ssize(tokens) <= options.sample) {
    const int64_t seen = std::min<int64_t>(std::ssize(tokens), window), first = std::ssize(tokens) - seen;
    for (int64_t i = 0; i < window; ++i) {  // what follows the last token is masked by causality
      buffer.tokens()[i] = i < seen ? tokens[first + i] : 0;
      buffer.targets()[i] = ignored_target;
      buffer.positions()[i] = static_cast<int32_t>(i);
    }
    model.forward(buffer.upload(1, 1, false, stream), *activations);
    const Tensor last = activations->logits.row_range(seen - 1, 1);
    CUDA_CHECK(cudaMemcpyAsync(row.data(), last.data, last.bytes(), cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    std::vector<double> logits(vocabulary);
    for (int64_t i = 0; i < head.local_rows; ++i) {
      logits[head.first_row + i] = static_cast<double>(static_cast<accum>(row[i]));
    }
    logits = tensor_ranks.sum(logits);
    const PhiloxBlock bits = philox4x32(0, tokens.size(), philox_key(options.seed, "sample"));
    tokens.push_back(draw(logits, temperature, bits.word[0] / 4294967296.0));
  }

  std::string text;
  for (size_t i = 1; i < tokens.size(); ++i) {
    text +=
        vocabulary <= 256 ? std::string(1, static_cast<char>(tokens[i])) : std::to_string(tokens[i]) + " ";
  }
  return text;
}

}  // namespace pentatron
