#include "kernels/experts.h"
#include "kernels/pack.h"

namespace pentatron {

// ---- The choice -------------------------------------------------------------------------------------------

// One thread a row.
__global__ void route_tokens_kernel(Out<accum> logits /*[rows, experts]*/,
                                    In<real> bias /*[experts], or null*/, size_t rows, int experts, int top_k,
                                    Out<int32_t> chosen /*[rows, top_k]*/) {
  for (size_t row : grid_range(rows)) {
    accum* const x = logits + row * experts;
    const auto softmax = [&] {
      accum largest = x[0], sum = 0;
      for (int e = 1; e < experts; ++e) largest = std::max(largest, x[e]);
      for (int e = 0; e < experts; ++e) sum += x[e] = exp(x[e] - largest);
      for (int e = 0; e < experts; ++e) x[e] /= sum;
    };
    if (bias != nullptr) softmax();
    const auto score = [&](int e) { return bias == nullptr ? x[e] : x[e] + accum(bias[e]); };
    accum last = INFINITY;  // the score chosen last, and its expert
    int last_expert = -1;
    for (int k = 0; k < top_k; ++k) {
      int best = -1;
      for (int e = 0; e < experts; ++e) {
        const bool left = score(e) < last || (score(e) == last && e > last_expert);
        if (left && (best < 0 || score(e) > score(best))) best = e;
      }
      if (best < 0)
        best = k;  // all left are NaN: choose an expert that exists, so that the run goes on and shows it
      chosen[row * top_k + k] = best;
      last = score(best);
      last_expert = best;
    }
    if (bias == nullptr) softmax();
  }
}

void route_tokens(AccumTensor logits, Matrix<int32_t> chosen, cudaStream_t stream, const real* bias) {
  launch(route_tokens_kernel, elementwise_grid(8 * logits.rows), moves(2 * logits.bytes()), stream,
         logits.data, bias, logits.rows, logits.columns, chosen.columns, chosen.data);
}

// One thread a row. The gradient of a softmax: p * (d - sum of p * d).
__global__ void route_tokens_backward_kernel(In<accum> probabilities /*[rows, experts]*/,
                                             In<int32_t> chosen /*[rows, top_k]*/,
                                             In<accum> d_chosen /*as chosen*/,
                                             In<accum> fractions /*[experts]*/, accum balance_scale,
                                             const LossScale* loss_scale, size_t rows, int experts, int top_k,
                                             Out<accum> d_logits /*[rows, experts]*/) {
  if (loss_scale != nullptr) balance_scale *= loss_scale->factor;
  for (size_t row : grid_range(rows)) {
    const accum* const p = probabilities + row * experts;
    accum* const d = d_logits + row * experts;
    for (int e = 0; e < experts; ++e) d[e] = balance_scale * fractions[e];
    for (int k = 0; k < top_k; ++k) d[chosen[row * top_k + k]] += d_chosen[row * top_k + k];
    accum mean = 0;
    for (int e = 0; e < experts; ++e) mean += p[e] * d[e];
    for (int e = 0; e < experts; ++e) d[e] = p[e] * (d[e] - mean);
  }
}

void route_tokens_backward(AccumTensor probabilities, Matrix<int32_t> chosen, const accum* d_chosen,
                           const accum* fractions, double balance_scale, AccumTensor d_logits,
                           cudaStream_t stream, const LossScale* loss_scale) {
  launch(route_tokens_backward_kernel, elementwise_grid(8 * probabilities.rows),
         moves(2 * probabilities.bytes()), stream, probabilities.data, chosen.data, d_chosen, fractions,
         balance_scale, loss_scale, probabilities.rows, probabilities.columns, chosen.columns, d_logits.data);
}

// Products with the router are small, and their sums are `accum`: here they are plain loops. One block 16
// experts and 32 columns. Eight warps share out the rows, and their sums meet in block memory.
constexpr int row_warps = threads_per_block / 32, block_experts = 16;
__global__ void router_wgrad_kernel(In<accum> d_logits /*[rows, experts]*/, In<real> x /*[rows, d]*/,
                                    int rows, int experts, int d, bool add,
                                    Out<accum> d_router /*[experts, d]*/) {
  const int first_expert = block_experts * blockIdx.x,
            here = std::min(int{block_experts}, experts - first_expert);
  const int first = 32 * blockIdx.y, count = std::min(32, d - first);
  accum* const of_warps = block_memory<accum>();  // [row_warps, block_experts, 32]
  for (int warp : warp_range(row_warps)) {
    for (int j : lane_range(count)) {
      accum sums[block_experts] = {};
#pragma unroll 4  // as many loads are under way
      for (int row = warp; row < rows; row += row_warps) {
        const accum* const factors = d_logits + static_cast<size_t>(row) * experts + first_expert;
        const auto value = accum(x[static_cast<size_t>(row) * d + first + j]);
#pragma unroll  // sums stay in registers
        for (int e = 0; e < block_experts; ++e) sums[e] += (e < here ? factors[e] : accum(0)) * value;
      }
      for (int e = 0; e < block_experts; ++e) of_warps[(warp * block_experts + e) * 32 + j] = sums[e];
    }
  }
  __syncthreads();
  for (int e : warp_range(here)) {
    accum* const gradient = d_router + static_cast<size_t>(first_expert + e) * d + first;
    for (int j : lane_range(count)) {
      accum sum = add ? gradient[j] : 0;
      for (int warp = 0; warp < row_warps; ++warp) sum += of_warps[(warp * block_experts + e) * 32 + j];
      gradient[j] = sum;
    }
  }
}

void router_wgrad(AccumTensor d_logits, Tensor x, Gradient d_router, cudaStream_t stream) {
  const dim3 blocks((d_logits.columns + block_experts - 1) / block_experts, (x.columns + 31) / 32);
  const double bytes = 1.0 * blocks.x * x.bytes() + 1.0 * blocks.y * d_logits.bytes() +
                       (d_router.add ? 2 : 1) * d_router.sum.bytes();
  launch_with_memory(router_wgrad_kernel, blocks, 32 * row_warps * block_experts * sizeof(accum),
                     {.bytes = bytes, .flops = 2.0 * x.size() * d_logits.columns}, stream, d_logits.data,
                     x.data, x.rows, d_logits.columns, x.columns, d_router.add, d_router.sum.data);
}

// ---- The layout of the copies -----------------------------------------------------------------------------

// One block a band of copies, one thread an expert. The threads read the same copies, so from a cache.
__global__ void count_copies_kernel(In<int32_t> chosen /*[copies]*/, size_t copies, int experts,
                                    Out<int32_t> of_band /*[bands, experts]*/) {
  const size_t copies_a_band = (copies + gridDim.x - 1) / gridDim.x;
  const size_t begin = blockIdx.x * copies_a_band, end = std::min(copies, begin + copies_a_band);
  for (int e : block_range(experts)) {
    int32_t count = 0;
#pragma unroll 8
    for (size_t copy = begin; copy < end; ++copy) count += chosen[copy] == e;
    of_band[static_cast<size_t>(blockIdx.x) * experts + e] = count;
  }
}

// One thread an expert.
__global__ void sum_bands_kernel(In<int32_t> of_band /*[bands, experts]*/, int experts, int bands,
                                 Out<int32_t> counts /*[experts]*/) {
  for (size_t e : grid_range(experts)) {
    int32_t sum = 0;
    for (int band = 0; band < bands; ++band) sum += of_band[static_cast<size_t>(band) * experts + e];
    counts[e] = sum;
  }
}

// One thread an expert. Copies lie by expert and, of one expert, by band.
__global__ void first_places_kernel(In<int32_t> counts /*[experts]*/, int experts, int bands,
                                    Out<int32_t> of_band /*[bands, experts]*/) {
  for (size_t e : grid_range(experts)) {
    int32_t place = 0;
    for (size_t before = 0; before < e; ++before) place += counts[before];
    for (int band = 0; band < bands; ++band) {
      int32_t& first = of_band[static_cast<size_t>(band) * experts + e];
      const int32_t count = first;
      first = place;
      place += count;
    }
  }
}

// As count_copies_kernel.
__global__ void assign_places_kernel(In<int32_t> chosen /*[copies]*/, size_t copies, int experts,
                                     In<int32_t> first_of_band /*[bands, experts]*/,
                                     Out<int32_t> place /*[copies]*/) {
  const size_t copies_a_band = (copies + gridDim.x - 1) / gridDim.x;
  const size_t begin = blockIdx.x * copies_a_band, end = std::min(copies, begin + copies_a_band);
  for (int e : block_range(experts)) {
    int32_t next = first_of_band[static_cast<size_t>(blockIdx.x) * experts + e];
#pragma unroll 8
    for (size_t copy = begin; copy < end; ++copy)
      if (chosen[copy] == e) place[copy] = next++;
  }
}

void make_permutation(Matrix<int32_t> chosen, Matrix<int32_t> bands, Matrix<int32_t> counts,
                      Matrix<int32_t> place, cudaStream_t stream) {
  const int64_t copies = chosen.size(), experts = bands.columns;
  launch(count_copies_kernel, block_a_row(bands.rows, experts), moves(chosen.bytes() + bands.bytes()), stream,
         chosen.data, copies, experts, bands.data);
  launch(sum_bands_kernel, elementwise_grid(8 * experts), moves(bands.bytes()), stream, bands.data, experts,
         bands.rows, counts.data);
  launch(first_places_kernel, elementwise_grid(8 * experts), moves(2 * bands.bytes()), stream, counts.data,
         experts, bands.rows, bands.data);
  launch(assign_places_kernel, block_a_row(bands.rows, experts), moves(2 * chosen.bytes()), stream,
         chosen.data, copies, experts, bands.data, place.data);
}

// ---- Rows to their places and back ------------------------------------------------------------------------

// sum += factor * row.
template <int width>
__device__ void add_scaled(accum factor, const real* row, Pack<width>& sum) {
  const Pack<width> term = load<width>(row);
  for (int e = 0; e < width; ++e) sum[e] += factor * term[e];
}

// One block a copy.
template <int width>
__global__ void permute_tokens_kernel(In<real> x /*[rows, d]*/, In<int32_t> place /*[rows, top_k]*/,
                                      int top_k, int d, Out<real> copies /*[rows*top_k, d]*/) {
  const size_t copy = blockIdx.x;
  const real* const from = x + copy / top_k * d;
  real* const to = copies + static_cast<size_t>(place[copy]) * d;
  for (int j : block_range(d, width)) store(to + j, load<width>(from + j));
}

void permute_tokens(Tensor x, Matrix<int32_t> place, Tensor copies, cudaStream_t stream) {
  const int width = width_for(x.columns, x.data, copies.data);
  launch(width == 1 ? permute_tokens_kernel<1> : permute_tokens_kernel<pack_width>,
         block_a_row(place.size(), x.columns / width), moves(2 * copies.bytes()), stream, x.data, place.data,
         place.columns, x.columns, copies.data);
}

// One block 8 rows, for which it reads the router once.
constexpr int block_rows = 8;
template <int width>
__global__ void permute_tokens_backward_kernel(In<real> d_copies /*[rows*top_k, d]*/,
                                               In<int32_t> place /*[rows, top_k]*/, int top_k,
                                               In<accum> d_logits /*[rows, experts]*/,
                                               In<real> router /*[experts, d]*/, int rows, int experts, int d,
                                               bool add, Out<real> d_x /*[rows, d]*/) {
  const size_t first = size_t{block_rows} * blockIdx.x;
  const int count = std::min(int{block_rows}, static_cast<int>(rows - first));
  for (int j : block_range(d, width)) {
    Pack<width> sums[block_rows] = {};
    const auto for_rows = [&](const auto& f) {
#pragma unroll  // sums stay in registers
      for (int i = 0; i < block_rows; ++i)
        if (i < count) f(first + i, sums[i]);
    };
    for_rows([&](size_t row, Pack<width>& sum) {
      if (add) add_scaled(1, d_x + row * d + j, sum);
      for (int k = 0; k < top_k; ++k)
        add_scaled(1, d_copies + static_cast<size_t>(place[row * top_k + k]) * d + j, sum);
    });
    for (int e = 0; e < experts; ++e) {
      for_rows([&](size_t row, Pack<width>& sum) {
        add_scaled(d_logits[row * experts + e], router + static_cast<size_t>(e) * d + j, sum);
      });
    }
    for_rows([&](size_t row, Pack<width>& sum) { store(d_x + row * d + j, sum); });
  }
}

void permute_tokens_backward(Tensor d_copies, Matrix<int32_t> place, AccumTensor d_logits, Tensor router,
                             Tensor d_x, cudaStream_t stream, bool add) {
  const int width = width_for(d_x.columns, d_copies.data, router.data, d_x.data);
  const int64_t blocks = (d_x.rows + block_rows - 1) / block_rows;
  const double bytes =
      1.0 * d_copies.bytes() + (add ? 2 : 1) * d_x.bytes() + d_logits.bytes() + 1.0 * blocks * router.bytes();
  launch(width == 1 ? permute_tokens_backward_kernel<1> : permute_tokens_backward_kernel<pack_width>,
         block_a_row(blocks, d_x.columns / width),
         {.bytes = bytes, .flops = 2.0 * d_x.size() * d_logits.columns}, stream, d_copies.data, place.data,
         place.columns, d_logits.data, router.data, d_x.rows, d_logits.columns, d_x.columns, add, d_x.data);
}

template <int width>
__global__ void combine_tokens_kernel(In<real> returned /*[rows*top_k, d]*/,
                                      In<accum> probabilities /*[rows, experts]*/,
                                      In<int32_t> chosen /*[rows, top_k]*/, In<int32_t> place /*as chosen*/,
                                      int experts, int top_k, int d, bool add, Out<real> out /*[rows, d]*/) {
  const size_t row = blockIdx.x;
  for (int j : block_range(d, width)) {
    Pack<width> sum = {};
    if (add) add_scaled(1, out + row * d + j, sum);
    for (int k = 0; k < top_k; ++k) {
      const size_t copy = row * top_k + k;
      const accum weight = probabilities[row * experts + chosen[copy]];
      add_scaled(weight, returned + static_cast<size_t>(place[copy]) * d + j, sum);
    }
    store(out + row * d + j, sum);
  }
}

void combine_tokens(Tensor returned, AccumTensor probabilities, Matrix<int32_t> chosen, Matrix<int32_t> place,
                    Tensor out, cudaStream_t stream, bool add) {
  const int width = width_for(out.columns, returned.data, out.data);
  launch(width == 1 ? combine_tokens_kernel<1> : combine_tokens_kernel<pack_width>,
         block_a_row(out.rows, out.columns / width), moves(returned.bytes() + (add ? 2 : 1) * out.bytes()),
         stream, returned.data, probabilities.data, chosen.data, place.data, probabilities.columns,
         chosen.columns, out.columns, add, out.data);
}

// One block a copy.
template <int width>
__global__ void combine_tokens_backward_kernel(In<real> d_out /*[rows, d]*/,
                                               In<real> returned /*[rows*top_k, d]*/,
                                               In<accum> probabilities /*[rows, experts]*/,
                                               In<int32_t> chosen /*[rows, top_k]*/,
                                               In<int32_t> place /*as chosen*/, int experts, int top_k, int d,
                                               Out<real> d_returned /*as returned*/,
                                               Out<accum> d_chosen /*as chosen*/) {
  const size_t copy = blockIdx.x, row = copy / top_k;
  const size_t at = static_cast<size_t>(place[copy]) * d;
  const accum weight = probabilities[row * experts + chosen[copy]];
  accum dot = 0;
  for (int j : block_range(d, width)) {
    Pack<width> incoming = load<width>(d_out + row * d + j), came = load<width>(returned + at + j);
    for (int e = 0; e < width; ++e) {
      dot += incoming[e] * came[e];
      incoming[e] *= weight;
    }
    store(d_returned + at + j, incoming);
  }
  dot = block_sum(dot);
  if (is_first_thread()) d_chosen[copy] = dot;
}

void combine_tokens_backward(Tensor d_out, Tensor returned, AccumTensor probabilities, Matrix<int32_t> chosen,
                             Matrix<int32_t> place, Tensor d_returned, accum* d_chosen, cudaStream_t stream) {
  const int width = width_for(d_out.columns, d_out.data, returned.data, d_returned.data);
  launch(width == 1 ? combine_tokens_backward_kernel<1> : combine_tokens_backward_kernel<pack_width>,
         block_a_row(place.size(), d_out.columns / width), moves(2 * returned.bytes() + d_out.bytes()),
         stream, d_out.data, returned.data, probabilities.data, chosen.data, place.data,
         probabilities.columns, chosen.columns, d_out.columns, d_returned.data, d_chosen);
}

// ---- Balance ----------------------------------------------------------------------------------------------

// One block in all.
__global__ void add_balance_loss_kernel(In<accum> probabilities /*[rows, experts]*/,
                                        In<accum> fractions /*[experts]*/, int rows, int experts, accum scale,
                                        Out<accum> loss /*[1]*/) {
  accum sum = 0;
  for (int row : block_range(rows)) {
    for (int e = 0; e < experts; ++e)
      sum += fractions[e] * probabilities[static_cast<size_t>(row) * experts + e];
  }
  sum = block_sum(sum);
  if (is_first_thread()) loss[0] += scale * sum;
}

void add_balance_loss(AccumTensor probabilities, const accum* fractions, double scale, accum* loss,
                      cudaStream_t stream) {
  launch(add_balance_loss_kernel, dim3(1), moves(probabilities.bytes()), stream, probabilities.data,
         fractions, probabilities.rows, probabilities.columns, scale, loss);
}

// One block an expert.
__global__ void count_loads_kernel(In<int32_t> chosen /*[copies]*/, int copies, accum scale, bool add,
                                   Out<accum> loads /*[experts]*/) {
  const int expert = blockIdx.x;
  accum sum = 0;
  for (int copy : block_range(copies)) sum += chosen[copy] == expert;
  sum = block_sum(sum);
  if (is_first_thread()) loads[expert] = (add ? loads[expert] : 0) + scale * sum;
}

void count_loads(Matrix<int32_t> chosen, double scale, Gradient loads, cudaStream_t stream) {
  const int64_t experts = loads.sum.columns;  // each block reads all that is chosen
  launch(count_loads_kernel, dim3(experts), moves(experts * chosen.bytes() + loads.sum.bytes()), stream,
         chosen.data, chosen.size(), scale, loads.add, loads.sum.data);
}

__global__ void step_bias_kernel(accum rate, double mean, real* bias, accum* master,
                                 In<accum> loads /*all [size]*/, const StepFactors* factors, size_t size) {
  if (factors->gradient < 0) return;
  for (size_t i : grid_range(size)) {
    const double missing = mean - loads[i];
    master[i] += missing > 0 ? rate : missing < 0 ? -rate : accum(0);
    bias[i] = real(master[i]);
  }
}

void step_bias(double rate, double mean, real* bias, accum* master, const accum* loads,
               const StepFactors* factors, size_t size, cudaStream_t stream) {
  launch(step_bias_kernel, elementwise_grid(size), moves((3 * accum_bytes + real_bytes) * size), stream, rate,
         mean, bias, master, loads, factors, size);
}

}  // namespace pentatron
