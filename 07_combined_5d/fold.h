// Folded worlds: a dry run of thousands of ranks for which a few are enough (--ranks). Most ranks of a mesh
// do the same as others at the same moment:
//
//   tensor   rank 1 and all after it: only rank 0 counts the loss, and the norm of what all hold
//   data     one block and another. A block is one data rank, or those that share out the experts, with all
//            their tensor, context and pipeline ranks
//
// Blocks meet in the sums of gradients, in ZeRO's gathers, and where all ranks sum the norm. Nothing else
// leaves a block. So a block can be left out if one that is there
//   - sits alike: where it crosses from node to node, so does the other;
//   - does the same or more for the shards that it owns (OwnWork): with ZeRO they differ.
// It then comes to each meeting no later than the other, and nobody would have waited for it. A program's
// time is a longest path; what is left out is never on it alone. So the times of the ranks that are there are
// exact, and so are their memory and traffic. Means over all ranks take each as the one that stands for it.
//
// Where all context ranks, or all that share out experts, meet in each exchange (folds_lanes), a block is
// only a lane: one of them, with its tensor and pipeline ranks. A lane that covers another one also sees as
// much of a sequence. And for each lane of a group of which one is there, one is there that covers it: so all
// exchanges wait for the right one. Between attention and the kernels of the shards all blocks meet. So it
// does not matter that one lane has the longest attention, and another one the longest shards.
//
// Other lanes can't be left out. In a ring a delay goes from neighbour to neighbour, so another rank comes
// last to each hop. And with experts the host waits for counts of rows: a lane's delay by its shards reaches
// the shards of other lanes, without a meeting of all blocks.
//
// A communicator that has an absent rank also has the one that stands for it. The stand-in of NCCL lets those
// meet that are there, and counts the time that all its members would take where they sit (nccl.h).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <vector>

#include "device/device_profile.h"
#include "expert_parallel.h"
#include "kernels/kernels.h"
#include "mesh.h"

namespace pentatron {

// Which ranks share a node: 0 for the first one and those of its node, 1 for the next node, ... [ranks]
inline std::vector<int> nodes_of(const std::vector<int>& ranks, int ranks_per_node) {
  std::map<int, int> numbers;
  std::vector<int> nodes;
  for (const int rank : ranks)
    nodes.push_back(
        numbers.try_emplace(rank / ranks_per_node, static_cast<int>(numbers.size())).first->second);
  return nodes;
}

// What a rank does for the shards that it owns: kernels of the initialisation, of the norm and of the
// optimizer's step; and the gradients in them that the tensor ranks sum.
struct OwnWork {
  // Kernels one after the other on a stream, in nanoseconds.
  struct Kernels {
    int64_t launches = 0, sum = 0;
    int64_t end = 0;  // if the stream is idle and the host begins at 0
    void add(int64_t time, int64_t launch) {
      ++launches, sum += time;
      end = std::max(end, launches * launch) + time;
    }
    bool covers(const Kernels& other) const {
      return launches >= other.launches && sum >= other.sum && end >= other.end;
    }
  };
  std::array<Kernels, 3> kernels;
  int64_t sums = 0, summed = 0, largest_sum = 0;  // calls, elements, elements of one

  // Does no less at any time.
  bool covers(const OwnWork& other) const {
    return std::ranges::equal(kernels, other.kernels, &Kernels::covers) && sums >= other.sums &&
           summed >= other.summed && largest_sum >= other.largest_sum;
  }
};

// The work of ranks whose stages have `units`.
class OwnWorks {
 public:
  OwnWorks(const CombinedOptions& options, const MeshShape& shape, const DeviceProfile& gpu)
      : options_(options), shape_(shape), gpu_(gpu), launch_(nanoseconds(gpu.launch_seconds)) {
    for (int tensor_rank = 0; tensor_rank < std::min(shape.tp, 2); ++tensor_rank) {
      const std::vector<Replicas> replicas = {{0, replicas_of(dense_group)}, {0, replicas_of(expert_group)}};
      declared_.emplace_back(ParameterLayout{tensor_rank, shape.tp, replicas, {}});
      Declared feed_forward(options);
      declare_transformer(options.model, feed_forward, declared_.back());
    }
  }

  OwnWork of(const MeshPlace& at, const std::vector<int>& units) {
    OwnWork work;
    for (const int group : {dense_group, expert_group}) {
      for (const int unit : units)
        add(shard(std::min(at.tp, 1), group, kind_of(unit), replica(at, group)), work);
    }
    return work;
  }

  // The number of a rank among those that hold the same weights: its rank in Mesh::gradients, or in
  // Mesh::expert_gradients.
  int replica(const MeshPlace& at, int group) const {
    const bool of_second_copy = shape_.copies == 2 && at.pp >= shape_.pp / 2;
    const int in_copy = at.cp + shape_.cp * at.dp + (of_second_copy ? shape_.cp * shape_.dp : 0);
    return group == expert_group ? in_copy / shape_.ep : in_copy;
  }

