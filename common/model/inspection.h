// Where a number comes from that is none. If a step's loss or gradient norm is NaN or infinite, the run
// repeats the step (program.h). Then the model shows each tensor when it is computed. A kernel looks at it,
// so the host does not wait, and ranks that wait for it go on. In other steps nothing is looked at.
#pragma once

#include <string>

#include "device/tensor.h"

namespace pentatron::inspection {

inline bool on = false;

enum class When { weights, forward, backward, gradients };  // a bad one may spoil those of later phases only

// Looks at a tensor of a unit. trace::here says in which micro-batch. T: real or accum.
template <class T>
void look(When when, int unit, const std::string& name, const T* data, size_t size, cudaStream_t stream);
template <class T>
void look(When when, int unit, const char* name, Matrix<T> x, cudaStream_t stream) {
  if (on && x.data != nullptr) look(when, unit, name, x.data, x.size(), stream);
}

// The first tensor of this rank with a number that is none: its place in the order of the step, and words.
// Infinity and none if there was no such tensor. Waits for the device.
struct Found {
  double order;
  std::string words;  // "layer 1, forward of micro-batch 0: attention's output", or "weights: NAME"
};
Found first();

}  // namespace pentatron::inspection
