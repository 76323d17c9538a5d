// All techniques at once must do what one rank does alone: on every mesh, and on meshes, models and options
// that are drawn at random.
// precisions: fp64
#include "device/precision.h"
#if PRECISION == 64

#include <cstdlib>
#include <iostream>
#include <iterator>
#include <random>

#include "../../07_combined_5d/fold.h"
#include "continued_run.h"

namespace pentatron {
namespace {

constexpr double kTolerance =
    1e-10;  // relative error: drawn models may be worse conditioned than chosen ones

// A gradient this small beside that of all weights is zero but for rounding: of a key, when there is only
// one.
constexpr double kVanishing = 1e-6;

// |a - b| / |b|, or over `floor`, if |b| is smaller.
double difference(const std::vector<double>& a, const std::vector<double>& b, double floor) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference) / std::max(std::sqrt(norm), floor);
}

// As a request to the program.
std::string command_line(const CombinedCase& c) {
  const CombinedOptions& o = c.options;
  const ModelConfig& m = o.model;
  std::ostringstream text;
  text << "mpirun -n " << c.shape.ranks() << " build/cpu-fp64/07_combined_5d --tp " << c.shape.tp << " --cp "
       << c.shape.cp << " --dp " << c.shape.dp << " --pp " << c.shape.pp << " --zero-stage "
       << o.zero.zero_stage;
  if (o.zero.shard_ranks > 0) text << " --shard-ranks " << o.zero.shard_ranks;
  if (o.zero.zero_stage == 0)
    text << " --dp-sync " << to_string(o.data_parallel.dp_sync) << " --bucket-mb "
         << o.data_parallel.bucket_mb;
  if (o.tensor.sequence_parallel) text << " --sequence-parallel";
  if (o.tensor.tp_overlap > 1) text << " --tp-overlap " << o.tensor.tp_overlap;
  text << " --pp-schedule " << to_string(o.pipeline.pp_schedule);
  if (o.pipeline.vpp > 1) text << " --vpp " << o.pipeline.vpp;
  text << " --cp-layout " << to_string(o.context.cp_layout) << " --cp-exchange "
       << to_string(o.context.cp_exchange) << " --attention " << to_string(o.attention) << " --recompute "
       << to_string(o.recompute) << " --layers " << m.layers << " --d-model " << m.d_model << " --heads "
       << m.heads << " --kv-heads " << m.kv_heads << " --d-ff " << m.d_ff << " --vocab-size " << m.vocab_size
       << " --seq-len " << o.sequence_length << " --micro-batch-size " << o.micro_batch_size
       << " --global-batch-size " << o.global_batch_size;
  if (o.model.experts > 0)
    text << " --experts " << o.model.experts << " --top-k " << o.model.top_k << " --ep " << c.shape.ep
         << " --balance " << to_string(o.model.balance) << " --aux-loss " << o.experts.aux_loss
         << " --shared-experts " << o.model.shared_experts;
  return text.str();
}

// `alone`, on rank 0, which compares: the model that one rank trains.
template <class Alone>
void check_mesh(const CombinedCase& c, World& world, const std::unique_ptr<Alone>& alone) {
  CombinedModel combined(c, world);
  const int parameters = static_cast<int>(combined.parameters.all().size());
  const auto check_all = [&](Content content, double tolerance, double floor) {
    const Tensors got = gather_parameters(world, combined.parameters, content, combined.compute);
    for (int id = 0; alone && id < parameters; ++id) {
      INFO(combined.parameters[id].name << (content == Content::weights ? ": weights" : ": gradient"));
      CHECK(difference(got[id], content == Content::weights ? alone->weights(id) : alone->gradients(id),
                       floor) <= tolerance);
    }
  };
  check_all(Content::weights, 0, 1);
  for (int step = 0; step < c.options.steps; ++step) {
    INFO("step " << step);
    const std::vector<HostBatch> global = batches_of_step(c.options, step);
    combined.accumulate(global);
    double norm = 0;
    if (alone) {
      alone->accumulate(global);
      for (int id = 0; id < parameters; ++id) {
        if (combined.parameters[id].own_step) continue;
        for (const double g : alone->gradients(id)) norm += g * g;
      }
      norm = std::sqrt(norm);
    }
    check_all(Content::gradients, kTolerance, kVanishing * norm);
    combined.update(step);
    if (!alone) continue;
    alone->update(step);
    const double loss = alone->totals.host_loss();
    CHECK(std::abs(combined.totals.host_loss() - loss) <= kTolerance * loss);
    CHECK(std::abs(alone->totals.host_norm() - norm) <= kTolerance * norm);
    CHECK(std::abs(combined.totals.host_norm() - norm) <= kTolerance * norm);
  }
  check_all(Content::weights, kTolerance, 1e-300);  // the bias of one expert stays 0
}

