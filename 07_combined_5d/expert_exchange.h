// How rows travel to the ranks of their experts, and back. A rank knows two orders of rows. Permuted: the
// copies of this rank's rows, by expert. Dispatched: the rows that came to this rank's experts, by expert and
// then by the rank that they come from.
//
//   counts      each rank tells the others how many rows it sends to each expert
//   dispatch    permuted to dispatched
//   combine     dispatched to permuted
//
// Tensor ranks hold the same rows, and each has a part of every expert. With --dispatch direct each sends all
// its rows to the rank with the same part. With --dispatch once each sends a share of them. Where they
// arrive, tensor ranks give each other the shares; on the way back they first sum what the parts of an expert
// return.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "options.h"
#include "ranks/comm.h"

namespace pentatron {

// How many rows a rank sends to each expert, and gets from each rank for each of its own: on the host.
struct RowCounts {
  PinnedArray<int32_t> sent, came;  // [experts], [ranks, own experts]
  explicit RowCounts(int experts) : sent(experts), came(experts) {}
  int64_t rows_sent() const { return sum(sent); }
  int64_t rows_that_came() const { return sum(came); }

 private:
  static int64_t sum(const PinnedArray<int32_t>& counts) {
    return std::accumulate(counts.data(), counts.data() + counts.size(), int64_t{0});
  }
};

class ExpertExchange {
 public:
  // `experts`: the ranks that share out the experts. `tensor`: those that split each expert, or null.
  ExpertExchange(const ExpertOptions& options, Communicator& experts, Communicator* tensor,
                 cudaStream_t compute)
      : options_(options), experts_(experts), tensor_(tensor), compute_(compute) {}

  // With one rank nothing travels, and the two orders are one.
  bool one_rank() const { return experts_.ranks() == 1; }

  // Connects all pairs of ranks before the first step, as Communicator::connect does for two. A row has at
  // least two elements for each tensor rank, because a head has.
  void connect(Matrix<int32_t> counts /*[2, experts]*/, Tensor row /*[1, d]*/) {
    experts_.all_to_all(counts.data, counts.row_range(1, 1).data, own_);
    CUDA_CHECK(cudaStreamSynchronize(experts_.stream()));
    if (shares_ == 1) return;
    tensor_->all_to_all(row.data, row.data + shares_, 1);
    CUDA_CHECK(cudaStreamSynchronize(tensor_->stream()));
  }

  // The ranks tell each other how many rows they send to each expert. The counts start on their way to the
  // host; await_counts waits for them. sent, came: [1, experts].
  void exchange_counts(Matrix<int32_t> sent, Matrix<int32_t> came, const RowCounts& host) {
    if (one_rank()) came = sent;
    wait_stream(experts_.stream(), compute_);
    if (!one_rank()) experts_.all_to_all(sent.data, came.data, own_);
    const auto to_host = [&](Matrix<int32_t> from, const PinnedArray<int32_t>& to) {
      CUDA_CHECK(
          cudaMemcpyAsync(to.data(), from.data, from.bytes(), cudaMemcpyDeviceToHost, experts_.stream()));
    };
    to_host(sent, host.sent);
    to_host(came, host.came);
  }

  // The host waits for all counts that are on their way.
  void await_counts() { CUDA_CHECK(cudaStreamSynchronize(experts_.stream())); }

  // A dry run has no data. It assumes that every rank sends each expert the same number of `copies`, at most
  // `capacity`.
  void share_evenly(const RowCounts& n, int64_t copies, int64_t capacity) const {
    const auto rows_for = [&](int64_t expert) {
      const int64_t even =
          (expert + 1) * copies / options_.model.experts - expert * copies / options_.model.experts;
      return static_cast<int32_t>(std::min(even, capacity));
    };
    for (int i = 0; i < options_.model.experts; ++i) {
      n.sent[i] = rows_for(i);
      n.came[i] = rows_for(experts_.rank() * own_ + i % own_);
    }
  }

  // Starts to move rows [., d] to their experts. `arrived` tells when they are there.
  void dispatch(const RowCounts& n, Tensor permuted, Tensor dispatched, Event& arrived) {
    if (one_rank()) return;
    exchange(Direction::dispatch, n, permuted, dispatched);
    if (shares_ > 1) give_shares(blocks_of_dispatched(n, dispatched));
    arrived.record(shares_ > 1 ? tensor_->stream() : experts_.stream());
  }

