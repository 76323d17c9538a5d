// logits OPTIONS...: writes the logits of the first micro-batch, [rows, vocabulary] doubles, to standard
// output. tests/hugging_face.py compares them with those of transformers.
#include <cstdio>

#include "checkpoint/checkpoint.h"
#include "model/batch.h"
#include "model/transformer.h"
#include "run/program.h"

using namespace pentatron;

namespace {

void write_logits(const Options& options) {
  const TokenData data(options.data, options.model.vocab_size, options.sequence_length);
  const Stream compute("compute");
  TensorRegion region;
  AttentionCore attention(options.attention);
  FeedForward feed_forward;
  Parameters parameters;
  const TransformerParameters ids = declare_transformer(options.model, feed_forward, parameters);
  parameters.allocate();
  parameters.initialise(options.seed, compute);
  Optimizer optimizer(options, parameters, compute);
  const Checkpoint checkpoint(options, parameters, optimizer, compute);
  Transformer model(options, ids, parameters, options.sequence_length,
                    {{}, &region, &attention, &feed_forward}, compute);
  const auto activations = model.make_activations(whole_model(options.model));
  BatchLoader loader(data, options);
  const Tensor logits = model.forward(loader.load(0, compute)[0], *activations);
  const PinnedArray<real> host(logits.size());
  CUDA_CHECK(cudaMemcpyAsync(host.data(), logits.data, logits.bytes(), cudaMemcpyDeviceToHost, compute));
  compute.synchronize();
  for (size_t i = 0; i < host.size(); ++i) {
    const double value = static_cast<accum>(host[i]);
    std::fwrite(&value, sizeof value, 1, stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return run_program([&] {
    const Options options = parse_options<Options>(argc, argv, "Writes the logits of a micro-batch.");
    configure_device(options);
    write_logits(options);
  });
}