// Against 01's model or, with experts, against this program's on one rank.
void check_mesh(CombinedCase c) {
  INFO(command_line(c));
  World world(nullptr, nullptr);
  check_combined(c.options, c.shape);
  const bool compares = world.rank() == 0;
  if (c.options.model.experts == 0)
    check_mesh(c, world, compares ? std::make_unique<TestModel>(c.options) : nullptr);
  else
    check_mesh(c, world, compares ? std::make_unique<CombinedModel>(c.alone(), world) : nullptr);
}

// What `from` saves after a step, `to` continues: the same model on another mesh.
void check_continued(CombinedCase from, CombinedCase to) {
  INFO("saved by " << command_line(from) << "\nand loaded by " << command_line(to));
  World world(nullptr, nullptr);
  const SharedFolder folder(world);
  for (CombinedCase* c : {&from, &to}) {
    c->options.optimizer = OptimizerKind::adamw;  // it has states
    c->options.lr = 1e-4;                         // so that AdamW does not make large what is only rounding
    check_combined(c->options, c->shape);
  }
  const Trained whole = train(from, world, folder.path() + "/whole");
  const Trained rest = train(to, world, folder.path() + "/rest", folder.path() + "/whole/step_000001");
  CHECK(std::abs(rest.losses.back() - whole.losses.back()) <= kTolerance * whole.losses.back());
  CHECK(largest_difference(rest.weights, whole.weights) <= kTolerance);
}

// ---- Every mesh -------------------------------------------------------------------------------------------

std::vector<MeshShape> all_meshes(int ranks) {
  std::vector<MeshShape> meshes;
  for (int tp = 1; tp <= ranks; ++tp) {
    for (int cp = 1; cp <= ranks / tp; ++cp) {
      for (int dp = 1; dp <= ranks / (tp * cp); ++dp) {
        const int pp = ranks / (tp * cp * dp);
        if (tp * cp * dp * pp == ranks) meshes.push_back({tp, cp, dp, pp, 1});
      }
    }
  }
  return meshes;
}

// Sizes that every mesh of 1, 2, 3, 4, or 8 ranks can share out.
CombinedCase mesh_case(const MeshShape& shape, int zero_stage) {
  const int r = shape.ranks(), heads = 2 * r;
  CombinedOptions o =
      training(test_options<CombinedOptions>(
                   /*layers=*/shape.pp + 1, /*d_model=*/2 * heads, heads, /*kv_heads=*/r,
                   /*d_ff=*/3 * r, /*vocab_size=*/5 * r, /*sequence=*/2 * r, /*micro_batch=*/2,
                   /*global_batch=*/2 * 2 * shape.dp),
               2);
  o.zero.zero_stage = zero_stage;
  o.tensor.sequence_parallel = zero_stage % 2 == 1 || shape.cp * shape.dp == 1;
  o.context.cp_exchange =
      std::vector{CpExchange::ring, CpExchange::all_gather, CpExchange::ulysses}[zero_stage % 3];
  o.attention = Attention::tiled;
  return {shape, o};
}

// The stages of ZeRO to try on the i-th mesh: all, or on 8 ranks one by turns, as the meshes of 4 have shown
// what each does in each dimension.
std::vector<int> zero_stages(int i) {
  return mpi_tests::ranks() < 8 ? std::vector{0, 1, 2, 3} : std::vector{i % 4};
}

}  // namespace

TEST_CASE("07: parity on every mesh", "[07][parity]") {
  mpi_tests::set_time_limit(600);
  const std::vector<MeshShape> meshes = all_meshes(mpi_tests::ranks());
  if (mpi_tests::ranks() == 8) CHECK(meshes.size() == 20);
  for (int i = 0; i < std::ssize(meshes); ++i) {
    const MeshShape& shape = meshes[i];
    for (const int stage : zero_stages(i)) {
      const bool shards = shape.dp * shape.cp > 1;  // otherwise the stages are one
      if (shards || stage == zero_stages(i).front()) check_mesh(mesh_case(shape, stage));
    }
  }
}