  // Starts to move them back. With shares, a rank gets those rows that it had sent, and zeros for the others:
  // the tensor ranks' sum is what it would be.
  void combine(const RowCounts& n, Tensor dispatched, Tensor permuted, Event& returned) {
    if (one_rank()) return;
    if (shares_ > 1) {
      wait_stream(tensor_->stream(), compute_);
      tensor_->all_reduce(dispatched.data, dispatched.data, n.rows_that_came() * dispatched.columns);
      wait_stream(experts_.stream(), tensor_->stream());
      CUDA_CHECK(cudaMemsetAsync(permuted.data, 0, permuted.bytes(), experts_.stream()));
    }
    exchange(Direction::combine, n, permuted, dispatched);
    returned.record(experts_.stream());
  }

 private:
  enum class Direction { dispatch, combine };
  using Part = Communicator::Part<real>;

  // Rows [rows, d] that go to one expert of rank `peer`, or come from there for one of this rank's.
  struct Block {
    real* data;
    int64_t rows, columns;
    int peer;
  };
  // The share of a block that tensor rank `share` sends.
  Part part_of(const Block& b, int share, int peer) const {
    const int64_t first = b.rows * share / shares_, last = b.rows * (share + 1) / shares_;
    return {b.data + first * b.columns, static_cast<size_t>((last - first) * b.columns), peer};
  }

  std::vector<Block> blocks_of_permuted(const RowCounts& n, Tensor permuted) const {
    std::vector<Block> blocks;
    for (int e = 0, at = 0; e < options_.model.experts; at += n.sent[e++])
      blocks.push_back({permuted.row_range(at, 0).data, n.sent[e], permuted.columns, e / own_});
    return blocks;
  }

  std::vector<Block> blocks_of_dispatched(const RowCounts& n, Tensor dispatched) const {
    std::vector<Block> blocks;
    int64_t at = 0;
    for (int i = 0; i < own_; ++i) {
      for (int rank = 0; rank < experts_.ranks(); ++rank) {
        const int64_t rows = n.came[rank * own_ + i];
        blocks.push_back({dispatched.row_range(at, rows).data, rows, dispatched.columns, rank});
        at += rows;
      }
    }
    return blocks;
  }

  // Moves rows from the permuted to the dispatched order (dispatch) or back (combine). Each (rank, expert)
  // has its own message, so rows arrive in their places.
  void exchange(Direction direction, const RowCounts& n, Tensor permuted, Tensor dispatched) {
    std::vector<Part> of_permuted, of_dispatched;
    for (const Block& b : blocks_of_permuted(n, permuted)) of_permuted.push_back(part_of(b, share_, b.peer));
    for (const Block& b : blocks_of_dispatched(n, dispatched))
      of_dispatched.push_back(part_of(b, share_, b.peer));
    wait_stream(experts_.stream(), compute_);
    direction == Direction::dispatch ? experts_.all_to_all_v(of_permuted, of_dispatched)
                                     : experts_.all_to_all_v(of_dispatched, of_permuted);
  }

  // Each tensor rank gives the others its share of the rows that came.
  void give_shares(const std::vector<Block>& blocks) {
    std::vector<Part> given, got;
    for (int t = 0; t < shares_; ++t) {
      for (const Block& b : blocks) {
        if (t == share_) continue;
        given.push_back(part_of(b, share_, t));
        got.push_back(part_of(b, t, t));
      }
    }
    wait_stream(tensor_->stream(), experts_.stream());
    tensor_->all_to_all_v(given, got);
  }

  const ExpertOptions& options_;
  Communicator& experts_;
  Communicator* tensor_;
  cudaStream_t compute_;
  const int own_ = options_.model.experts / experts_.ranks();  // experts of this rank
  // Tensor ranks that share the rows out, and which of them this is.
  const int shares_ = tensor_ && options_.dispatch == Dispatch::once ? tensor_->ranks() : 1;
  const int share_ = shares_ > 1 ? tensor_->rank() : 0;
};

}  // namespace pentatron
