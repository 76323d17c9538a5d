// Attention over context ranks without the model around it: which block a rank computes in each step, and
// that the results are those of the whole sequence by plain loops, as exact on eight ranks as on one.
// precisions: fp64 bf16
#include <cmath>
#include <ctime>
#include <map>
#include <numeric>

#include "../../06_context_parallel/context_parallel.h"
#include "device.h"
#include "model.h"
#include "mpi_tests.h"
#include "options/parallel_options.h"
#include "reference_attention.h"

namespace pentatron {
namespace {

const std::vector<CpLayout> layouts = {CpLayout::contiguous, CpLayout::zigzag};

using AttentionOptions = OptionsWith<ContextParallelOptions>;

AttentionOptions attention_options(int heads, int kv_heads, int head_size, int sequence, int batch) {
  return test_options<AttentionOptions>(/*layers=*/1, heads * head_size, heads, kv_heads, /*d_ff=*/1,
                                        /*vocab_size=*/2, sequence, batch, batch);
}

AttentionShape shape_of_rank(const AttentionOptions& o, int ranks) {
  return {
      o.micro_batch_size, o.sequence_length / ranks, {o.model.heads, o.model.kv_heads, o.model.head_size()}};
}

bool sees(const VisibleBlock& visible, int query, int key) {
  const AttentionBlock& block = visible.block;
  const int i = query - visible.first_query;
  return i >= 0 && i < block.queries && key < block.keys && (!block.diagonal || key <= i);
}

// Query-key pairs that each rank computes.
std::vector<int> cells_of_ranks(const AttentionOptions& options, int ranks) {
  const AttentionShape shape = shape_of_rank(options, ranks);
  std::vector<int> cells(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    for (int origin = 0; origin < ranks; ++origin) {
      const auto visible = visible_block(options.technique.cp_layout, shape, rank, origin);
      for (int i = 0; i < shape.sequence * shape.sequence; ++i) {
        cells[rank] += visible && sees(*visible, i / shape.sequence, i % shape.sequence);
      }
    }
  }
  return cells;
}

// ---- On the device

// Columns of this rank, of those that so many ranks share out.
HostMatrix column_slice(const HostMatrix& all, int rank, int ranks) {
  HostMatrix mine(all.rows, all.columns / ranks);
  for (int64_t row = 0; row < all.rows; ++row) {
    for (int64_t j = 0; j < mine.columns; ++j) mine(row, j) = all(row, rank * mine.columns + j);
  }
  return mine;
}

// Rows of this rank, of a matrix with all rows of all sequences.
HostMatrix slice(const HostMatrix& all, const AttentionOptions& options,
                 const std::vector<int32_t>& positions) {
  HostMatrix mine(options.micro_batch_size * std::ssize(positions), all.columns);
  for (int64_t row = 0; row < mine.rows; ++row) {
    const int64_t from =
        row / std::ssize(positions) * options.sequence_length + positions[row % positions.size()];
    for (int64_t j = 0; j < all.columns; ++j) mine(row, j) = all(from, j);
  }
  return mine;
}

struct Errors {
  double out, lse, d_q, d_k, d_v;  // relative, of the rows of all ranks together
};

double sum_of_ranks(double value) {
  const std::vector<double> all = mpi_tests::all_gather(value);
  return std::accumulate(all.begin(), all.end(), 0.0);
}
// Of attention that the ranks of each communicator do together; `want` is that of the whole sequences.
Errors errors_of(const AttentionOptions& options, Communicator& context, const BlockData& want) {
  Device device;
  const std::vector<int32_t> positions =
      positions_of_rank(options, options.technique, context.rank(), context.ranks());
  const AttentionShape shape = shape_of_rank(options, context.ranks());
  const auto mine = [&](const HostMatrix& all) { return slice(all, options, positions); };
  const auto upload = [&](const HostMatrix& all) { return device.upload<real>(mine(all)); };
  const auto attention = context_attention(options, options.technique, context);

  AttentionTensors t = {upload(want.q), upload(want.k), upload(want.v), {}, {}, {}};
  t.out = device.fresh<real>(t.q.rows, t.q.columns);
  t.lse = device.fresh<accum>(t.q.rows, shape.head.heads);
  const auto [score_rows, score_columns] = attention->score_shape(shape);
  const auto scores = [&] { return device.fresh<real>(score_rows, score_columns); };
  if (score_rows > 0) t.scores = {scores(), false};
  attention->forward(device.blas, shape, t);
  DeviceArena memory(Purpose::activations);
  AttentionGradients g = {upload(want.d_out),
                          device.fresh<real>(t.q.rows, t.q.columns),
                          device.fresh<real>(t.k.rows, t.k.columns),
                          device.fresh<real>(t.k.rows, t.k.columns),
                          attention->backward_memory(memory, shape),
                          device.fresh<accum>(t.q.rows, shape.head.heads)};
  attention->backward(device.blas, shape, t, g);

  const auto error = [&](const HostMatrix& got, const HostMatrix& expected) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < got.values.size(); ++i) {
      difference += std::pow(got.values[i] - expected.values[i], 2);
      norm += std::pow(expected.values[i], 2);
    }
    return std::sqrt(sum_of_ranks(difference) / sum_of_ranks(norm));
  };
  // Ulysses leaves lse by heads: that of all tokens, of this rank's heads.
  const bool by_heads = options.technique.cp_exchange == CpExchange::ulysses;
  HostMatrix lse = by_heads ? column_slice(want.lse, context.rank(), context.ranks()) : mine(want.lse);
  if (options.technique.cp_exchange == CpExchange::ulysses_ring) {  // the tokens of a rank of the ring
    const int u = options.technique.ulysses;
    lse = column_slice(slice(want.lse, options,
                             context_positions(options.technique.cp_layout, options.sequence_length,
                                               context.rank() / u, context.ranks() / u)),
                       context.rank() % u, u);
  }
  return {error(device.download(t.out), mine(want.out)), error(device.download(t.lse), lse),
          error(device.download(g.d_q), mine(want.d_q)), error(device.download(g.d_k), mine(want.d_k)),
          error(device.download(g.d_v), mine(want.d_v))};
}