TEST_CASE("07: parity, two copies of the model", "[07][parity]") {
  mpi_tests::set_time_limit(300);
  int i = 0;
  for (const MeshShape& shape : all_meshes(mpi_tests::ranks())) {
    if (shape.pp % 2 != 0) continue;
    for (const int stage : zero_stages(i++)) {
      CombinedCase c = mesh_case(shape, stage);
      CombinedOptions& o = c.options;
      o.pipeline.pp_schedule = PpSchedule::dualpipe;
      o.pipeline.vpp = 2;
      o.tp = shape.tp, o.cp = shape.cp, o.dp = shape.dp, o.pipeline.pp = shape.pp;
      c.shape = mesh_shape(o, shape.ranks());
      check_mesh(c);
    }
  }
}

// Experts on as many ranks as hold a copy, or on fewer.
TEST_CASE("07: parity, hybrid sharding", "[07][parity]") {
  mpi_tests::set_time_limit(300);
  int stage = 0;
  for (MeshShape shape : all_meshes(mpi_tests::ranks())) {
    const int replicas = shape.cp * shape.dp;
    for (int shards = 1; shards < replicas; ++shards) {
      if (replicas % shards != 0 || (mpi_tests::ranks() == 8 && shards == 1)) continue;
      shape.shard_ranks = shards;
      CombinedCase c = mesh_case(shape, stage = stage % 3 + 1);
      c.options.zero.shard_ranks = shards;
      if (shape.tp == 1) {
        c.options.experts.ep = c.shape.ep = shards;
        c.options.model.experts = 2 * shards;
      }
      check_mesh(c);
    }
  }
}

// On 16 ranks alone (mpirun -n 16 mpi_tests '[16]').
TEST_CASE("07: parity of five dimensions at once", "[07][parity][16]") {
  if (mpi_tests::ranks() != 16) return;
  mpi_tests::set_time_limit(300);
  for (const int ep : {2, 4}) {
    CombinedCase c = mesh_case({2, 2, 2, 2, ep}, 3);
    c.options.model.layers = 5;
    c.options.model.experts = 8;
    c.options.experts.ep = ep;
    c.options.pipeline.pp_schedule = PpSchedule::interleaved;
    c.options.pipeline.vpp = 2;
    c.options.recompute = Recompute::full;
    check_mesh(c);
  }
}

// ---- The mesh ---------------------------------------------------------------------------------------------

TEST_CASE("07: groups share out the ranks of a mesh", "[07][mesh]") {
  if (mpi_tests::ranks() > 1) return;
  for (MeshShape shape : all_meshes(24)) {
    const int replicas = shape.dp * shape.cp;
    for (const auto& [ep, shards] :
         {std::pair{1, 0}, {2, 0}, {3, 0}, {4, 0}, {1, 1}, {1, 2}, {2, 4}, {4, 4}}) {
      if (replicas % ep != 0 || (shards > 0 && replicas % shards != 0)) continue;
      shape.ep = ep, shape.shard_ranks = shards;
      const std::vector<std::pair<MeshGroup, int>> sizes = {
          {MeshGroup::tensor, shape.tp},
          {MeshGroup::context, shape.cp},
          {MeshGroup::pipeline, shape.pp},
          {MeshGroup::gradients, shape.shards()},
          {MeshGroup::experts, ep},
          {MeshGroup::expert_gradients, shape.shards() / ep},
          {MeshGroup::replicate, replicas / shape.shards()}};
      for (const auto& [group, size] : sizes) {
        for (int rank = 0; rank < 24; ++rank) {
          const std::vector<int> members = members_of(shape, group, rank);
          CHECK(std::ssize(members) == size);
          for (const int member : members) CHECK(members_of(shape, group, member) == members);
        }
      }
      for (int rank = 0; rank < 24; ++rank) {
        const MeshCoordinates at = coordinates_of(shape, rank);
        CHECK(rank == at.tp + shape.tp * (at.cp + shape.cp * (at.dp + shape.dp * at.pp)));
        // Its places are those in its groups: what is asked of communicators is asked of the mesh, too.
        CHECK(members_of(shape, MeshGroup::tensor, rank)[at.tp] == rank);
        CHECK(members_of(shape, MeshGroup::context, rank)[at.cp] == rank);
        CHECK(members_of(shape, MeshGroup::pipeline, rank)[at.pp] == rank);
        const int replica = at.cp + shape.cp * at.dp, shard = replica % shape.shards();
        CHECK(members_of(shape, MeshGroup::gradients, rank)[shard] == rank);
        CHECK(members_of(shape, MeshGroup::expert_gradients, rank)[shard / ep] == rank);
        CHECK(members_of(shape, MeshGroup::replicate, rank)[replica / shape.shards()] == rank);
      }
    }
  }
}

