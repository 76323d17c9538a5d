// --tp-overlap: the products at a region's borders are made in chunks of rows. One chunk's communication
// hides behind another one's product (Wang et al., "Overlap Communication with Dependent Computation via
// Decomposition", 2023). All else is as in tensor_parallel.h.
//
//   compute          product 0 | product 1 |                      | product 0 | product 1
//   communication              | sum 0     | sum 1       gather 0 | gather 1  |
#include "kernels/row_blocks.h"
#include "tensor_parallel.h"

namespace pentatron {
namespace {

class OverlappedRegion : public TensorParallel {
 public:
  OverlappedRegion(const TrainingConfig& training, const TensorParallelOptions& options, int64_t rows,
                   Communicator& tensor, cudaStream_t compute)
      : TensorParallel(training, options, rows, tensor, compute),
        parts_(sequence_parallel_ ? tensor.ranks() : 1),
        chunks_(static_cast<int>(std::min<int64_t>(options.tp_overlap, rows / parts_))),
        chunk_came_(chunks_) {}

  // The communication stream gathers the next chunk while compute multiplies one. Without sequence
  // parallelism there is nothing to gather.
  void enter_linear(const Blas& blas, Tensor x, Tensor weight, Tensor y) override {
    if (!sequence_parallel_) return TensorParallel::enter_linear(blas, x, weight, y);
    const Tensor entered = gathered_.row_range(0, y.rows);
    wait_stream(tensor_.stream(), compute_);
    for (int i = 0; i < chunks_; ++i) {
      const Tensor own = chunk(x, i);
      tensor_.all_gather(own.data, packed(entered, i).first.data, own.size());
      chunk_came_[i].record(tensor_.stream());
    }
    for (int i = 0; i < chunks_; ++i) {
      wait_event(compute_, chunk_came_[i]);
      linear_forward_blocks(blas, packed(entered, i), weight, in_place(y, i));
    }
  }

  // The communication stream sums the last chunk while compute multiplies one.
  Tensor leave_linear(const Blas& blas, Tensor x, Tensor weight, Tensor partial) override {
    const Tensor sum = sequence_parallel_ ? gathered_.row_range(0, x.rows / parts_) : partial;
    for (int i = 0; i < chunks_; ++i) {
      const Tensor of_chunk = chunk(sum, i);
      const RowBlocks terms = packed(partial, i);
      linear_forward_blocks(blas, in_place(x, i), weight, terms);
      wait_stream(tensor_.stream(), compute_);
      if (sequence_parallel_) {
        tensor_.reduce_scatter(terms.first.data, of_chunk.data, of_chunk.size());
      } else {
        tensor_.all_reduce(terms.first.data, of_chunk.data, of_chunk.size());
      }
    }
    wait_stream(compute_, tensor_.stream());
    return sum;
  }

 private:
  // Chunk i of rows that a rank has outside.
  Tensor chunk(Tensor outside, int i) const {
    const int64_t begin = outside.rows * i / chunks_, end = outside.rows * (i + 1) / chunks_;
    return outside.row_range(begin, end - begin);
  }
  // Chunk i of all rows: a block of the rows that each rank has outside, so that a collective gives every
  // rank its own. They lie in their places, or packed, one after the other, as a collective wants them.
  RowBlocks in_place(Tensor all, int i) const {
    const int64_t outside = all.rows / parts_;
    return {chunk(all.row_range(0, outside), i), parts_, outside};
  }
  RowBlocks packed(Tensor all, int i) const {
    const Tensor block = in_place(all, i).first;
    const int64_t begin = (block.data - all.data) / all.columns;
    return {all.row_range(begin * parts_, block.rows), parts_, block.rows};
  }

  const int parts_;                // the ranks among which the rows outside are split
  const int chunks_;               // at most one for each row that a rank has outside
  std::vector<Event> chunk_came_;  // [chunks]: done when the chunk is gathered
};

}  // namespace

std::unique_ptr<TensorParallel> make_tensor_parallel(const TrainingConfig& training,
                                                     const TensorParallelOptions& options, int64_t rows,
                                                     Communicator& tensor, cudaStream_t compute) {
  if (options.tp_overlap == 1 || tensor.ranks() == 1)
    return std::make_unique<TensorParallel>(training, options, rows, tensor, compute);
  return std::make_unique<OverlappedRegion>(training, options, rows, tensor, compute);
}

}  // namespace pentatron