BlockData reference(const AttentionOptions& options) {
  Random random;
  const AttentionBlock whole = whole_sequences(shape_of_rank(options, 1));
  BlockData data(whole, random);
  reference_attention(whole, data);
  return data;
}

}  // namespace

TEST_CASE("06: cells of work at 16 tokens and 4 ranks", "[06]") {
  AttentionOptions options = attention_options(1, 1, 2, 16, 1);
  options.technique.cp_layout = CpLayout::contiguous;
  CHECK(cells_of_ranks(options, 4) == std::vector{10, 26, 42, 58});
  options.technique.cp_layout = CpLayout::zigzag;
  CHECK(cells_of_ranks(options, 4) == std::vector{34, 34, 34, 34});
}

TEST_CASE("06: a block has the pairs that causality leaves, and a zigzag the same number on every rank",
          "[06]") {
  for (const CpLayout layout : layouts) {
    for (const int ranks : {2, 3, 4, 8}) {
      AttentionOptions options = attention_options(1, 1, 2, 6 * ranks, 1);
      options.technique.cp_layout = layout;
      const AttentionShape shape = shape_of_rank(options, ranks);
      for (int pair = 0; pair < ranks * ranks; ++pair) {
        const int rank = pair / ranks, origin = pair % ranks;
        const auto visible = visible_block(layout, shape, rank, origin);
        const std::vector<int32_t> queries = context_positions(layout, 6 * ranks, rank, ranks),
                                   keys = context_positions(layout, 6 * ranks, origin, ranks);
        bool right = true;
        for (int i = 0; i < std::ssize(queries); ++i) {
          for (int j = 0; j < std::ssize(keys); ++j) {
            right = right && (visible && sees(*visible, i, j)) == (keys[j] <= queries[i]);
          }
        }
        INFO(ranks << " ranks: " << rank << " sees " << origin);
        CHECK(right);
      }
      if (layout == CpLayout::contiguous) continue;
      for (const int cells : cells_of_ranks(options, ranks)) {
        CHECK(cells * ranks == options.sequence_length * (options.sequence_length + 1) / 2);
      }
    }
  }
}

