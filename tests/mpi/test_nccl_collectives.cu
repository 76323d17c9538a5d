// Every collective against a plain reference, over all types, operators, sizes and forms.
// precisions: fp32
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <functional>
#include <random>

#include "nccl_fixture.h"

namespace {

using namespace mpi_tests;

template <class T>
constexpr ncclDataType_t type_of();
template <>
constexpr ncclDataType_t type_of<float>() {
  return ncclFloat32;
}
template <>
constexpr ncclDataType_t type_of<double>() {
  return ncclFloat64;
}
template <>
constexpr ncclDataType_t type_of<__nv_bfloat16>() {
  return ncclBfloat16;
}
template <>
constexpr ncclDataType_t type_of<__half>() {
  return ncclFloat16;
}
template <>
constexpr ncclDataType_t type_of<int32_t>() {
  return ncclInt32;
}

// What rank `rank` contributes at index i: small integers, which every type represents, and their sums too.
float value(int rank, size_t i) {
  return static_cast<float>((static_cast<size_t>(rank) * 7 + i * 3 + i / 11) % 13);
}

float reduced(ncclRedOp_t op, size_t i) {
  float result = value(0, i);
  for (int rank = 1; rank < ranks(); ++rank) {
    const float next = value(rank, i);
    result = op == ncclSum ? result + next : std::max(result, next);
  }
  return result;
}

constexpr float kGuard = 99;  // lies behind every buffer, and in outputs before they are written
constexpr size_t kGuards = 5;

template <class T>
std::vector<T> filled(size_t count, const std::function<float(size_t)>& value_at) {
  std::vector<T> values(count + kGuards, static_cast<T>(kGuard));
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<T>(value_at(i));
  return values;
}

template <class T>
void check_equal(const std::vector<T>& values, const std::vector<T>& expected) {
  size_t wrong = 0, first_wrong = 0;
  for (size_t i = values.size(); i-- > 0;) {
    if (std::memcmp(&values[i], &expected[i], sizeof(T)) == 0) continue;
    ++wrong;
    first_wrong = i;
  }
  if (wrong > 0) {
    INFO("first at " << first_wrong << ": " << static_cast<float>(values[first_wrong]) << ", expected "
                     << static_cast<float>(expected[first_wrong]));
    CHECK(wrong == 0);
  }
}

// One call, out of place and in place. `input` and `expected` are this rank's; the in-place input lies
// `input_offset` elements into the output, or the output `output_offset` elements into the input.
template <class T>
struct Example {
  size_t input_count, output_count;
  size_t input_offset = 0, output_offset = 0;  // elements, in place
  std::function<float(size_t)> input;          // of index
  std::function<float(size_t)> expected;
  std::function<ncclResult_t(const T*, T*, cudaStream_t)> call;
};

template <class T>
void run_out_of_place(const Example<T>& example, const Stream& stream) {
  const auto input = filled<T>(example.input_count, example.input);
  const Array<T> in(input), out(filled<T>(example.output_count, [](size_t) { return kGuard; }));
  require_nccl(example.call(in.data(), out.data(), stream));
  stream.synchronize();
  check_equal(out.get(example.output_count + kGuards), filled<T>(example.output_count, example.expected));
  check_equal(in.get(input.size()), input);
}

template <class T>
void run_in_place(const Example<T>& example, const Stream& stream) {
  const size_t count = std::max(example.input_count, example.output_count);
  auto before = filled<T>(count, [&](size_t i) {
    const bool is_input = i >= example.input_offset && i < example.input_offset + example.input_count;
    return is_input ? example.input(i - example.input_offset) : kGuard;
  });
  const Array<T> both(before);
  require_nccl(example.call(both.data() + example.input_offset, both.data() + example.output_offset, stream));
  stream.synchronize();
  const auto after = both.get(before.size());
  for (size_t i = 0; i < example.output_count; ++i) {
    before[example.output_offset + i] = static_cast<T>(example.expected(i));
  }
  check_equal(after, before);
}

template <class T>
Example<T> all_reduce(const Communicator& comm, size_t count, ncclRedOp_t op) {
  return {.input_count = count,
          .output_count = count,
          .input = [](size_t i) { return value(rank(), i); },
          .expected = [=](size_t i) { return reduced(op, i); },
          .call =
              [=, &comm](const T* in, T* out, cudaStream_t stream) {
                return ncclAllReduce(in, out, count, type_of<T>(), op, comm, stream);
              }};
}

template <class T>
Example<T> reduce_scatter(const Communicator& comm, size_t count, ncclRedOp_t op) {
  return {.input_count = count * ranks(),
          .output_count = count,
          .output_offset = rank() * count,
          .input = [](size_t i) { return value(rank(), i); },
          .expected = [=](size_t i) { return reduced(op, rank() * count + i); },
          .call =
              [=, &comm](const T* in, T* out, cudaStream_t stream) {
                return ncclReduceScatter(in, out, count, type_of<T>(), op, comm, stream);
              }};
}

template <class T>
Example<T> all_gather(const Communicator& comm, size_t count) {
  return {.input_count = count,
          .output_count = count * ranks(),
          .input_offset = rank() * count,
          .input = [](size_t i) { return value(rank(), i); },
          .expected = [=](size_t i) { return value(static_cast<int>(i / count), i % count); },
          .call =
              [=, &comm](const T* in, T* out, cudaStream_t stream) {
                return ncclAllGather(in, out, count, type_of<T>(), comm, stream);
              }};
}

template <class T>
Example<T> broadcast(const Communicator& comm, size_t count, int root) {
  return {.input_count = count,
          .output_count = count,
          .input = [](size_t i) { return value(rank(), i); },
          .expected = [=](size_t i) { return value(root, i); },
          .call =
              [=, &comm](const T* in, T* out, cudaStream_t stream) {
                return ncclBroadcast(in, out, count, type_of<T>(), root, comm, stream);
              }};
}

template <class T>
void check_all(const Communicator& comm, const Stream& stream, size_t count,
               const std::vector<ncclRedOp_t>& operators) {
  INFO("count " << count << ", type " << type_of<T>());
  std::vector<Example<T>> examples = {all_gather<T>(comm, count), broadcast<T>(comm, count, 0),
                                      broadcast<T>(comm, count, ranks() - 1)};
  for (ncclRedOp_t op : operators) {
    examples.push_back(all_reduce<T>(comm, count, op));
    examples.push_back(reduce_scatter<T>(comm, count, op));
  }
  for (size_t i = 0; i < examples.size(); ++i) {
    INFO("example " << i);
    run_out_of_place(examples[i], stream);
    run_in_place(examples[i], stream);
  }
}

}  // namespace

