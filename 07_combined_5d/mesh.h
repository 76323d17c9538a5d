// The mesh: the coordinates of each rank on five axes, and the groups of ranks that follow. The tensor axis
// communicates most, so it varies fastest and its ranks are neighbours. Context, data and pipeline follow:
//
//   rank = tp + TP (cp + CP (dp + DP pp))
//
// Data and context ranks hold the same weights and see different tokens. So gradients are summed over both,
// and ZeRO shards over both. The expert axis divides these DP x CP ranks: EP consecutive ranks share out the
// experts. The ranks that hold the same experts sum the gradients of these experts. With two copies of the
// model in a pipeline (dualpipe), the pipeline ranks k and PP - 1 - k hold the same weights, too. With
// --shard-ranks N, N neighbours of the ranks with the same weights hold them in shards, and sum gradients;
// the ranks with the same shard are a replicate group (03).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <iomanip>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "model/parameters.h"
#include "options.h"
#include "ranks/comm.h"

namespace pentatron {

// The degree of each axis: its number of ranks.
struct MeshShape {
  int tp = 1, cp = 1, dp = 1, pp = 1, ep = 1;
  int copies = 1;       // so many copies of the model are in a pipeline
  int shard_ranks = 0;  // ZeroOptions
  int ranks() const { return tp * cp * dp * pp; }
  int replicas() const { return cp * dp * copies; }  // ranks with the same weights
  int shards() const { return shard_ranks > 0 ? shard_ranks : replicas(); }
  std::vector<std::pair<std::string, int>> degrees() const {
    return {{"tp", tp}, {"cp", cp}, {"dp", dp}, {"pp", pp}, {"ep", ep}};
  }
};

// A rank's coordinate on each axis, from 0.
struct MeshCoordinates {
  int tp, cp, dp, pp;
};

// Solves rank = tp + TP (cp + CP (dp + DP pp)) for the coordinates.
inline MeshCoordinates coordinates_of(const MeshShape& shape, int rank) {
  return {rank % shape.tp, rank / shape.tp % shape.cp, rank / (shape.tp * shape.cp) % shape.dp,
          rank / (shape.tp * shape.cp * shape.dp)};
}

enum class MeshGroup { tensor, context, pipeline, gradients, experts, expert_gradients, replicate, all };

// A group's key: ranks with equal keys form the group.
inline std::array<int, 3> in_common(const MeshShape& shape, MeshGroup group, int rank) {
  const MeshCoordinates at = coordinates_of(shape, rank);
  // With two copies of the model in a pipeline: the first of the two pipeline ranks with the same stages.
  const int pp = shape.copies == 1 ? at.pp : std::min(at.pp, shape.pp - 1 - at.pp);
  // This rank's number among those with the same weights.
  const int replica = at.cp + shape.cp * (at.dp + shape.dp * (at.pp > pp));
  const int shard_group = replica / shape.shards();
  if (group == MeshGroup::tensor) return {at.cp, at.dp, at.pp};
  if (group == MeshGroup::context) return {at.tp, at.dp, at.pp};
  if (group == MeshGroup::pipeline) return {at.tp, at.cp, at.dp};
  if (group == MeshGroup::gradients) return {at.tp, pp, shard_group};
  if (group == MeshGroup::experts) return {at.tp, at.pp, replica / shape.ep};
  if (group == MeshGroup::expert_gradients) return {at.tp, pp, shape.ep * shard_group + replica % shape.ep};
  if (group == MeshGroup::replicate) return {at.tp, pp, replica % shape.shards()};
  return {};
}

// The world's ranks in the group of `rank`, ascending.
inline std::vector<int> members_of(const MeshShape& shape, MeshGroup group, int rank) {
  const std::array<int, 3> key = in_common(shape, group, rank);
  std::vector<int> members;
  for (int other = 0; other < shape.ranks(); ++other) {
    if (in_common(shape, group, other) == key) members.push_back(other);
  }
  return members;
}

// In double, because a product of degrees may be too large for an int; as text it is "2 x 3 = 6".
inline double product(const std::vector<int>& degrees) {
  return std::accumulate(degrees.begin(), degrees.end(), 1.0, std::multiplies<double>());
}
inline std::string product_text(const std::vector<int>& degrees) {
  std::ostringstream text;
  for (const int degree : degrees) text << (text.tellp() > 0 ? " x " : "") << degree;
  text << " = " << std::fixed << std::setprecision(0) << product(degrees);
  return text.str();
}

// The degrees that the options ask for. With --dp 0, data ranks are what the other axes leave. Throws
// UsageError if the product is not `ranks`, or if --ep does not divide dp x cp. A mesh that is only drawn may
// have any number of ranks up to 4096.
inline MeshShape mesh_shape(const CombinedOptions& options, int ranks) {
  const int pp = std::max(options.pipeline.pp, 1), ep = options.experts.ep;
  const bool is_drawn = options.show_mesh || options.pipeline.show_schedule;
  int dp = is_drawn ? std::max(options.dp, 1) : options.dp;
  if (dp == 0) {
    const std::vector<int> others = {options.tp, options.cp, pp};
    require(std::fmod(ranks, product(others)) == 0, "--tp x --cp x --pp", product_text(others),
            "a divisor of the number of ranks, ", ranks);
    dp = static_cast<int>(ranks / product(others));
  }
  const std::vector<int> all = {options.tp, options.cp, dp, pp};
  require(is_drawn ? product(all) <= 4096 : product(all) == ranks, "--tp x --cp x --dp x --pp",
          product_text(all),
          is_drawn ? "at most 4096 ranks in a picture" : text("the number of ranks, ", ranks));
  require(dp * options.cp % ep == 0, "--ep", ep, "a divisor of --dp x --cp, ",
          product_text({dp, options.cp}));
  const int copies = copies_of(options.pipeline.pp_schedule);
  return {options.tp, options.cp, dp, pp, ep, copies, options.zero.shard_ranks};
}

std::string draw_mesh(const MeshShape& shape);  // the picture of --show-mesh (workbench/draw_mesh.cu)
void show_mesh(const MeshShape& shape);         // prints it

// coordinates_of, when the groups agree with it; else it ends all ranks.
inline MeshCoordinates checked_coordinates(const MeshShape& shape, int rank) {
  const MeshCoordinates at = coordinates_of(shape, rank);
  const auto agrees = [&](MeshGroup group, int degree, int coordinate) {
    const std::vector<int> members = members_of(shape, group, rank);
    return std::ssize(members) == degree && coordinate < degree && members[coordinate] == rank;
  };
  if (!agrees(MeshGroup::tensor, shape.tp, at.tp) || !agrees(MeshGroup::context, shape.cp, at.cp) ||
      !agrees(MeshGroup::pipeline, shape.pp, at.pp))
    fail("coordinates_of", "a rank has another coordinate than in its group", __FILE__, __LINE__);
  return at;
}

// This rank's groups, as communicators. All ranks of the world construct it together.
class Mesh {
 public:
  Mesh(const MeshShape& of, World& world)
      : shape(of),
        at(checked_coordinates(shape, world.rank())),
        pipeline(members_of(shape, MeshGroup::pipeline, world.rank())),
        tensor(world, members_of(shape, MeshGroup::tensor, world.rank()), "tensor", tensor_blocks),
        context(world, members_of(shape, MeshGroup::context, world.rank()), "context"),
        gradients(world, members_of(shape, MeshGroup::gradients, world.rank()), "gradients"),
        experts(world, members_of(shape, MeshGroup::experts, world.rank()), "experts"),
        expert_gradients(world, members_of(shape, MeshGroup::expert_gradients, world.rank()),
                         "expert gradients"),
        replicate(world, members_of(shape, MeshGroup::replicate, world.rank()), "replicate"),
        all(world, members_of(shape, MeshGroup::all, world.rank()), "all") {}

  // How the axes split the parameters of `units`, which this rank holds. The replicas are in the order of the
  // parameter groups: dense_group, expert_group (expert_parallel.h).
  ParameterLayout parameter_layout(const std::vector<int>& units) const {
    return {tensor.rank(),
            tensor.ranks(),
            {{gradients.rank(), gradients.ranks(), replicate.rank()},
             {expert_gradients.rank(), expert_gradients.ranks(), replicate.rank()}},
            units};
  }

  // Tokens of a micro-batch on this rank.
  int64_t rows(const TrainingConfig& config) const {
    return int64_t{config.micro_batch_size} * config.sequence_length / shape.cp;
  }

  // All data ranks have computed the same x. Data rank 0 returns it, the others return an empty tensor.
  Tensor one_replica(Tensor x) const { return at.dp == 0 ? x : Tensor(); }

  const MeshShape shape;
  const MeshCoordinates at;
  const std::vector<int> pipeline;  // ranks of the world; each edge between two has communicators of its own
  Communicator tensor, context, gradients, experts, expert_gradients, replicate;
  Communicator all;  // the gradient norm and the loss
};

}  // namespace pentatron
