// An all-reduce made of sends and receives round a ring (Patarasu and Yuan, 2009): a reduce-scatter, then an
// all-gather. The array is cut into as many parts as there are ranks, and in each of n - 1 steps every rank
// sends one part to the next rank and receives another from the previous one. Every link is busy in every
// step, and a rank sends 2 (n-1)/n of the array: about twice its size, however many ranks there are.
//
//   Part 0 of three:   1 -> 2 -> 0   reduce-scatter: each rank adds its own; then rank 0 has the sum
//                      0 -> 1 -> 2   all-gather: the sum is copied
//   Parts 1 and 2 travel likewise, one and two ranks further on, at the same time.
#pragma once

#include "kernels/kernels.h"
#include "ranks/comm.h"

namespace pentatron {

// A part of an array, whose sizes differ by at most one where the ranks do not divide the whole.
struct RingPart {
  size_t begin, size;  // elements
};

// Any `index` is valid: the part before part 0 is the last one.
inline RingPart ring_part(int index, int ranks, size_t whole) {
  const size_t i = (index + 2 * ranks) % ranks;
  const size_t begin = whole * i / ranks, end = whole * (i + 1) / ranks;
  return {begin, end - begin};
}

// Passes a part on to the next rank, and takes one from the previous rank. In one group, because a send
// ends only when it is received: if all ranks sent first, each would wait for the next for ever.
inline void ring_step(const accum* sent /*[sent_size]*/, size_t sent_size,
                      accum* received /*[received_size]*/, size_t received_size, Communicator& ranks) {
  const int n = ranks.ranks(), rank = ranks.rank();
  const Communicator::Group group(ranks);
  ranks.send(sent, sent_size, (rank + 1) % n);
  ranks.receive(received, received_size, (rank + n - 1) % n);
}

// In the end part r of rank r is the sum over all ranks; the other parts hold what was passed on. The sum of
// part p begins on rank p + 1 and travels once round the ring, each rank adding its own.
inline void ring_reduce_scatter(accum* data /*[size]*/, size_t size, accum* received /*[size / ranks + 1]*/,
                                Communicator& ranks) {
  const int n = ranks.ranks(), rank = ranks.rank();
  for (int step = 0; step < n - 1; ++step) {
    const RingPart sent = ring_part(rank - 1 - step, n, size), added = ring_part(rank - 2 - step, n, size);
    ring_step(data + sent.begin, sent.size, received, added.size, ranks);
    accumulate(received, data + added.begin, added.size, ranks.stream());
  }
}

// From part r on rank r to all parts on all ranks: what came in one step is passed on in the next.
inline void ring_all_gather(accum* data /*[size]*/, size_t size, Communicator& ranks) {
  const int n = ranks.ranks(), rank = ranks.rank();
  for (int step = 0; step < n - 1; ++step) {
    const RingPart sent = ring_part(rank - step, n, size), received = ring_part(rank - 1 - step, n, size);
    ring_step(data + sent.begin, sent.size, data + received.begin, received.size, ranks);
  }
}

// All on the communicator's stream, so nothing has to be waited for in between.
inline void ring_all_reduce(accum* data /*[size]*/, size_t size, accum* received /*[size / ranks + 1]*/,
                            Communicator& ranks) {
  ring_reduce_scatter(data, size, received, ranks);
  ring_all_gather(data, size, ranks);
}

}  // namespace pentatron