namespace {

// Storing rounds to half an epsilon; scores and probabilities are stored by the naive kind, too.
void check_attention(AttentionOptions options, std::initializer_list<CpExchange> exchanges) {
  mpi_tests::set_time_limit(120);
  World world(nullptr, nullptr);
  Communicator context(world, world.all(), "context");
  const BlockData want = reference(options);
  const double tolerance = 8 * epsilon<real>();
  for (const Attention attention : {Attention::naive, Attention::tiled}) {
    for (const CpLayout layout : layouts) {
      for (const CpExchange exchange : exchanges) {
        options.attention = attention;
        options.technique.cp_layout = layout;
        options.technique.cp_exchange = exchange;
        INFO(to_string(attention) << ", " << to_string(layout) << ", " << to_string(exchange));
        const Errors e = errors_of(options, context, want);
        CHECK(e.out < tolerance);
        CHECK(e.lse < tolerance);
        CHECK(e.d_q < tolerance);
        CHECK(e.d_k < tolerance);
        CHECK(e.d_v < tolerance);
      }
    }
  }
}

}  // namespace

TEST_CASE("06: ring attention is attention of the whole sequence", "[06]") {
  check_attention(attention_options(4, 2, 6, 10 * mpi_tests::ranks(), 3),
                  {CpExchange::ring, CpExchange::all_gather});
}

// Each rank has two groups of heads.
TEST_CASE("06: Ulysses is attention of the whole sequence", "[06]") {
  const int heads = mpi_tests::ranks();
  check_attention(attention_options(6 * heads, 2 * heads, 4, 6 * heads, 3), {CpExchange::ulysses});
}

TEST_CASE("06: Ulysses in a ring is attention of the whole sequence", "[06][8]") {
  const int ranks = mpi_tests::ranks();
  for (const int u : {2, 4}) {
    if (ranks % u != 0 || u == ranks) continue;
    AttentionOptions options = attention_options(6 * u, 2 * u, 4, 6 * ranks, 3);
    options.technique.ulysses = u;
    check_attention(options, {CpExchange::ulysses_ring});
  }
}

// Sums of as many roundings to bf16 as there are ranks would be worse than one.
TEST_CASE("06: the error of bf16 does not grow with the ranks", "[06]") {
  if (!has_master_weights || mpi_tests::ranks() % 4 != 0) return;
  mpi_tests::set_time_limit(120);
  World world(nullptr, nullptr);
  AttentionOptions options = attention_options(4, 2, 16, 128, 2);
  options.attention = Attention::tiled;
  const BlockData want = reference(options);
  for (const CpLayout layout : layouts) {
    options.technique.cp_layout = layout;
    std::vector<Errors> errors;
    for (int ranks = 1; ranks <= world.ranks(); ranks *= 2) {
      std::vector<int> members(ranks);  // this rank's of groups of so many
      std::iota(members.begin(), members.end(), world.rank() / ranks * ranks);
      Communicator context(world, members, "context");
      errors.push_back(errors_of(options, context, want));
      const Errors &e = errors.back(), &alone = errors.front();
      if (world.rank() == 0 && std::getenv("VERBOSE")) {
        std::printf("%d ranks: out %.2e, lse %.2e, d_q %.2e, d_k %.2e, d_v %.2e\n", ranks, e.out, e.lse,
                    e.d_q, e.d_k, e.d_v);
      }
      INFO(ranks << " ranks");
      CHECK(e.out <= 1.02 * alone.out);
      CHECK(e.lse <= epsilon<accum>());
      CHECK(e.d_q <= 1.02 * alone.d_q);
      CHECK(e.d_k <= 1.02 * alone.d_k);
      CHECK(e.d_v <= 1.02 * alone.d_v);
    }
  }
}

// The trace shows what a rank launches: nothing for a block of which its queries see no key.
TEST_CASE("06: empty blocks are not computed", "[06]") {
  World world(nullptr, nullptr);
  Communicator context(world, world.all(), "context");
  AttentionOptions options = attention_options(2, 2, 4, 4 * world.ranks(), 1);
  options.attention = Attention::tiled;
  const BlockData want = reference(options);
  for (const CpLayout layout : layouts) {
    options.technique.cp_layout = layout;
    trace::start();
    errors_of(options, context, want);
    trace::stop();
    const int blocks = layout == CpLayout::contiguous ? world.rank() + 1 : world.ranks();
    std::map<std::string, int> launches;
    for (const trace::Interval& i : trace::take()) ++launches[i.name.substr(0, i.name.find('<'))];
    CHECK(launches["tiled_forward_kernel"] == blocks);
    CHECK(launches["tiled_backward_keys_kernel"] == blocks);
    CHECK(launches["tiled_backward_queries_kernel"] == blocks);
    CHECK(launches["merge_kernel"] == blocks - 1);
  }
}

}  // namespace pentatron
