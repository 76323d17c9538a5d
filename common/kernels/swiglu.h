// SwiGLU (Shazeer, 2020).
#pragma once

#include "device/tensor.h"

namespace pentatron {

// out = silu(gate) * up.
void swiglu_forward(Tensor gate_up /*[rows, gate | up]*/, Tensor out /*[rows, f]*/, cudaStream_t stream);
void swiglu_backward(Tensor d_out /*[rows, f]*/, Tensor gate_up, Tensor d_gate_up /*[rows, gate | up]*/,
                     cudaStream_t stream);

}  // namespace pentatron
