#!/usr/bin/env python3
"""makespan.py [SLOTS]: how long attention's blocks take on a GPU that runs SLOTS of them at once (an H100: 2
x 132).

1.00: as long as if all slots had equal work. With causality blocks take unequal times, and who begins a long
one last waits for it. Two orders: pair by pair of sequence and head, and place_of
(tensor_cores/attention_tiles.h): the longest first. Forward, a block has a tile of 128 queries, and a step is
a tile of 64 keys. Backward, it has 96 keys, and a step is a tile of 64 queries; in its last third the block
adds to dQ, when the block of the keys before has added. That waiting is counted in the new order only, and
waiting at the end, for other heads to add to dK and dV, is not. Heads of 64."""

import heapq
import sys


def pair_by_pair(pairs, tiles):
    return [(pair, tile) for pair in range(pairs) for tile in range(tiles)]


def longest_first(pairs, tiles, section):
    last = max(pairs // section, 1) - 1
    sections = [range(section * i, pairs if i == last else section * (i + 1)) for i in range(last + 1)]
    return [(pair, tile) for section in sections for tile in range(tiles) for pair in section]


def run(order, steps, slots, turns=False):
    """(slot, pair, begin, end) of each block, in steps. steps[tile]: of a block; a tile counts from the
    longest."""
    free, blocks, added = [(0, slot) for slot in range(slots)], [], {}
    for pair, tile in order:
        begin, slot = heapq.heappop(free)
        now = begin
        for step in range(steps[tile]):
            now = max(now + 2 / 3, added[pair, tile - 1, step] if turns and tile > 0 else 0) + 1 / 3
            added[pair, tile, step] = now
        heapq.heappush(free, (now, slot))
        blocks.append((slot, pair, begin, now))
    return blocks


def section_of(queries):
    return min(max(32 * 2048 // queries, 4), 32)


def both_orders(pairs, steps, slots, reverse, turns, section=32):
    """Of each the time over equal shares, and the blocks. `reverse`: pair by pair, a pair's shortest block
    began first."""
    share = pairs * sum(steps) / slots
    old = run(pair_by_pair(pairs, len(steps)), steps[::-1] if reverse else steps, slots)
    new = run(longest_first(pairs, len(steps), section), steps, slots, turns)
    return [(max(end for *_, end in blocks) / share, blocks) for blocks in (old, new)]


def steps_of_backward(queries):
    return [-(-queries // 64) - first // 64 for first in range(0, queries, 96)]


def steps_of_forward(queries):
    return [-(-min(first + 128, queries) // 64) for first in reversed(range(0, queries, 128))]


def main(slots=264):
    print("                              pair by pair, longest first")
    print("sequences, tokens, heads     forward      backward")
    for sequences, queries, heads in ((8, 2048, 9), (8, 2048, 32), (1, 8192, 32), (1, 8192, 4), (1, 8192, 1)):
        pairs = sequences * heads
        forward = both_orders(pairs, steps_of_forward(queries), slots, False, False, section_of(queries))
        backward = both_orders(pairs, steps_of_backward(queries), slots, True, True, section_of(queries))
        print(
            f"{sequences:9}, {queries:6}, {heads:5}     ",
            "   ".join(f"{old:.2f}, {new:.2f}" for (old, _), (new, _) in (forward, backward)),
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
