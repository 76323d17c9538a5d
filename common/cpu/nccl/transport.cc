#include "transport.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <thread>

#include "device/errors.h"
#include "device_access.h"
#include "reduce.h"

namespace nccl_mpi {
namespace {

// A letter of a send is not taken for one of a receive, whatever order they are issued in.
enum Tag : int { kCollective, kToReceiver, kToSender, kData };

int tag_out(Kind kind) {
  if (!is_point_to_point(kind)) return kCollective;
  return kind == Kind::send ? kToReceiver : kToSender;
}

int tag_in(Kind kind) {
  if (!is_point_to_point(kind)) return kCollective;
  return kind == Kind::send ? kToSender : kToReceiver;
}

bool fits_letter(const Piece& piece) { return piece.bytes <= letter_bytes; }

const char* name_of(Kind kind) {
  constexpr const char* names[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather",
                                   "ncclBroadcast", "ncclSend",          "ncclRecv"};
  return names[static_cast<int>(kind)];
}

const char* name_of(ncclDataType_t type) {
  constexpr const char* names[] = {"", "", "int32", "", "", "", "float16", "float", "double", "bfloat16"};
  return names[type];
}

const char* name_of(ncclRedOp_t op) {
  constexpr const char* names[] = {"sum", "prod", "max"};
  return names[op];
}

void check_mpi(int status) {
  if (status == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(status, text, &length);
  throw Failure{ncclSystemError, std::string("MPI: ") + text};
}

}  // namespace

bool is_point_to_point(Kind kind) { return kind == Kind::send || kind == Kind::receive; }

size_t bytes_of(const Call& call) { return call.count * size_of(call.type); }

std::string description(const Call& call) {
  std::string text =
      std::string(name_of(call.kind)) + "(count " + std::to_string(call.count) + ", " + name_of(call.type);
  const bool reduces = call.kind == Kind::all_reduce || call.kind == Kind::reduce_scatter;
  if (reduces) text += std::string(", ") + name_of(call.op);
  if (call.kind == Kind::broadcast) text += ", root " + std::to_string(call.root);
  if (is_point_to_point(call.kind)) text += ", peer " + std::to_string(call.root);
  return text + ")";
}

void Patience::wait() {
  using namespace std::chrono;
  constexpr int yields = 10;
  const auto now = steady_clock::now();
  if (looks_++ == 0) start_ = now;
  if (looks_ <= yields) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::clamp<nanoseconds>((now - start_) / 8, 20us, 500us));
  }
}

Transport::Transport(MPI_Comm comm, const std::vector<int>& world_ranks, const std::atomic<bool>& aborted)
    : comm_(comm), world_ranks_(world_ranks), aborted_(aborted) {
  MPI_Comm_rank(comm, &rank_);
}

int64_t Transport::meet(std::span<Meeting> meetings, int64_t time) {
  sent_.resize(std::max(sent_.size(), meetings.size()));
  received_.resize(sent_.size());
  for (size_t i = 0; i < meetings.size(); ++i) {
    const Call& call = *meetings[i].call;
    const Piece& out = meetings[i].out;
    receive(&received_[i], sizeof(Letter), meetings[i].peer, tag_in(call.kind));
    sent_[i].header = {call.kind, call.type, call.op, call.root, call.count, meetings[i].message, time};
    const size_t enclosed = fits_letter(out) ? out.bytes : 0;
    if (enclosed > 0) std::memcpy(sent_[i].data, out.data, enclosed);
    send(&sent_[i], sizeof(Header) + enclosed, meetings[i].peer, tag_out(call.kind));
  }

  // A collective goes on when all its ranks are here; a message when its two are, whatever else is in the
  // group, as in NCCL: its receiver may need it before it comes to the rest. Messages from one rank to
  // another keep their order.
  int64_t came = time;
  const size_t together = meetings.empty() || is_point_to_point(meetings[0].call->kind) ? 1 : meetings.size();
  std::vector<bool> begun(meetings.size());
  wait([&] {
    std::set<std::pair<int, Kind>> late;
    for (size_t i = 0; i < meetings.size(); i += together) {
      const std::pair partner(meetings[i].peer, meetings[i].call->kind);
      if (begun[i] || late.contains(partner)) continue;
      begun[i] = letters_are_here(i, together);
      if (begun[i])
        came = std::max(came, open_letters(meetings.subspan(i, together), i));
      else
        late.insert(partner);
    }
    return late.empty();
  });
  return came;
}

bool Transport::letters_are_here(size_t first, size_t count) {
  Unseen unseen;
  int here = 0;
  check_mpi(MPI_Testall(static_cast<int>(count), &receives_[first], &here, MPI_STATUSES_IGNORE));
  return here;
}

