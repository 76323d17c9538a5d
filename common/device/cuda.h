// What every source that calls CUDA needs: checked calls, and the device of this rank.
#pragma once

#include <cuda_runtime.h>
#ifdef CUDA_CPU
#include <cuda_cpu.h>
#endif

#include <string>

#include "device/device_config.h"
#include "device/errors.h"
#include "device/trace.h"

// A failed call prints the call, the error's text, file:line and rank, and ends the process with status 1.
#define CUDA_CHECK(call) pentatron::check_cuda((call), #call, __FILE__, __LINE__)

namespace pentatron {

void check_cuda(cudaError_t status, const char* call, const char* file, int line);

// Sets how many work queues the GPU has, before CUDA starts and unless the user has. Streams that share one
// wait for each other, which may be a deadlock.
void set_work_queues();
// Throws UsageError if the user asked for fewer queues than there are `streams`.
void check_work_queues(int streams);

// So many processes share this rank's GPU. Each has an equal part of its memory.
inline int processes_of_device = 1;

// Sets the modelled GPU, and whether the run is dry. Throws UsageError if the GPU is real but shall be
// modelled, or no profile fits.
void configure_device(const DeviceConfig& config);
bool is_dry_run();
// The name of the GPU that is modelled; empty with a real one.
std::string modelled_gpu();
inline bool is_modelled() { return !modelled_gpu().empty(); }

// Seconds on the clock by which programs measure: that of the modelled GPU's host; with a real GPU, the
// wall clock. Where hosts meet, advance_clock sets their modelled clocks to the latest of them.
double now();
void advance_clock(double seconds);

cudaDeviceProp this_device();  // says what this rank's device is and can do
int largest_block_memory();    // shared, in bytes: 227 KiB on an H100, 99 on an A10, 64 on a T4

// Peak of one device in FLOP/s, of products of such elements. Of a real GPU: its vendor's dense bf16 peak; 0
// where it is not known, and for other elements.
double peak_flops(int element_bytes);

}  // namespace pentatron
