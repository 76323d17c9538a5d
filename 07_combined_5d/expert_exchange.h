// How rows travel to the ranks of their experts, and back. A rank knows two orders of rows. Permuted: the
// copies of this rank's rows, by expert. Dispatched: the rows that came to this rank's experts, by expert and
// then by the rank that they come from.
//
//   counts      each rank tells the others how many rows it sends to each expert
//   dispatch    permuted to dispatched
//   combine     dispatched to permuted
//
// Tensor ranks hold the same rows, and a part of every expert. Each sends all rows to the rank with its part.
#pragma once

#include <numeric>
#include <vector>

#include "options.h"
#include "ranks/comm.h"

namespace pentatron {

// How many rows a rank sends to each expert, and gets from each rank for each of its own: on the host.
struct RowCounts {
  PinnedArray<int32_t> sent, came;  // [experts], [ranks, own experts]
  explicit RowCounts(int experts) : sent(experts), came(experts) {}
  int64_t rows_that_came() const {
    return std::accumulate(came.data(), came.data() + came.size(), int64_t{0});
  }
};

class ExpertExchange {
 public:
  // `all`: experts of a layer, which `expert_ranks` share out.
  ExpertExchange(int all, Communicator& expert_ranks, cudaStream_t compute)
      : all_(all), expert_ranks_(expert_ranks), compute_(compute) {}

  // With one rank nothing travels, and the two orders are one.
  bool one_rank() const { return expert_ranks_.ranks() == 1; }

  // Connects all pairs of ranks before the first step, as Communicator::connect does for two.
  void connect(Matrix<int32_t> counts /*[2, experts]*/) {
    expert_ranks_.all_to_all(counts.data, counts.row_range(1, 1).data, own_);
    CUDA_CHECK(cudaStreamSynchronize(expert_ranks_.stream()));
  }

  // The ranks tell each other how many rows they send to each expert. The counts start on their way to the
  // host; await_counts waits for them. sent, came: [1, experts].
  void exchange_counts(Matrix<int32_t> sent, Matrix<int32_t> came, const RowCounts& host) {
    if (one_rank()) came = sent;
    wait_stream(expert_ranks_.stream(), compute_);
    if (!one_rank()) expert_ranks_.all_to_all(sent.data, came.data, own_);
    const auto to_host = [&](Matrix<int32_t> from, const PinnedArray<int32_t>& to) {
      CUDA_CHECK(cudaMemcpyAsync(to.data(), from.data, from.bytes(), cudaMemcpyDeviceToHost,
                                 expert_ranks_.stream()));
    };
    to_host(sent, host.sent);
    to_host(came, host.came);
  }

  // The host waits for all counts that are on their way.
  void await_counts() { CUDA_CHECK(cudaStreamSynchronize(expert_ranks_.stream())); }

  // A dry run has no data. It assumes that every rank sends each expert the same number of `copies`.
  void share_evenly(const RowCounts& n, int64_t copies) const {
    const auto rows_for = [&](int64_t expert) {
      return static_cast<int32_t>((expert + 1) * copies / all_ - expert * copies / all_);
    };
    for (int i = 0; i < all_; ++i) {
      n.sent[i] = rows_for(i);
      n.came[i] = rows_for(expert_ranks_.rank() * own_ + i % own_);
    }
  }

  // Start to move rows [., d] to their experts, and back.
  void dispatch(const RowCounts& n, Tensor permuted, Tensor dispatched) {
    exchange(Direction::dispatch, n, permuted, dispatched);
  }
  void combine(const RowCounts& n, Tensor dispatched, Tensor permuted) {
    exchange(Direction::combine, n, permuted, dispatched);
  }
  // The compute stream waits until the rows that were last sent to their experts, or back, are there.
  void await_rows() { wait_event(compute_, arrived_); }

 private:
  enum class Direction { dispatch, combine };

  // Moves rows from the permuted to the dispatched order (dispatch) or back (combine). Each (rank, expert)
  // has its own message, so rows arrive in their places.
  void exchange(Direction direction, const RowCounts& n, Tensor permuted, Tensor dispatched) {
    if (one_rank()) return;
    std::vector<Communicator::Part<real>> of_permuted, of_dispatched;
    const auto part = [](Tensor rows, int peer) {
      return Communicator::Part<real>{rows.data, static_cast<size_t>(rows.size()), peer};
    };
    for (int e = 0, at = 0; e < all_; at += n.sent[e++])
      of_permuted.push_back(part(permuted.row_range(at, n.sent[e]), e / own_));
    int64_t at = 0;
    for (int i = 0; i < own_; ++i) {
      for (int rank = 0; rank < expert_ranks_.ranks(); ++rank) {
        const int64_t rows = n.came[rank * own_ + i];
        of_dispatched.push_back(part(dispatched.row_range(at, rows), rank));
        at += rows;
      }
    }
    wait_stream(expert_ranks_.stream(), compute_);
    direction == Direction::dispatch ? expert_ranks_.all_to_all_v(of_permuted, of_dispatched)
                                     : expert_ranks_.all_to_all_v(of_dispatched, of_permuted);
    arrived_.record(expert_ranks_.stream());
  }

  const int all_;  // experts of a layer
  Communicator& expert_ranks_;
  cudaStream_t compute_;
  const int own_ = all_ / expert_ranks_.ranks();  // this rank has so many
  Event arrived_;                                 // the rows are where they were sent
};

}  // namespace pentatron
