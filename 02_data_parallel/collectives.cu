// The primer of the collectives: `mpirun -n 3 collectives`. It shows what each collective does to a few
// numbers, then an all-reduce made of sends and receives (ring_all_reduce.h). At the end it prints how long
// NCCL's all-reduce and this one take for messages of growing size.
//
// Two bandwidths follow from the time, as nccl-tests define them. algbw = bytes / time is what the caller
// sees. busbw = algbw * 2 (n-1)/n counts the bytes that a rank sends in an all-reduce. It measures the links,
// and stays about the same when ranks are added.
#include <cmath>
#include <functional>

#include "ring_all_reduce.h"
#include "run/program.h"

using namespace pentatron;

namespace {

using Values = std::vector<accum>;

// Device memory for the numbers of one rank.
class Buffer {
 public:
  explicit Buffer(const Values& values) : x_(memory_.matrix<accum>(1, values.size())) {
    CUDA_CHECK(cudaMemcpy(data(), values.data(), values.size() * sizeof(accum), cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaDeviceSynchronize());  // the copy may return before pageable memory has reached the device
  }
  accum* data() const { return x_.data; }
  // The numbers, on the host, after all work issued to `stream` so far.
  Values values(cudaStream_t stream) const {
    Values result(x_.size());
    CUDA_CHECK(cudaStreamSynchronize(stream));
    CUDA_CHECK(cudaMemcpy(result.data(), data(), result.size() * sizeof(accum), cudaMemcpyDeviceToHost));
    return result;
  }

 private:
  DeviceArena memory_{Purpose::communication};
  AccumTensor x_;
};

// ---- What each collective does ----------------------------------------------------------------------------

std::string to_text(const Values& values) {
  std::vector<std::string> words;
  for (const accum value : values) words.push_back(std::to_string(static_cast<int64_t>(value)));
  return "[" + join(words, ", ") + "]";
}

using Operation = std::function<void(const accum* in, accum* out)>;

class Primer {
 public:
  Primer(World& world, int64_t seed) : world_(world), ranks_(world, world.all(), "primer"), seed_(seed) {}

  void collectives() {
    const int n = ranks_.ranks(), rank = ranks_.rank();
    const Values own(5, rank + 1);

    show("broadcast: all get what rank 0 has", own, own.size(),
         [&](const accum*, accum* out) { ranks_.broadcast(out, own.size(), 0); });

    show("all-reduce: all get the sum", own, own.size(),
         [&](const accum* in, accum* out) { ranks_.all_reduce(in, out, own.size()); });

    show("all-gather: all get the parts of all", {own[0], own[0]}, 2 * n,
         [&](const accum* in, accum* out) { ranks_.all_gather(in, out, 2); });

    Values parts;  // part i: ((j+1) (rank+1))^(i+1), j = 0, 1; from the fourth part on to the third power
    for (int i = 0; i < n; ++i) {
      for (int j = 0; j < 2; ++j) parts.push_back(std::pow((j + 1) * (rank + 1), std::min(i, 2) + 1));
    }
    show("reduce-scatter: rank r gets the sum of part r (of two numbers)", parts, 2,
         [&](const accum* in, accum* out) { ranks_.reduce_scatter(in, out, 2); });

    Values addressed;  // to rank i + 1, counted from 1: the sender's number, then the receiver's
    for (int i = 0; i < n; ++i) addressed.push_back(10 * (rank + 1) + i + 1);
    show("all-to-all: part i of rank r becomes part r of rank i", addressed, n,
         [&](const accum* in, accum* out) { ranks_.all_to_all(in, out, 1); });

    show("send and receive: from each rank to the next", own, own.size(),
         [&](const accum* in, accum* out) { ring_step(in, own.size(), out, own.size(), ranks_); });
  }

  void ring() {
    Values parts;  // one number a part
    for (int i = 0; i < ranks_.ranks(); ++i) parts.push_back(seed_ + 10 * (ranks_.rank() + 1) + i + 1);
    const Buffer received(Values(2));
    ranks_.reset_traffic();
    show("ring, first half (reduce-scatter): part r of rank r is the sum", parts, parts.size(),
         [&](const accum*, accum* out) { ring_reduce_scatter(out, parts.size(), received.data(), ranks_); });
    show_traffic();
    show("ring, both halves (and all-gather): all parts are", parts, parts.size(),
         [&](const accum*, accum* out) { ring_all_reduce(out, parts.size(), received.data(), ranks_); });
    show_traffic();
  }

