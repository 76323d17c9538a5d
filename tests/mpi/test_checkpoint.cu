// Checkpoints on several ranks: what any mesh has written, any other one reads; and the run goes on as if
// nobody had interrupted it.
// precisions: fp64 bf16
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "continued_run.h"

namespace pentatron {
namespace {

CombinedCase checkpoint_case(const MeshShape& shape, int zero_stage, int experts = 0) {
  const int r = mpi_tests::ranks(), heads = 2 * r;
  CombinedOptions o = training(test_options<CombinedOptions>(
                                   /*layers=*/r, /*d_model=*/2 * heads, heads, /*kv_heads=*/r, /*d_ff=*/3 * r,
                                   /*vocab_size=*/5 * r, /*sequence=*/2 * r, /*micro_batch=*/1,
                                   /*global_batch=*/2 * r),
                               2);
  o.optimizer = OptimizerKind::adamw;
  o.lr = 1e-4;  // so that AdamW does not make large what is only rounding
  o.zero = {zero_stage, zero_stage > 0 ? shape.shard_ranks : 0};
  o.attention = Attention::tiled;
  o.model.experts = experts;
  o.model.balance = experts > 0 ? Balance::bias : Balance::loss;
  o.experts.ep = shape.ep;
  CombinedCase c = {shape, o};
  c.shape.shard_ranks = o.zero.shard_ranks;
  check_combined(c.options, c.shape);
  return c;
}

// Fewer on 8 ranks: on two cores they need seconds for a save.
std::vector<MeshShape> meshes() {
  const int r = mpi_tests::ranks();
  if (r == 8) return {{1, 1, 8, 1, 1, 1, /*shard_ranks=*/4}, {2, 2, 1, 2, 1}};
  std::vector<MeshShape> all = {{1, 1, r, 1, 1}, {r, 1, 1, 1, 1}, {1, 1, 1, r, 1}, {1, r, 1, 1, 1}};
  if (r % 2 == 0) all.push_back({2, 1, r / 2, 1, 1}), all.push_back({1, 1, r, 1, 1, 1, r / 2});
  return all;
}

}  // namespace

TEST_CASE("07: a run continues bit for bit in the same layout", "[07][checkpoint]") {
  mpi_tests::set_time_limit(300);
  World world(nullptr, nullptr);
  const SharedFolder folder(world);
  for (const MeshShape& shape : meshes()) {
    for (const int stage : {0, 1, 2, 3}) {
      const bool shards = shape.dp * shape.cp > 1, only_data = shape.dp == mpi_tests::ranks();
      if (stage > 0 && !(stage == 3 ? shards : only_data)) continue;
      // MPI's calls that open and close a file spin, so they take long where ranks share cores. Two and three
      // ranks show each axis; every mesh of more is in the test of other layouts.
      if (mpi_tests::ranks() >= 4 && !only_data) continue;
      if (mpi_tests::ranks() == 8 && stage != 3) continue;
      CAPTURE(shape.tp, shape.cp, shape.dp, shape.pp, stage);
      const CombinedCase c = checkpoint_case(shape, stage);
      const Trained whole = train(c, world, folder.path() + "/whole");
      const Trained rest = train(c, world, folder.path() + "/rest", folder.path() + "/whole/step_000001");
      CHECK(rest.losses == std::vector(whole.losses.begin() + 1, whole.losses.end()));
      CHECK(largest_difference(rest.weights, whole.weights) == 0);
      CHECK(rest.model == whole.model);
      CHECK(rest.optimizer == whole.optimizer);
    }
  }
}

TEST_CASE("07: experts continue bit for bit", "[07][experts][checkpoint]") {
  const int r = mpi_tests::ranks();
  World world(nullptr, nullptr);
  const SharedFolder folder(world);
  for (const int ep : {1, r}) {
    if (r == 8 && ep == 1) continue;
    const CombinedCase c = checkpoint_case({1, 1, r, 1, ep}, 3, 2 * r);
    const Trained whole = train(c, world, folder.path() + "/whole");
    const Trained rest = train(c, world, folder.path() + "/rest", folder.path() + "/whole/step_000001");
    CHECK(rest.model == whole.model);
    CHECK(rest.optimizer == whole.optimizer);
  }
}

#if PRECISION == 64
TEST_CASE("07: a run continues in any other layout", "[07][checkpoint]") {
  mpi_tests::set_time_limit(300);
  World world(nullptr, nullptr);
  const SharedFolder folder(world);
  const std::vector<MeshShape> all = meshes();
  for (size_t i = 0; i < all.size(); ++i) {
    const MeshShape &from = all[i], &to = all[(i + 1) % all.size()];
    CAPTURE(from.tp, from.cp, from.dp, from.pp, to.tp, to.cp, to.dp, to.pp);
    const Trained whole =
        train(checkpoint_case(from, from.dp * from.cp > 1 ? 3 : 0), world, folder.path() + "/whole");
    const Trained rest = train(checkpoint_case(to, to.dp * to.cp > 1 ? static_cast<int>(i % 4) : 0), world,
                               folder.path() + "/rest", folder.path() + "/whole/step_000001");
    CHECK(std::abs(rest.losses.back() - whole.losses.back()) < 1e-10);
    CHECK(largest_difference(rest.weights, whole.weights) < 1e-10);
  }
}

TEST_CASE("07: experts continue in any other layout", "[07][experts][checkpoint]") {
  const int r = mpi_tests::ranks();
  if (r == 8) return;
  World world(nullptr, nullptr);
  const SharedFolder folder(world);
  const Trained whole = train(checkpoint_case({1, 1, r, 1, r}, 3, 2 * r), world, folder.path() + "/whole");
  for (const MeshShape& to : {MeshShape{r, 1, 1, 1, 1}, MeshShape{1, r, 1, 1, 1}, MeshShape{1, 1, r, 1, 1}}) {
    const Trained rest = train(checkpoint_case(to, to.dp > 1 ? 1 : 0, 2 * r), world, folder.path() + "/rest",
                               folder.path() + "/whole/step_000001");
    CHECK(largest_difference(rest.weights, whole.weights) < 1e-10);
  }
}
#endif

namespace {

// Writes a checkpoint anew as a run of another precision might have, which keeps all digits: as one of 32
// bits from one of 16, and the other way round.
void rewrite_as_other_precision(const std::string& folder) {
  struct Values {
    std::vector<int64_t> shape;
    std::vector<double> numbers;
  };
  std::map<std::string, Values> files[2];
  const std::string paths[2] = {folder + "/model.safetensors", folder + "/optimizer.safetensors"};
  for (const int i : {0, 1}) {
    const SafetensorsFolder file("--load", folder, i == 0 ? "model" : "optimizer");
    for (const auto& [name, tensor] : file.tensors()) {
      Values& values = files[i][name];
      values.shape = tensor.description.shape;
      for (uint64_t k = 0; k < tensor.description.elements(); ++k)
        values.numbers.push_back(number_at(tensor.description.type, tensor.data, k));
    }
  }
  for (auto& [name, values] : files[0]) {
    Values& master = files[1][name + ".master"];
    (has_master_weights ? values : master) = has_master_weights ? master : values;
    if (has_master_weights) files[1].erase(name + ".master");
  }
  constexpr NumberType whole = PRECISION == 64 ? NumberType::fp64 : NumberType::fp32;
  for (const int i : {0, 1}) {
    const bool cut = i == 0 && !has_master_weights;  // to bf16
    std::vector<StoredTensor> tensors;
    std::string data;
    for (const auto& [name, values] : files[i]) {
      std::string bytes;
      const auto add = [&](auto x) { bytes.append(reinterpret_cast<const char*>(&x), sizeof x); };
      for (const double x : values.numbers) {
        if (cut)
          add(static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(x)) >> 16));
        else
          add(static_cast<accum>(x));
      }
      tensors.push_back({name, cut ? NumberType::bf16 : whole, values.shape});
      tensors.back().checksum =
          checksum_text(crc32_of(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()));
      data += bytes;
    }
    std::ofstream(paths[i]) << safetensors_header(tensors) << data;
  }
  std::string state = tests::read_file(folder + "/trainer_state.json");
  const std::string key = "\"precision\": \"";
  state.replace(state.find(key) + key.size(), std::string(precision_name).size(), "another");
  std::ofstream(folder + "/trainer_state.json") << state;
}

}  // namespace