TEST_CASE("collectives give what a plain loop gives, for every type and operator", "[standin]") {
  const Communicator comm;
  const Stream stream("communication");
  const std::vector<ncclRedOp_t> operators = {ncclSum, ncclMax};
  for (size_t count : {1, 77}) {
    check_all<float>(comm, stream, count, operators);
    check_all<double>(comm, stream, count, operators);
    check_all<__nv_bfloat16>(comm, stream, count, operators);
    check_all<__half>(comm, stream, count, operators);
    check_all<int32_t>(comm, stream, count, operators);
  }
}

// Around the sizes at which the stand-in changes its ways: what fits a letter (8 KiB), and rounds (512 KiB).
TEST_CASE("collectives give what a plain loop gives, for every size", "[standin]") {
  const Communicator comm;
  const Stream stream("communication");
  for (size_t count : {0, 2, 3, 1023, 2047, 2048, 2049, 8193, 131073}) {
    check_all<float>(comm, stream, count, {ncclSum});
  }
  check_all<__nv_bfloat16>(comm, stream, 300001, {ncclSum});
}

TEST_CASE("a long all-reduce takes several rounds", "[standin]") {
  const Communicator comm;
  const Stream stream("communication");
  run_out_of_place(all_reduce<float>(comm, ranks() * 131072 + 1, ncclSum), stream);
  run_in_place(all_reduce<double>(comm, ranks() * 65536 * 2 + 77, ncclMax), stream);
}