// By hand. A tensor group of 8 is a node; of 4, two share one of 8, and one of 6 cuts each second one.
TEST_CASE("07: a folded world has the ranks that differ", "[07][mesh]") {
  if (mpi_tests::ranks() > 1) return;
  CombinedOptions o =
      test_options<CombinedOptions>(/*layers=*/16, /*d_model=*/64, /*heads=*/8, /*kv_heads=*/8,
                                    /*d_ff=*/64, /*vocab_size=*/64, /*sequence=*/16,
                                    /*micro_batch=*/2, /*global_batch=*/6144);
  const auto present = [&](const MeshShape& shape, int ranks_per_node) {
    o.experts.ep = shape.ep, o.model.experts = shape.ep > 1 ? 4 : 0;
    const PresentRanks there = present_ranks(o, shape, ranks_per_node);
    CHECK(there.ranks[0] == 0);
    CHECK(std::accumulate(there.stand_for.begin(), there.stand_for.end(), 0) == shape.ranks());
    return there.ranks;
  };
  CHECK(present({8, 1, 128, 3}, 8) == std::vector{0, 1024, 2048});
  CHECK(present({4, 1, 4, 1}, 8) == std::vector{0});
  CHECK(present({4, 1, 3, 1}, 6).size() == 12);                         // 4 to 7 lie in two nodes
  CHECK(present({2, 1, 3, 1}, 4) == std::vector{0});                    // a node that is not full
  CHECK(present({2, 1, 3, 2}, 4).size() == 12);                         // one that two pipeline ranks share
  CHECK(present({1, 4, 8, 1}, 8) == std::vector{0, 1, 2, 3});           // a ring
  CHECK(present({1, 3, 4, 1, 2}, 6) == std::vector{0, 1, 2, 3, 4, 5});  // 2 and 3 share out the experts
  CHECK(present({1, 1, 8, 1, 2}, 8) == std::vector{0});
  CHECK(present({1, 1, 8, 1, 2}, 3).size() == 8);  // 2 and 3 lie in two nodes
  for (const CpExchange exchange : {CpExchange::ulysses, CpExchange::all_gather}) {
    o.context.cp_exchange = exchange;
    CHECK(present({1, 4, 8, 1}, 8) == std::vector{0, 3});
    CHECK(present({1, 4, 1, 1}, 3).size() == 4);  // 3 is alone in its node
  }
  CHECK(present({1, 1, 16, 1, 1, 1, 4}, 8) == std::vector{0});
  CHECK(present({1, 1, 12, 1, 1, 1, 3}, 4).size() == 12);  // 3, 4 and 5 hold a copy in two nodes
  o.model.top_k = 1, o.sequence_length = 15;               // 30 rows for 4 experts
  CHECK(present({1, 1, 8, 1, 4}, 8) == std::vector{0, 1, 2, 3});
}

TEST_CASE("07: a mesh as a table", "[07][mesh]") {
  const std::string table = draw_mesh({2, 1, 2, 2, 2});
  CHECK(table.starts_with("tp 2 x cp 1 x dp 2 x pp 2 = 8 ranks, ep 2\n"));
  CHECK(std::count(table.begin(), table.end(), '\n') == 12);
  std::istringstream row(table.substr(table.rfind('\n', table.size() - 2) + 1));
  std::vector<int> numbers{std::istream_iterator<int>(row), {}};
  CHECK(numbers == std::vector<int>{7, 1, 0, 1, 1,                   // rank and places
                                    6, 7, 7, 3, 7, 5, 7, 5, 7, 7});  // groups
}