// Reads the letters from `first` on, and begins to move what did not fit. Returns when their senders came.
int64_t Transport::open_letters(std::span<Meeting> meetings, size_t first) {
  check_agreement(meetings, first);
  int64_t came = 0;
  for (size_t i = 0; i < meetings.size(); ++i) {
    Meeting& meeting = meetings[i];
    const Letter& letter = received_[first + i];
    if (meeting.call->kind == Kind::receive) meeting.message = letter.header.message;
    came = std::max(came, letter.header.came);
    if (fits_letter(meeting.in) && meeting.in.bytes > 0)
      std::memcpy(meeting.in.data, letter.data, meeting.in.bytes);
    begin_move({meeting.call, meeting.peer, fits_letter(meeting.out) ? Piece{} : meeting.out,
                fits_letter(meeting.in) ? Piece{} : meeting.in});
  }
  return came;
}

// MPI counts bytes by an int.
void Transport::begin_move(const Meeting& meeting) {
  constexpr size_t most = 1 << 30;
  const auto& [call, peer, out, in, message] = meeting;
  for (size_t at = 0; at < in.bytes; at += most)
    receive(in.data + at, std::min(most, in.bytes - at), peer, kData);
  for (size_t at = 0; at < out.bytes; at += most)
    send(out.data + at, std::min(most, out.bytes - at), peer, kData);
}

void Transport::move(std::span<const Meeting> meetings) {
  for (const Meeting& meeting : meetings) begin_move(meeting);
  wait([] { return true; });
}

// All ranks of a collective see the same letters, and so come to the same verdict. In a send only its two
// ranks do.
void Transport::check_agreement(std::span<const Meeting> meetings, size_t first) const {
  const auto name = [&](int rank) { return pentatron::rank_name(world_ranks_[rank]); };
  std::map<std::string, std::string> ranks_by_call;
  for (size_t i = 0; i < meetings.size(); ++i) {
    const Call& mine = *meetings[i].call;
    const Header& theirs = received_[first + i].header;
    const Call call = {theirs.kind, nullptr, nullptr, theirs.count, theirs.type, theirs.op, theirs.root};
    if (is_point_to_point(mine.kind)) {
      if (call.count == mine.count && call.type == mine.type) continue;
      throw Failure{ncclInvalidUsage, "a send and its receive differ: " + name(rank_) + " calls " +
                                          description(mine) + ", " + name(meetings[i].peer) + " calls " +
                                          description(call)};
    }
    if (ranks_by_call.empty()) ranks_by_call[description(mine)] = name(rank_);
    std::string& ranks = ranks_by_call[description(call)];
    ranks += (ranks.empty() ? "" : ", ") + name(meetings[i].peer);
  }
  if (ranks_by_call.size() <= 1) return;
  std::string text = "the ranks of a collective differ:";
  for (const auto& [call, ranks] : ranks_by_call) text += " " + ranks + " calls " + call + ";";
  text.pop_back();
  throw Failure{ncclInvalidUsage, text};
}

void Transport::send(const void* data, size_t bytes, int peer, int tag) {
  Unseen unseen;
  sends_.emplace_back();
  check_mpi(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, peer, tag, comm_, &sends_.back()));
}

void Transport::receive(void* data, size_t bytes, int peer, int tag) {
  Unseen unseen;
  receives_.emplace_back();
  check_mpi(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, peer, tag, comm_, &receives_.back()));
}

void Transport::wait(const std::function<bool()>& has_begun) {
  Unseen unseen;
  Patience patience;
  for (;; patience.wait()) {
    bool begun = false;
    try {
      begun = has_begun();
    } catch (const Failure&) {
      cancel();
      throw;
    }
    int sent = 0, received = 0;
    check_mpi(
        MPI_Testall(static_cast<int>(receives_.size()), receives_.data(), &received, MPI_STATUSES_IGNORE));
    check_mpi(MPI_Testall(static_cast<int>(sends_.size()), sends_.data(), &sent, MPI_STATUSES_IGNORE));
    if (begun && sent && received) break;
    if (aborted_.load(std::memory_order_relaxed)) {
      cancel();
      throw Failure{ncclInProgress, "aborted"};
    }
  }
  sends_.clear();
  receives_.clear();
}

// Takes back the receives, so that a late message does not write into memory that may be gone. Messages that
// nobody will receive are left to MPI.
void Transport::cancel() {
  for (MPI_Request& request : receives_) {
    if (request == MPI_REQUEST_NULL) continue;
    MPI_Cancel(&request);
    MPI_Request_free(&request);
  }
}

}  // namespace nccl_mpi