 private:
  // Declares what ExpertParallel does, which needs communicators. Ranks hold equally many experts.
  class Declared : public FeedForward {
   public:
    explicit Declared(const CombinedOptions& o) : o_(o) {}
    void declare(Parameters& parameters, const ModelConfig& model, int layer) override {
      if (model.experts == 0) return FeedForward::declare(parameters, model, layer);
      declare_gate(o_, parameters, layer);
      declare_experts(model, model.experts / o_.ep, 0, parameters, layer);
      if (model.shared_experts > 0) shared_.declare(parameters, model, layer);
      if (model.has_balance_bias()) declare_bias(o_, parameters, layer);
    }

   private:
    const CombinedOptions& o_;
    FeedForward shared_{"mlp.shared_experts.", o_.model.shared_experts};
  };

  // Of one shard: the times of its kernels, and the sums over tensor ranks.
  struct OfShard {
    std::array<std::vector<int64_t>, 3> kernels;
    std::vector<int64_t> sums;
  };

  static int64_t nanoseconds(double seconds) { return std::llround(seconds * 1e9); }
  int64_t time(const Cost& cost) const { return nanoseconds(gpu_.seconds(cost)); }
  int replicas_of(int group) const {
    return shape_.cp * shape_.dp * shape_.copies / (group == expert_group ? shape_.ep : 1);
  }

  // The first unit with the same parameters: all layers are alike.
  int kind_of(int unit) const {
    const bool is_layer = unit != embedding_unit && unit != head_unit(options_.model.layers);
    return is_layer ? unit_of_layer(0) : unit;
  }

  const OfShard& shard(int tensor_rank, int group, int unit, int replica) {
    const auto [entry, is_new] = shards_.try_emplace({tensor_rank, group, unit, replica});
    OfShard& work = entry->second;
    if (!is_new) return work;
    Parameters& p = declared_[tensor_rank];
    const size_t whole = p.group(group).size(unit), size = whole / replicas_of(group);
    const bool sharded = options_.zero_stage > 0;
    const Shard own = {group,   unit,   sharded ? replica * size : 0, sharded ? (replica + 1) * size : whole,
                       nullptr, nullptr};
    const bool adamw = options_.optimizer == OptimizerKind::adamw;
    if (own.size() > 0) work.kernels[0].push_back(time(moves(real_bytes * static_cast<double>(own.size()))));
    for (const ParameterRange& range : p.ranges(own)) {
      const double n = static_cast<double>(range.size);
      const double bytes = range.parameter->sign_rate > 0 ? sign_bytes : adamw ? adamw_bytes : sgd_bytes;
      work.kernels[0].push_back(time(moves(real_bytes * n)));
      work.kernels[2].push_back(time(moves(bytes * n)));
      if (held_by_all(range.parameter->tensor_split)) work.sums.push_back(range.size);
    }
    // Without shards all replicas hold the same, and the first one counts it. Neighbours are one sum.
    size_t begin = 0, end = 0;
    const auto add_sum = [&] {
      if (end == begin) return;
      work.kernels[1].push_back(time(moves(accum_bytes * static_cast<double>(end - begin))));
      work.kernels[1].push_back(time(little));
    };
    for (const ParameterRange& range : p.counted_ranges(own)) {
      if (range.parameter->sign_rate > 0 || (own.size() == whole && replica > 0)) continue;
      if (range.begin_in_shard != end) add_sum(), begin = range.begin_in_shard;
      end = range.begin_in_shard + range.size;
    }
    add_sum();
    return work;
  }

  void add(const OfShard& shard, OwnWork& work) const {
    for (size_t i = 0; i < work.kernels.size(); ++i) {
      for (const int64_t time : shard.kernels[i]) work.kernels[i].add(time, launch_);
    }
    for (const int64_t elements : shard.sums) {
      work.sums += 1, work.summed += elements;
      work.largest_sum = std::max(work.largest_sum, elements);
    }
  }

