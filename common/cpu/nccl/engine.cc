#include "engine.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "reduce.h"

namespace nccl_mpi {
namespace {

constexpr size_t kMaxAlignment = 256;  // bytes, of a piece in the window

// A number that no other message of any rank has.
uint64_t new_message() {
  static std::atomic<uint64_t> messages = 0;
  int world_rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  return static_cast<uint64_t>(world_rank) << 40 | ++messages;
}

Collective::Kind timed_as(Kind kind) {
  switch (kind) {
    case Kind::all_gather:
      return Collective::all_gather;
    case Kind::reduce_scatter:
      return Collective::reduce_scatter;
    case Kind::broadcast:
      return Collective::broadcast;
    default:
      return Collective::all_reduce;
  }
}

// Elements [first, first + count) cut into nearly equal parts.
std::pair<size_t, size_t> part_of(std::pair<size_t, size_t> range, int part, int parts) {
  const size_t begin = range.second * part / parts, end = range.second * (part + 1) / parts;
  return {range.first + begin, end - begin};
}

}  // namespace

Engine::Engine(const Members& members, const Network& network, int channels, const std::atomic<bool>& aborted)
    : ranks_(static_cast<int>(members.world_ranks.size())),
      rank_(members.rank),
      world_ranks_(members.world_ranks),
      network_(network),
      channels_(channels),
      collectives_(network, world_ranks_),
      transport_(members.comm, world_ranks_, aborted),
      window_(2 * ranks_ * (chunk + kMaxAlignment)) {
  if (is_dry_run()) rendezvous_ = std::make_unique<Rendezvous>(members, aborted);
}

Span Engine::run(std::span<const Call> calls, int64_t time, std::vector<Message>* messages) {
  span_ = {-1, time};
  std::vector<Call> collectives, point_to_point;
  for (const Call& call : calls) {
    (is_point_to_point(call.kind) ? point_to_point : collectives).push_back(call);
  }
  for (const Call& call : collectives) run_collective(call);
  pass(seconds_of_collectives(collectives));
  if (!point_to_point.empty()) run_point_to_point(point_to_point, messages);
  return span_;
}

// All ranks had come at `met`.
void Engine::meet(int64_t met) {
  if (span_.begin < 0) span_.begin = met;
  span_.end = met;
}

void Engine::pass(double seconds) { span_.end += network_.modelled ? std::llround(seconds * 1e9) : 0; }

// ---- Sends and receives -----------------------------------------------------------------------------------

void Engine::run_point_to_point(std::span<const Call> calls, std::vector<Message>* messages) {
  std::vector<Meeting> meetings;
  for (const Call& call : calls) {
    const size_t bytes = is_dry_run() ? 0 : bytes_of(call);
    Meeting& meeting = meetings.emplace_back(&call, call.root, Piece{}, Piece{}, 0);
    if (call.kind == Kind::send) {
      meeting.message = new_message();
      meeting.out = {window_.read(static_cast<const std::byte*>(call.send), bytes), bytes};
    } else {
      meeting.in = {window_.write(static_cast<std::byte*>(call.receive), bytes), bytes};
    }
  }
  window_.load();
  const int64_t met =
      rendezvous_ ? rendezvous_->meet(meetings, span_.end) : transport_.meet(meetings, span_.end);
  window_.store();
  for (const Meeting& m : meetings) {
    if (m.peer == rank_ || m.message == 0) continue;  // an absent rank's messages have no number
    messages->push_back({m.call->kind == Kind::send, m.message, static_cast<double>(bytes_of(*m.call))});
  }
  meet(met);
  pass(seconds_of_messages(calls));
}

// A rank's messages of a group travel together, in and out at once: the longest latency counts once.
double Engine::seconds_of_messages(std::span<const Call> calls) const {
  Messages sent(network_, world_ranks_[rank_]), received(network_, world_ranks_[rank_]);
  for (const Call& call : calls) {
    if (call.root == rank_) continue;
    (call.kind == Kind::send ? sent : received).add(world_ranks_[call.root], bytes_of(call));
  }
  return std::max(sent.latency(), received.latency()) + std::max(sent.transfer(), received.transfer());
}

// ---- Collectives ------------------------------------------------------------------------------------------

void Engine::run_collective(const Call& call) {
  const size_t in_parts = call.kind == Kind::all_reduce && bytes_of(call) > letter_bytes ? ranks_ : 1;
  const size_t round = in_parts * chunk / nccl_mpi::size_of(call.type);  // elements
  met_ = false;
  if (rendezvous_) return meet(rendezvous_->meet_all(call, span_.end));
  for (size_t first = 0; !met_ || first < call.count; first += round) {
    run_round(call, {first, std::min(round, call.count - first)});
    window_.store();
  }
}

void Engine::run_round(const Call& call, Range range) {
  switch (call.kind) {
    case Kind::all_gather:
      return all_gather(call, range);
    case Kind::broadcast:
      return broadcast(call, range);
    case Kind::reduce_scatter:
      return reduce_scatter(call, range);
    case Kind::all_reduce:
      return bytes_of(call) <= letter_bytes ? all_reduce_at_once(call, range)
                                            : all_reduce_in_parts(call, range);
    default:
      return;
  }
}

// The channels take the calls by turns.
double Engine::seconds_of_collectives(std::span<const Call> calls) const {
  std::vector<Collective> group;
  for (const Call& call : calls)
    group.push_back({timed_as(call.kind), static_cast<double>(bytes_of(call)), call.root});
  return collectives_.seconds(group, (static_cast<int>(calls.size()) + channels_ - 1) / channels_);
}

void Engine::all_gather(const Call& call, Range range) {
  const size_t bytes = range.second * nccl_mpi::size_of(call.type);
  Exchange all = no_exchange();
  std::byte* const own = window_.read(input(call, range.first), bytes);
  for (int rank = 0; rank < ranks_; ++rank) {
    all.to[rank] = {own, bytes};
    if (rank == rank_) continue;
    all.from[rank] = {window_.write(output(call, rank * call.count + range.first), bytes), bytes};
  }
  window_.load();
  if (output(call, rank_ * call.count) != call.send) {
    std::memcpy(window_.write(output(call, rank_ * call.count + range.first), bytes), own, bytes);
  }
  exchange(call, all);
}

void Engine::broadcast(const Call& call, Range range) {
  const size_t bytes = range.second * nccl_mpi::size_of(call.type);
  Exchange all = no_exchange();
  if (rank_ == call.root) {
    std::byte* const own = window_.read(input(call, range.first), bytes);
    window_.load();
    for (Piece& piece : all.to) piece = {own, bytes};
    if (call.send != call.receive) std::memcpy(window_.write(output(call, range.first), bytes), own, bytes);
  } else {
    all.from[call.root] = {window_.write(output(call, range.first), bytes), bytes};
  }
  exchange(call, all);
}

void Engine::reduce_scatter(const Call& call, Range range) {
  const size_t bytes = range.second * nccl_mpi::size_of(call.type);
  Exchange all = no_exchange();
  for (int rank = 0; rank < ranks_; ++rank) {
    all.to[rank] = {window_.read(input(call, rank * call.count + range.first), bytes), bytes};
  }
  window_.load();
  receive_contributions(&all, bytes);
  exchange(call, all);
  combine(window_.write(output(call, range.first), bytes), all.to[rank_].data, range.second, call);
}

void Engine::all_reduce_at_once(const Call& call, Range range) {
  const size_t bytes = range.second * nccl_mpi::size_of(call.type);
  Exchange all = no_exchange();
  std::byte* const own = window_.read(input(call, range.first), bytes);
  window_.load();
  for (Piece& piece : all.to) piece = {own, bytes};
  receive_contributions(&all, bytes);
  exchange(call, all);
  combine(window_.write(output(call, range.first), bytes), own, range.second, call);
}

// Each rank reduces one part and sends it to the others.
void Engine::all_reduce_in_parts(const Call& call, Range range) {
  const size_t element = nccl_mpi::size_of(call.type);
  Exchange scatter = no_exchange(), gather = no_exchange();
  for (int rank = 0; rank < ranks_; ++rank) {
    const auto [first, count] = part_of(range, rank, ranks_);
    scatter.to[rank] = {window_.read(input(call, first), count * element), count * element};
    gather.from[rank] = {window_.write(output(call, first), count * element), count * element};
  }
  window_.load();
  const Piece own = gather.from[rank_];
  receive_contributions(&scatter, own.bytes);
  exchange(call, scatter);
  combine(own.data, scatter.to[rank_].data, own.bytes / element, call);
  for (Piece& piece : gather.to) piece = own;
  exchange(call, gather);
}

// The first exchange of a collective begins with the letters.
void Engine::exchange(const Call& call, const Exchange& all) {
  std::vector<Meeting> meetings;
  for (int rank = 0; rank < ranks_; ++rank) {
    if (rank != rank_) meetings.push_back({&call, rank, all.to[rank], all.from[rank], 0});
  }
  if (met_) return transport_.move(meetings);
  meet(transport_.meet(meetings, span_.end));
  met_ = true;
}

Engine::Exchange Engine::no_exchange() const {
  return {std::vector<Piece>(ranks_), std::vector<Piece>(ranks_)};
}

const std::byte* Engine::input(const Call& call, size_t element) const {
  return static_cast<const std::byte*>(call.send) + element * nccl_mpi::size_of(call.type);
}

std::byte* Engine::output(const Call& call, size_t element) const {
  return static_cast<std::byte*>(call.receive) + element * nccl_mpi::size_of(call.type);
}

void Engine::receive_contributions(Exchange* all, size_t bytes) {
  scratch_.resize(ranks_ * chunk);
  for (int rank = 0; rank < ranks_; ++rank) all->from[rank] = {scratch(rank), bytes};
}

void Engine::combine(std::byte* out, std::byte* own, size_t count, const Call& call) {
  std::vector<const void*> contributions(ranks_);
  for (int rank = 0; rank < ranks_; ++rank) contributions[rank] = rank == rank_ ? own : scratch(rank);
  reduce(out, contributions, count, call.type, call.op);
}

}  // namespace nccl_mpi