  void bandwidth(size_t max_bytes) {
    say("\nAll-reduce on %d ranks: time, algbw = bytes / time, busbw = algbw * 2 (n-1)/n\n", ranks_.ranks());
    say("%12s%36s%36s\n", "", "ncclAllReduce", "ring_all_reduce.h");
    say("%12s", "bytes");
    for (int i = 0; i < 2; ++i) say("%12s%12s%12s", "us", "algbw GB/s", "busbw GB/s");
    say("\n");
    for (size_t bytes = 4096; bytes <= max_bytes; bytes *= 4) measure(bytes);
  }

 private:
  void measure(size_t bytes) {
    const int n = ranks_.ranks(), rank = ranks_.rank();
    const size_t size = bytes / sizeof(accum);
    Values values(size);  // whole numbers, whose sums are exact in any order
    for (size_t i = 0; i < size; ++i) values[i] = static_cast<accum>((i + rank) % 17);
    const Buffer in(values), nccl(values), ring(values), received(Values(size / n + 1));

    const double nccl_seconds = seconds([&] { ranks_.all_reduce(in.data(), nccl.data(), size); });
    // The ring works in place: each repetition reduces the result of the one before. Zeros stay zeros.
    const Buffer zeros{Values(size)};
    const double ring_seconds =
        seconds([&] { ring_all_reduce(zeros.data(), size, received.data(), ranks_); });
    ring_all_reduce(ring.data(), size, received.data(), ranks_);
    if (nccl.values(ranks_.stream()) != ring.values(ranks_.stream()))
      fail("ring_all_reduce", "other sums than ncclAllReduce", __FILE__, __LINE__);

    say("%12zu", bytes);
    for (const double s : {nccl_seconds, ring_seconds}) {
      const double algbw = static_cast<double>(bytes) / s / 1e9;
      say("%12.1f%12.3f%12.3f", 1e6 * s, algbw, algbw * 2 * (n - 1) / n);
    }
    say("\n");
  }

  // Seconds of one call (a mean), on the slowest rank.
  double seconds(const std::function<void()>& call) {
    constexpr int calls = 5;
    double begin = 0;
    for (int i = -1; i < calls; ++i) {
      if (i == 0) {  // the first call warms up
        CUDA_CHECK(cudaStreamSynchronize(ranks_.stream()));
        world_.largest({0});  // a barrier: all ranks begin together
        begin = now();
      }
      call();
    }
    CUDA_CHECK(cudaStreamSynchronize(ranks_.stream()));
    return world_.largest({(now() - begin) / calls})[0];
  }

  // Runs an operation and prints every rank's numbers before and after it. An operation in place takes `out`,
  // which begins with the same numbers.
  void show(const char* title, const Values& before, size_t size_after, const Operation& operation) {
    Values begin = before;
    begin.resize(size_after);
    const Buffer in(before), out(begin);
    operation(in.data(), out.data());
    const std::string line = to_text(before) + "  ->  " + to_text(out.values(ranks_.stream()));
    const std::vector<std::string> lines = world_.gather(line);  // on rank 0
    say("\n%s\n", title);
    for (size_t rank = 0; rank < lines.size(); ++rank) say("  rank %zu  %s\n", rank, lines[rank].c_str());
  }

  // What a rank has sent since this was called before, or since the collectives; the largest of all ranks.
  void show_traffic() {
    say("  sent by each rank: %.0f\n", world_.largest({sent_bytes(ranks_.traffic()) / sizeof(accum)})[0]);
    ranks_.reset_traffic();
  }

  template <class... Arguments>
  void say(const char* format, Arguments... arguments) const {
    if (world_.rank() == 0) std::printf(format, arguments...), std::fflush(stdout);
  }

  World& world_;
  Communicator ranks_;
  const int64_t seed_;
};

}  // namespace

int main(int argc, char** argv) {
  return run_program_on_ranks(argc, argv, [&](World& world) {
    CommunicationConfig options;
    int64_t max_bytes = 16 << 20, seed = 0;  // of the largest message
    CommandLine line("Shows what NCCL's collectives do, and how fast.");
    declare_device(line, options);
    declare_communication(line, options);
    line.group("Messages");
    line.number("--max-bytes", max_bytes, 4096, int64_t{1} << 32,
                "the largest message; they begin with 4096 bytes, each four times the one before");
    line.number("--seed", seed, 0, 1 << 20, "is added to each number of the ring");
    line.parse(argc, argv);
    if (world.ranks() == 1) throw UsageError("mpirun -n", "1", "2 ranks or more");
    world.configure(options);
    Primer primer(world, seed);
    primer.collectives();
    primer.ring();
    primer.bandwidth(max_bytes);
  });
}