  const CombinedOptions& options_;
  const MeshShape shape_;
  const DeviceProfile gpu_;
  const int64_t launch_;
  std::vector<Parameters> declared_;              // by the first tensor rank, and by another one
  std::map<std::array<int, 4>, OfShard> shards_;  // by tensor rank, group, unit, replica
};

// Whether a block is one lane. Experts must get equally many rows, and no other ranks have the same ones.
inline bool folds_lanes(const CombinedOptions& o, const MeshShape& shape) {
  const int64_t copies = int64_t{o.micro_batch_size} * o.sequence_length / o.expert_chunks * o.model.top_k;
  if (shape.ep > 1) return shape.ep == shape.dp && shape.cp == 1 && copies % o.model.experts == 0;
  if (o.model.experts > 0) return false;
  return o.cp_exchange == CpExchange::all_gather || o.cp_exchange == CpExchange::ulysses;
}

// Whether context rank `a` of a lane has as much attention as `b`, in each step. With all keys gathered, a
// later one sees more of them. In a zigzag it has as many products: all its queries and half of the keys of
// another rank, and not half of its queries and all those keys. So it merges more rows. But naive attention's
// products take longer or shorter by their shape. With Ulysses all have the same, but the last one's two
// parts of a sequence in a zigzag are neighbours, and one message.
inline bool sees(const CombinedOptions& o, const MeshShape& shape, int a, int b) {
  const bool zigzag = o.cp_layout == CpLayout::zigzag;
  if (o.cp_exchange == CpExchange::ulysses) return !zigzag || (a == shape.cp - 1) == (b == shape.cp - 1);
  return zigzag && o.attention == Attention::naive ? a == b : a >= b;
}

// The ranks that have to be there. units [pp]: those of each stage.
inline PresentRanks present_ranks(const CombinedOptions& options, const MeshShape& shape,
                                  const std::vector<std::vector<int>>& units, int ranks_per_node,
                                  const DeviceProfile& gpu) {
  // Those that are there: how many each of them stands for. Of tensor ranks, and of blocks, by their number.
  std::map<int, int> columns, blocks;

  // Tensor ranks. With --dispatch once each has another share of the rows, and sends it to the others.
  const bool alike = options.dispatch != Dispatch::once;
  std::map<std::vector<int>, int> column_of;  // by the nodes of all ranks with this tensor rank
  for (int tp = 0; tp < shape.tp; ++tp) {
    std::vector<int> ranks;
    for (int other = 0; other < shape.ranks(); other += shape.tp) ranks.push_back(other + tp);
    const bool first = tp == 0 || !alike;
    ++columns[first ? tp : column_of.try_emplace(nodes_of(ranks, ranks_per_node), tp).first->second];
  }

  // Blocks of lanes. Lane cp + CP dp has the ranks tp + TP (lane + lanes pp).
  const int lanes = shape.cp * shape.dp, group = std::lcm(shape.cp, shape.ep);
  const bool alone = folds_lanes(options, shape);
  const int block_size = alone ? 1 : group;
  const auto ranks_of = [&](int first_lane, int count) {
    std::vector<int> ranks;
    for (int pp = 0; pp < shape.pp; ++pp)
      for (int i = 0; i < count * shape.tp; ++i) ranks.push_back(i + shape.tp * (first_lane + lanes * pp));
    return ranks;
  };
  struct Block {
    std::vector<int> nodes;  // of its ranks, of its group's, and how many of these are beside each in a node
    std::vector<OwnWork> works;
  };
  OwnWorks own(options, shape, gpu);
  std::vector<Block> all;
  for (int first = 0; first < lanes; first += block_size) {
    Block& block = all.emplace_back();
    for (int pp = 0; pp < shape.pp; ++pp)
      for (int lane = first; lane < first + block_size; ++lane)
        for (int tp = 0; tp < std::min(shape.tp, 2); ++tp)
          block.works.push_back(own.of({tp, lane % shape.cp, lane / shape.cp, pp}, units[pp]));
    const std::vector<int> ranks = ranks_of(first, block_size), met = ranks_of(first / group * group, group);
    block.nodes = nodes_of(ranks, ranks_per_node);
    if (!alone) continue;
    std::ranges::copy(nodes_of(met, ranks_per_node), std::back_inserter(block.nodes));
    for (const int rank : ranks)
      block.nodes.push_back(static_cast<int>(std::ranges::count_if(met, [&](int other) {
        return (other - rank) % shape.tp == 0 && other / (shape.tp * lanes) == rank / (shape.tp * lanes) &&
               other / ranks_per_node == rank / ranks_per_node;
      })));
  }
  const auto covers = [&](int a, int b) {
    return all[a].nodes == all[b].nodes && std::ranges::equal(all[a].works, all[b].works, &OwnWork::covers) &&
           (!alone || sees(options, shape, a % shape.cp, b % shape.cp));
  };
  std::vector<int> there;  // none covers another, but perhaps the first one, which has the world's rank 0
  for (int number = 0; number < std::ssize(all); ++number) {
    if (std::ranges::any_of(there, [&](int b) { return covers(b, number); })) continue;
    std::erase_if(there, [&](int b) { return b > 0 && covers(number, b); });
    there.push_back(number);
  }
  // Lanes of the groups that are there: what none of those covers, and then what covers it most.
  for (size_t i = 0; alone && i < there.size(); ++i) {
    const int first = there[i] / group * group;
    for (int met = first; met < first + group; ++met) {
      const auto stands = [&](int b) { return b / group * group == first && covers(b, met); };
      if (std::ranges::any_of(there, stands)) continue;
      int most = met;
      for (int b = first; b < first + group; ++b)
        if (covers(b, most) && !covers(most, b)) most = b;
      there.push_back(most);
    }
  }
  for (int number = 0; number < std::ssize(all); ++number) {
    const bool is_there = std::ranges::find(there, number) != there.end();
    ++blocks[is_there ? number : *std::ranges::find_if(there, [&](int b) { return covers(b, number); })];
  }

  PresentRanks present;
  for (int pp = 0; pp < shape.pp; ++pp)
    for (const auto& [block, of_block] : blocks)
      for (int lane = block * block_size; lane < (block + 1) * block_size; ++lane)
        for (const auto& [tp, of_column] : columns) {
          present.ranks.push_back(tp + shape.tp * (lane + lanes * pp));
          present.stand_for.push_back(of_block * of_column);
        }
  return present;
}

}  // namespace pentatron