TEST_CASE("07: a checkpoint may have numbers of any type", "[07][checkpoint]") {
  const auto number = [](NumberType type, uint16_t bits) {
    return number_at(type, reinterpret_cast<const std::byte*>(&bits), 0);
  };
  CHECK(number(NumberType::bf16, 0x3fc0) == 1.5);
  CHECK(number(NumberType::bf16, 0xc000) == -2);
  CHECK(number(NumberType::fp16, 0x3c00) == 1);
  CHECK(number(NumberType::fp16, 0xc100) == -2.5);
  CHECK(number(NumberType::fp16, 0x7bff) == 65504);
  CHECK(number(NumberType::fp16, 0x0001) == std::ldexp(1, -24));
  CHECK(number(NumberType::fp16, 0x03ff) == 1023 * std::ldexp(1, -24));
  CHECK(number(NumberType::fp16, 0x0400) == std::ldexp(1, -14));
  CHECK(std::isinf(number(NumberType::fp16, 0xfc00)));
  CHECK(std::isnan(number(NumberType::fp16, 0x7e00)));
}

TEST_CASE("07: a run continues bit for bit from another precision that kept all digits", "[07][checkpoint]") {
  World world(nullptr, nullptr);
  const SharedFolder folder(world);
  const CombinedCase c = checkpoint_case({1, 1, mpi_tests::ranks(), 1, 1}, 1);
  train(c, world, folder.path() + "/whole");
  const std::string from = folder.path() + "/whole/step_000001";
  const Trained same = train(c, world, folder.path() + "/same", from);
  if (world.rank() == 0) rewrite_as_other_precision(from);
  world.largest({0});
  const Trained other = train(c, world, folder.path() + "/other", from);
  CHECK(other.losses == same.losses);
  CHECK(other.model == same.model);
  CHECK(other.optimizer == same.optimizer);
}