TEST_CASE("sums are formed in rank order, the same bits on every rank", "[standin]") {
  const Communicator comm;
  const Stream stream("communication");
  for (size_t count : {100, 5000}) {  // at once, in parts
    std::vector<std::vector<float>> inputs;
    for (int r = 0; r < ranks(); ++r) {
      std::mt19937 random(r);
      std::uniform_real_distribution<float> uniform(-1, 1);
      inputs.emplace_back(count);
      for (float& x : inputs.back()) x = uniform(random);
    }
    std::vector<float> expected(count);
    for (size_t i = 0; i < count; ++i) {
      volatile float sum = inputs[0][i];  // not to be reordered
      for (int r = 1; r < ranks(); ++r) sum = sum + inputs[r][i];
      expected[i] = sum;
    }
    const Array<float> array(inputs[rank()]);
    require_nccl(ncclAllReduce(array.data(), array.data(), count, ncclFloat, ncclSum, comm, stream));
    stream.synchronize();
    check_equal(array.get(count), expected);
  }
}

// 1 + n half steps: rounding after every addition would stay at 1.
template <class T>
void check_rounds_once(float half_step) {
  const Communicator comm;
  const Stream stream("communication");
  const float mine = rank() == 0 ? 1.0f : half_step;
  const Array<T> array(std::vector<T>(9, static_cast<T>(mine)));
  require_nccl(ncclAllReduce(array.data(), array.data(), 9, type_of<T>(), ncclSum, comm, stream));
  stream.synchronize();
  const auto expected = static_cast<T>(1.0f + static_cast<float>(ranks() - 1) * half_step);
  check_equal(array.get(9), std::vector<T>(9, expected));
}

TEST_CASE("numbers of 16 bits are summed in float and rounded once", "[standin]") {
  check_rounds_once<__nv_bfloat16>(0x1p-8f);
  check_rounds_once<__half>(0x1p-11f);
}

TEST_CASE("all-to-all, with grouped sends and receives", "[standin]") {
  const Communicator comm;
  const Stream stream("communication");
  const int n = ranks();
  for (size_t count : {1, 1000, 5000, 200003}) {
    INFO("count " << count);
    std::vector<float> input(n * count), expected(n * count);
    for (size_t i = 0; i < input.size(); ++i) {
      input[i] = static_cast<float>(rank() * 100 + i % 97);
      const size_t source = i / count, index = rank() * count + i % count;
      expected[i] = static_cast<float>(source * 100 + index % 97);
    }
    const Array<float> in(input), grouped(n * count);
    require_nccl(ncclGroupStart());
    for (int peer = n; peer-- > 0;) {  // receives and sends in any order
      require_nccl(ncclRecv(grouped.data() + peer * count, count, ncclFloat, peer, comm, stream));
      const int to = (peer + rank()) % n;
      require_nccl(ncclSend(in.data() + to * count, count, ncclFloat, to, comm, stream));
    }
    require_nccl(ncclGroupEnd());
    stream.synchronize();
    check_equal(grouped.get(n * count), expected);
  }
}