// Buckets are sent from the end of the model on. W0.1 of rank 1, which is stage 1, comes last; in the second
// file the weight gradients of stage 2 do.
TEST_CASE("07: buckets need a schedule that completes the last stage first", "[07]") {
  const auto check = [](const std::string& last, DpSync sync) {
    CombinedOptions o = training(test_options<CombinedOptions>(4, 8, 2, 2, 8, 23, 6, 1, 2), 1);
    o.pipeline.pp = 2;
    o.data_parallel.dp_sync = sync;
    o.zero.zero_stage = 0;
    o.pipeline.pp_schedule = PpSchedule::from_file;
    o.pipeline.pp_schedule_text = "0,3: F0 F0.1 B0.1 W0.1 B0 W0\n2,1: F0.1 F0 B0 B0.1 " + last + "\n";
    check_combined(o, {.dp = 2, .pp = 2});
  };
  CHECK_NOTHROW(check("W0 W0.1", DpSync::bucket));
  CHECK_NOTHROW(check("W0.1 W0", DpSync::overlap));
  CHECK_THROWS_AS(check("W0.1 W0", DpSync::bucket), UsageError);
  for (const PpSchedule kind :
       {PpSchedule::interleaved, PpSchedule::zb_v, PpSchedule::dualpipe, PpSchedule::dualpipe_v}) {
    for (int p = 2; p <= 8; p += 2) CHECK(completes_from_the_end(make_schedule(kind, p, 2 * p, 2)));
  }
}

// ---- Random cases -----------------------------------------------------------------------------------------

namespace {

// Everything follows from the seed and the number of ranks.
class Draw {
 public:
  Draw(uint64_t seed, int ranks) : random_(seed * 1000 + ranks), ranks_(ranks) {}

  // Until the program would accept what was drawn.
  CombinedCase valid_case() {
    for (;;) {
      CombinedCase c = any_case();
      if (is_valid(c)) return c;
    }
  }

  // The same model and batch, split in another way; or, where no other one was found, in the same.
  CombinedCase other_layout(const CombinedCase& c) {
    for (int tries = 0; tries < 1000; ++tries) {
      const CombinedCase drawn = any_case();
      CombinedCase other = c;
      other.shape = any_mesh();
      do other.shape.ep = c.options.model.experts > 0 ? up_to(other.shape.dp * other.shape.cp) : 1;
      while (other.shape.dp * other.shape.cp % other.shape.ep != 0);
      other.options.zero = drawn.options.zero;
      other.options.tensor.sequence_parallel = drawn.options.tensor.sequence_parallel;
      other.options.pipeline.pp_schedule = drawn.options.pipeline.pp_schedule;
      other.options.pipeline.vpp = drawn.options.pipeline.vpp;
      other.options.recompute = drawn.options.recompute;
      if (is_valid(other)) return other;
    }
    return c;
  }

 private:
  // Completes its options.
  bool is_valid(CombinedCase& c) const {
    try {
      CombinedOptions o = c.options;
      o.tp = c.shape.tp, o.cp = c.shape.cp, o.dp = c.shape.dp, o.pipeline.pp = c.shape.pp,
      o.experts.ep = c.shape.ep;
      if (o.micro_batch_size * o.sequence_length == 1) return false;  // without a target (batches_of_step)
      check_experts(o, o.experts);
      c.shape = mesh_shape(o, ranks_);
      check_combined(o, c.shape);
      c.options = o;
      return true;
    } catch (const UsageError&) {
      return false;
    }
  }

  int up_to(int most) { return static_cast<int>(random_() % most) + 1; }
  template <class T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[random_() % values.size()];
  }

  MeshShape any_mesh() {
    MeshShape shape;
    for (int left = ranks_, factor = 2; left > 1;) {
      if (left % factor != 0) {
        ++factor;
        continue;
      }
      *one_of({&shape.tp, &shape.cp, &shape.dp, &shape.pp}) *= factor;
      left /= factor;
    }
    return shape;
  }