#if PRECISION == 16
TEST_CASE("07: master weights keep all digits of weights that are loaded alone", "[07][checkpoint]") {
  World world(nullptr, nullptr);
  const SharedFolder folder(world);
  CombinedCase c = checkpoint_case({1, 1, mpi_tests::ranks(), 1, 1}, 1);
  c.options.steps = 1;
  train(c, world, folder.path() + "/whole");
  const std::string from = folder.path() + "/whole/step_000001", to = folder.path() + "/rest";
  if (world.rank() == 0) rewrite_as_other_precision(from);
  world.largest({0});
  c.options.load_weights = c.options.load_folder = from;
  c.options.save = to;
  c.options.as_json = "{}";
  CombinedModel model(c, world);
  Checkpoint checkpoint(model.options, model.parameters, model.optimizer, model.compute);
  for (UnitHooks* hooks : model.seams.hooks) hooks->weights_changed();
  checkpoint.after_update(0);
  checkpoint.finish();
  if (world.rank() > 0) return;
  const SafetensorsFolder given("--load", from, "model"), kept("--load", to + "/step_000001", "optimizer");
  for (const Parameter& p : model.parameters.all()) {
    const std::vector<int64_t> shape = {p.rows, p.columns};
    const bool vector = p.tensor_split == TensorSplit::replicated_outside;
    const std::vector<int64_t> stored = vector ? std::vector<int64_t>{p.columns} : shape;
    const FoundTensor &a = given.find(p.name, stored), &b = kept.find(p.name + ".master", stored);
    CHECK(a.description.type == NumberType::fp32);
    CHECK(std::memcmp(a.data, b.data, a.description.bytes()) == 0);
  }
}
#endif

