// An all-reduce made of sends and receives round a ring (Patarasu and Yuan, 2009): a reduce-scatter, then an
// all-gather. The array is cut into n parts, one for each rank. Each half has n - 1 steps. In a step every
// rank sends one part to the next rank and receives another from the previous rank, so every link is busy. A
// rank sends 2 (n-1)/n of the array: less than twice its size, for any number of ranks.
//
//   Three ranks, part 0:   1 -> 2 -> 0   reduce-scatter: each rank adds its own values; rank 0 has the sum
//                          0 -> 1 -> 2   all-gather: the ranks copy the sum
//   Part p takes the same route, p ranks further on. All parts travel at the same time.
#pragma once

#include "kernels/elementwise.h"
#include "ranks/comm.h"

namespace pentatron {

// A part of an array. If the number of ranks does not divide the array, the sizes of parts differ by one.
struct RingPart {
  size_t begin, size;  // elements
};

// Part `index` of an array of `whole` elements, for an index of -2 * ranks or more: part -1 is the last one.
inline RingPart ring_part(int index, int ranks, size_t whole) {
  const size_t i = (index + 2 * ranks) % ranks;
  const size_t begin = whole * i / ranks, end = whole * (i + 1) / ranks;
  return {begin, end - begin};
}

// Sends a part to the next rank and receives one from the previous rank. The two form one group, because a
// send ends only when it is received. If every rank sent first, all would wait for ever.
inline void ring_step(const accum* sent /*[sent_size]*/, size_t sent_size,
                      accum* received /*[received_size]*/, size_t received_size, Communicator& ranks) {
  const int n = ranks.ranks(), rank = ranks.rank();
  const Communicator::Group group(ranks);
  ranks.send(sent, sent_size, (rank + 1) % n);
  ranks.receive(received, received_size, (rank + n - 1) % n);
}

// Afterwards part r on rank r is the sum over all ranks. The other parts hold partial sums. The sum of part p
// starts on rank p + 1 and goes once round the ring; each rank adds its own part p. `received` is scratch.
inline void ring_reduce_scatter(accum* data /*[size]*/, size_t size, accum* received /*[size / ranks + 1]*/,
                                Communicator& ranks) {
  const int n = ranks.ranks(), rank = ranks.rank();
  for (int step = 0; step < n - 1; ++step) {
    const RingPart sent = ring_part(rank - 1 - step, n, size), added = ring_part(rank - 2 - step, n, size);
    ring_step(data + sent.begin, sent.size, received, added.size, ranks);
    accumulate(received, data + added.begin, added.size, ranks.stream());
  }
}

// Before: rank r has part r. Afterwards: every rank has all parts. A rank sends what it received in the step
// before.
inline void ring_all_gather(accum* data /*[size]*/, size_t size, Communicator& ranks) {
  const int n = ranks.ranks(), rank = ranks.rank();
  for (int step = 0; step < n - 1; ++step) {
    const RingPart sent = ring_part(rank - step, n, size), received = ring_part(rank - 1 - step, n, size);
    ring_step(data + sent.begin, sent.size, data + received.begin, received.size, ranks);
  }
}

// Sums `data` over all ranks, in place. Both halves run on the communicator's stream, in order, so they need
// no event between them.
inline void ring_all_reduce(accum* data /*[size]*/, size_t size, accum* received /*[size / ranks + 1]*/,
                            Communicator& ranks) {
  ring_reduce_scatter(data, size, received, ranks);
  ring_all_gather(data, size, ranks);
}

}  // namespace pentatron
