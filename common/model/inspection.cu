#include <cmath>
#include <map>
#include <vector>

#include "device/kernel.h"
#include "device/precision.h"
#include "device/trace.h"
#include "model/inspection.h"

namespace pentatron::inspection {
namespace {

constexpr size_t most = 1 << 20;  // looks of a step; later ones are left out
constexpr const char* words_of[] = {"weights", "forward", "backward", "gradients"};

struct Looks {
  DeviceArray<int> bad{most, Purpose::activations};  // 1: there is a number that is none
  std::vector<Found> all;
  std::map<double, int> of_unit;  // looks at a unit in a pass
};
std::unique_ptr<Looks> looks;

}  // namespace

template <class T>
__global__ void look_kernel(const T* x, size_t size, int* bad) {
  for (size_t i : grid_range(size)) {
    if (!(fabs(static_cast<double>(static_cast<accum>(x[i]))) < INFINITY)) *bad = 1;  // from any thread
  }
}

template <class T>
void look(When when, int unit, const std::string& name, const T* data, size_t size, cudaStream_t stream) {
  if (!looks) {
    looks = std::make_unique<Looks>();
    CUDA_CHECK(cudaMemsetAsync(looks->bad.data(), 0, most * sizeof(int), stream));
  }
  const int phase = static_cast<int>(when), layer = trace::here.layer;
  const bool in_pass = when == When::forward || when == When::backward;
  const int micro_batch = in_pass ? trace::here.micro_batch : 0;
  // Phases one after the other, in each the micro-batches, in each the units, which descend in backward; in a
  // unit as the looks come, so that a rank is named before those that get its results.
  constexpr double units = 1e4, micro_batches = 1e6, in_unit = 1e3;
  const double of_unit =
      (phase * micro_batches + micro_batch) * units + (when == When::backward ? units - 1 - unit : unit);
  const double order = of_unit * in_unit + (in_pass ? looks->of_unit[of_unit]++ : 0);
  if (looks->all.size() == most || size == 0) return;
  launch(look_kernel<T>, elementwise_grid(size), moves(size * sizeof(T)), stream, data, size,
         looks->bad.data() + looks->all.size());
  const std::string place = unit == 0 ? "embedding" : layer < 0 ? "head" : "layer " + std::to_string(layer);
  const std::string pass = place + ", " + words_of[phase] + " of micro-batch " + std::to_string(micro_batch);
  looks->all.push_back({order, (in_pass ? pass : words_of[phase]) + ": " + name});
}
template void look(When, int, const std::string&, const real*, size_t, cudaStream_t);
#if PRECISION == 16
template void look(When, int, const std::string&, const accum*, size_t, cudaStream_t);
#endif

Found first() {
  Found found = {INFINITY, ""};
  if (!looks) return found;
  CUDA_CHECK(cudaDeviceSynchronize());
  std::vector<int> bad(looks->all.size());
  CUDA_CHECK(cudaMemcpy(bad.data(), looks->bad.data(), bad.size() * sizeof(int), cudaMemcpyDeviceToHost));
  for (size_t i = 0; i < bad.size(); ++i) {
    if (bad[i] != 0 && looks->all[i].order < found.order) found = looks->all[i];
  }
  looks.reset();
  return found;
}

}  // namespace pentatron::inspection