TEST_CASE("07: a second run in a folder is refused, and a folder that disappears is one line",
          "[07][checkpoint]") {
  World world(nullptr, nullptr);
  const SharedFolder folder(world);
  CombinedCase c = checkpoint_case({1, 1, mpi_tests::ranks(), 1, 1}, 1);
  const std::string save = c.options.save = folder.path() + "/save";
  c.options.steps = 1;
  c.options.as_json = "{}";
  CombinedModel model(c, world);
  std::optional<Checkpoint> first, second;
  const auto make = [&](std::optional<Checkpoint>& checkpoint) {
    checkpoint.emplace(model.options, model.parameters, model.optimizer, model.compute);
  };
  const auto complaint = [](const auto& work) {
    try {
      work();
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  make(first);
  const std::string words = complaint([&] { make(second); });
  CHECK(words.starts_with(
      world.rank() > 0 ? "rank 0 says why"
                       : "--save: " + save + " is not valid; expected a folder that no other run saves in (" +
                             "process " + std::to_string(getpid()) + " of "));
  world.largest({0});
  if (world.rank() == 0) std::filesystem::remove_all(save);
  world.largest({0});
  first->after_update(0);
  CHECK(complaint([&] { first->finish(); }) ==
        "--save: " + save + "/step_000001 can not be written: " +
            (world.rank() == 0 ? "No such file or directory" : "rank 0 says why"));
  first.reset();
  world.largest({0});
  CHECK(complaint([&] { make(second); }).empty());  // nobody else saves there now
}

namespace {

// Changes one bit of a parameter, if this rank holds some of it.
void flip_bit(const Parameters& parameters, const std::string& name) {
  for (const Shard& shard : parameters.held()) {
    for (const ParameterRange& range : parameters.ranges(shard)) {
      if (range.parameter->name != name) continue;
      real* const at = shard.weights + range.begin_in_shard;
      std::byte bytes[sizeof(real)];
      CUDA_CHECK(cudaMemcpy(bytes, at, sizeof bytes, cudaMemcpyDeviceToHost));
      bytes[0] ^= std::byte{1};
      CUDA_CHECK(cudaMemcpy(at, bytes, sizeof bytes, cudaMemcpyHostToDevice));
      return;
    }
  }
}

}  // namespace

TEST_CASE("07: ranks that hold the same weights notice that a bit differs", "[07][checkpoint]") {
  const int r = mpi_tests::ranks();
  if (r == 1) return;
  World world(nullptr, nullptr);
  struct Flip {
    MeshShape shape;
    int zero_stage, experts;
    std::string name;
    bool is_shared;  // by the last rank and another one
  };
  const std::string norm = "model.norm.weight", head = "lm_head.weight",
                    expert = text("model.layers.0.mlp.experts.", 2 * r - 1, ".up_proj.weight");
  std::vector<Flip> flips = {
      {{1, 1, r, 1, 1}, 0, 0, norm, true},       {{1, 1, r, 1, 1}, 1, 0, head, true},
      {{1, 1, r, 1, 1}, 2, 0, norm, true},       {{1, 1, r, 1, 1}, 3, 0, head, false},
      {{1, r, 1, 1, 1}, 0, 0, head, true},       {{r, 1, 1, 1, 1}, 0, 0, norm, true},
      {{r, 1, 1, 1, 1}, 0, 0, head, false},      {{1, 1, 1, r, 1}, 0, 0, head, false},
      {{1, 1, r, 1, 1}, 0, 2 * r, expert, true}, {{1, 1, r, 1, r}, 0, 2 * r, expert, false},
      {{1, 1, r, 1, r}, 0, 2 * r, norm, true}};
  if (r % 2 == 0) flips.push_back({{1, 1, 1, r, 1, 2}, 0, 0, head, true});
  for (const auto& [shape, zero_stage, experts, name, is_shared] : flips) {
    CAPTURE(shape.tp, shape.cp, shape.dp, shape.pp, shape.ep, zero_stage, name);
    CombinedCase c = checkpoint_case(shape, zero_stage, experts);
    if (shape.copies == 2) c.options.pipeline.pp_schedule = PpSchedule::dualpipe, c.options.pipeline.vpp = 2;
    c.options.model.layers = shape.copies * shape.pp;
    CombinedModel model(c, world);
    model.accumulate(batches_of_step(c.options, 0));
    model.update(0);
    const auto words = [&] {
      try {
        compare_weights(model.parameters, 1);
      } catch (const RunError& error) {
        CHECK(error.status == 1);
        return std::string("refused: ") + error.what();
      }
      return std::string();
    };
    CHECK(words().empty());
    if (world.rank() == r - 1) flip_bit(model.parameters, name);
    const std::string refusal = words();
    CHECK(refusal.empty() != is_shared);
    if (!is_shared) continue;
    if (world.rank() > 0) {
      CHECK(refusal == "refused: rank 0 says why");  // no line: the rank would go on
      continue;
    }
    CHECK(refusal.starts_with("refused: step 1: " + name + " is not the same on all ranks; "));
    CHECK(std::count(refusal.begin(), refusal.end(), ';') == 2);  // one after each checksum but the last
    const std::string last = text("rank ", r - 1);
    CHECK((refusal.ends_with(last) || refusal.find(last + ";") != std::string::npos));
  }
}

TEST_CASE("07: weights that differ between ranks are not saved", "[07][checkpoint]") {
  if (mpi_tests::ranks() == 1) return;
  World world(nullptr, nullptr);
  const SharedFolder folder(world);
  CombinedCase c = checkpoint_case({1, 1, mpi_tests::ranks(), 1, 1}, 1);
  c.options.save = folder.path();
  c.options.save_every = 1;
  c.options.as_json = "{}";
  CombinedModel model(c, world);
  Checkpoint checkpoint(model.options, model.parameters, model.optimizer, model.compute);
  if (world.rank() == 1) flip_bit(model.parameters, "lm_head.weight");
  const auto status = [](const auto& work) {
    try {
      work();
    } catch (const RunError& error) {
      return error.status;
    }
    return 0;
  };
  CHECK(status([&] { checkpoint.after_update(0); }) == 1);
  CHECK(status([&] { checkpoint.finish(); }) == 1);
  CHECK(!std::filesystem::exists(folder.path() + "/step_000001"));
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
namespace {

// A line of /proc/self/status, in KiB.
int64_t status_of_process(const std::string& key) {
  std::ifstream file("/proc/self/status");
  for (std::string word; file >> word;) {
    if (word == key + ":") {
      int64_t kib = 0;
      file >> kib;
      return kib;
    }
  }
  return -1;
}

}  // namespace

TEST_CASE("07: a save takes at most 32 MiB of memory, however large the model is", "[07][checkpoint]") {
  if (mpi_tests::ranks() != 2) return;
  World world(nullptr, nullptr);
  const SharedFolder folder(world);
  CombinedCase c = checkpoint_case({1, 1, 2, 1, 1}, 3);
  c.options.model.d_model = 512;
  c.options.model.vocab_size = 16384;  // about 100 MiB a rank in bf16, 200 MiB in fp64
  c.options.save = folder.path();
  c.options.steps = 1;
  c.options.as_json = "{}";
  CombinedModel model(c, world);
  model.compute.synchronize();
  std::ofstream("/proc/self/clear_refs") << 5;  // the peak begins anew
  const int64_t before = status_of_process("VmRSS");
  {
    Checkpoint checkpoint(model.options, model.parameters, model.optimizer, model.compute);
    checkpoint.after_update(0);
    checkpoint.finish();
  }
  const int64_t most = status_of_process("VmHWM") - before;
  CAPTURE(most);
  CHECK(most > 1 << 13);  // it was measured
  CHECK(most <= 32 << 10);
  if (world.rank() == 0) {
    const std::string folder_of_step = folder.path() + "/step_000001/";
    CHECK(std::filesystem::file_size(folder_of_step + "model.safetensors") +
              std::filesystem::file_size(folder_of_step + "optimizer.safetensors") >
          160 << 20);
  }
}
#endif

}  // namespace pentatron