// As experts do: more pieces at a time than pass through pinned memory where the device is a GPU.
TEST_CASE("all-to-all with three long parts for each rank", "[standin]") {
  const Communicator comm;
  const Stream stream("communication");
  constexpr int parts = 3;
  const size_t count = 200003, n = ranks() * parts;
  std::vector<float> input(n * count), expected(n * count);
  for (size_t i = 0; i < input.size(); ++i) {
    const size_t part = i / count, source = part / parts;
    input[i] = static_cast<float>(100 * rank() + part);
    expected[i] = static_cast<float>(100 * source + rank() * parts + part % parts);
  }
  const Array<float> in(input), out(n * count);
  require_nccl(ncclGroupStart());
  for (size_t part = 0; part < n; ++part) {
    const int peer = static_cast<int>(part) / parts;
    require_nccl(ncclSend(in.data() + part * count, count, ncclFloat, peer, comm, stream));
    require_nccl(ncclRecv(out.data() + part * count, count, ncclFloat, peer, comm, stream));
  }
  require_nccl(ncclGroupEnd());
  stream.synchronize();
  check_equal(out.get(n * count), expected);
}

TEST_CASE("several sends to one rank arrive in order, large and small", "[standin]") {
  if (ranks() < 2) return;
  const Communicator comm;
  const Stream stream("communication");
  const std::vector<size_t> counts = {10, 150000, 3, 20000, 0, 1};
  std::vector<Array<float>> arrays;
  for (size_t i = 0; i < counts.size(); ++i) {
    arrays.emplace_back(std::vector<float>(counts[i] + 1, rank() == 0 ? static_cast<float>(i) : -1.0f));
  }
  require_nccl(ncclGroupStart());
  for (size_t i = 0; i < counts.size(); ++i) {
    if (rank() == 0) require_nccl(ncclSend(arrays[i].data(), counts[i], ncclFloat, 1, comm, stream));
    if (rank() == 1) require_nccl(ncclRecv(arrays[i].data(), counts[i], ncclFloat, 0, comm, stream));
  }
  require_nccl(ncclGroupEnd());
  stream.synchronize();
  if (rank() != 1) return;
  for (size_t i = 0; i < counts.size(); ++i) {
    std::vector<float> expected(counts[i], static_cast<float>(i));
    expected.push_back(-1);
    check_equal(arrays[i].get(counts[i] + 1), expected);
  }
}

TEST_CASE("many operations on several streams and communicators", "[standin]") {
  constexpr int kOperations = 60;
  constexpr size_t kCount = 3000;
  const Communicator all;
  std::vector<int> odd_or_even;
  for (int r = rank() % 2; r < ranks(); r += 2) odd_or_even.push_back(r);
  const Communicator half(odd_or_even);
  const Stream first("first"), second("second");
  std::vector<Array<int32_t>> of_all, of_half;
  for (int i = 0; i < kOperations; ++i) {
    of_all.emplace_back(std::vector<int32_t>(kCount, rank() + i));
    of_half.emplace_back(std::vector<int32_t>(kCount, rank() + i));
  }
  for (int i = 0; i < kOperations; ++i) {
    // Each communicator is used from both streams.
    const size_t count = i % 3 == 0 ? kCount : 40;
    require_nccl(ncclAllReduce(of_all[i].data(), of_all[i].data(), count, ncclInt32, ncclSum, all,
                               i % 2 == 0 ? first : second));
    require_nccl(ncclAllReduce(of_half[i].data(), of_half[i].data(), count, ncclInt32, ncclSum, half,
                               i % 4 < 2 ? second : first));
  }
  first.synchronize();
  second.synchronize();
  for (int i = 0; i < kOperations; ++i) {
    const size_t count = i % 3 == 0 ? kCount : 40;
    int sum_of_all = 0, sum_of_half = 0;
    for (int r = 0; r < ranks(); ++r) {
      sum_of_all += r + i;
      if (r % 2 == rank() % 2) sum_of_half += r + i;
    }
    std::vector<int32_t> expected(kCount, rank() + i);
    std::fill_n(expected.begin(), count, sum_of_all);
    check_equal(of_all[i].get(kCount), expected);
    std::fill_n(expected.begin(), count, sum_of_half);
    check_equal(of_half[i].get(kCount), expected);
  }
}