  CombinedCase any_case() {
    CombinedCase c;
    MeshShape& shape = c.shape = any_mesh();
    const int tp = shape.tp, cp = shape.cp, dp = shape.dp, pp = shape.pp;
    const PpSchedule schedule =
        one_of({PpSchedule::afab, PpSchedule::one_f_one_b, PpSchedule::interleaved, PpSchedule::zb_h1,
                PpSchedule::zb_v, pp % 2 == 0 ? PpSchedule::dualpipe : PpSchedule::dualpipe_v});
    const bool is_dual = schedule == PpSchedule::dualpipe;
    const int chunks = is_v_shaped(schedule) || is_dual                ? 2
                       : schedule == PpSchedule::interleaved && pp > 1 ? up_to(3)
                                                                       : 1;
    const CpExchange exchange = one_of({CpExchange::ring, CpExchange::all_gather, CpExchange::ulysses,
                                        cp % 2 == 0 && cp > 2 ? CpExchange::ulysses_ring : CpExchange::ring});
    const bool rings = exchange == CpExchange::ulysses_ring;
    const int kv_heads = tp * (exchange == CpExchange::ulysses ? cp : rings ? 2 : 1) * up_to(2);
    const int heads = kv_heads * up_to(3);
    const int micro_batch = up_to(3);
    const int micro_batches = schedule == PpSchedule::interleaved ? pp * up_to(2)
                              : is_dual                           ? 2 * up_to(3)
                                                                  : up_to(6);
    const int layers = pp * chunks + up_to(3) - 1;
    const int d_model = heads * 2 * up_to(3);
    const int d_ff = tp * up_to(7);
    const int vocab_size = tp * (4 + up_to(9));
    const int sequence = cp * up_to(7);
    CombinedOptions& o = c.options =
        training(test_options<CombinedOptions>(layers, d_model, heads, kv_heads, d_ff, vocab_size, sequence,
                                               micro_batch, micro_batch * micro_batches * dp),
                 2);
    o.seed = up_to(1000);
    o.pipeline.pp_schedule = schedule;
    o.pipeline.vpp = chunks;
    o.zero.zero_stage = up_to(4) - 1;
    if (up_to(2) == 1) o.zero.shard_ranks = up_to(cp * dp);
    o.data_parallel.dp_sync = one_of({DpSync::naive, DpSync::overlap, DpSync::bucket});
    o.data_parallel.bucket_mb = one_of({0.001, 0.01, 25.0});
    o.tensor.sequence_parallel = up_to(2) == 1;
    o.tensor.tp_overlap = up_to(4);
    o.context.cp_layout = one_of({CpLayout::contiguous, CpLayout::zigzag});
    o.context.cp_exchange = exchange;
    o.attention = one_of({Attention::naive, Attention::tiled});
    o.recompute = one_of({Recompute::none, Recompute::selective, Recompute::full});
    if (up_to(5) <= 2) {
      do shape.ep = up_to(dp * cp);
      while (dp * cp % shape.ep != 0);
      o.model.experts = shape.ep * up_to(3);
      o.model.top_k = up_to(std::min(3, o.model.experts));
      o.model.balance = one_of({Balance::loss, Balance::bias, Balance::none});
      o.experts.aux_loss = one_of({0.0, 0.1});
      o.model.shared_experts = up_to(3) - 1;
      o.experts.ep = shape.ep;
    }
    return c;
  }

  std::mt19937_64 random_;
  int ranks_;
};

int64_t from_environment(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atoll(value) : otherwise;
}

}  // namespace

// make fuzz draws more of them, and others.
TEST_CASE("07: parity of random meshes, models and options", "[07][experts][fuzz]") {
  mpi_tests::set_time_limit(3000);
  const int64_t cases = from_environment("FUZZ_CASES", mpi_tests::ranks() < 8 ? 3 : 1),
                seed = from_environment("FUZZ_SEED", 1);
  const bool show = std::getenv("FUZZ_SHOW") && mpi_tests::rank() == 0;
  for (int64_t i = 0; i < cases; ++i) {
    Draw draw(seed + i, mpi_tests::ranks());
    const CombinedCase c = draw.valid_case();
    if (show) std::cout << seed + i << ": " << command_line(c) << std::endl;
    INFO("make fuzz N=1 SEED=" << seed + i << " FUZZ_RANKS=" << mpi_tests::ranks());
    check_mesh(c);
    check_continued(c, draw.other_layout(c));
  }
}

}  // namespace pentatron

#endif
