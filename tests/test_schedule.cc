// Pipeline schedules: their orders against the papers', their bubbles against the formulas, exactly; what the
// simulator accepts and what it refuses; pictures.
#include <algorithm>
#include <iostream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "../05_pipeline_parallel/workbench/simulate.h"
#include "catch.h"
#include "random_schedule.h"

using namespace pentatron;

namespace {

// "F0 RA1 B0": without messages unless wanted; with the chunk ("F0.1") where there are several.
std::string words(const Schedule& s, int rank, bool messages = false) {
  const char* names[] = {"F", "B", "B", "W", "RA", "SA", "RG", "SG"};
  std::string text;
  for (const Instruction& i : s.ranks[rank]) {
    if (is_message(i.action) && !messages) continue;
    text += (text.empty() ? "" : " ") + (names[static_cast<int>(i.action)] + std::to_string(i.micro_batch));
    if (s.v > 1) text += "." + std::to_string(i.chunk);
  }
  return text;
}

// Of words without chunks; `backward` is what B stands for.
Instructions instructions(const std::string& text, Action backward = Action::backward) {
  Instructions list;
  std::istringstream in(text);
  for (std::string word; in >> word;) {
    const size_t digits = word.find_first_of("0123456789");
    const std::string name = word.substr(0, digits);
    const Action action = name == "F"    ? Action::forward
                          : name == "B"  ? backward
                          : name == "W"  ? Action::weight_gradient
                          : name == "RA" ? Action::receive_activation
                          : name == "SA" ? Action::send_activation
                          : name == "RG" ? Action::receive_gradient
                                         : Action::send_gradient;
    list.push_back({action, std::stoi(word.substr(digits)), 0});
  }
  return list;
}

// What the simulator says against a schedule; "" if nothing.
std::string complaint_of(const Schedule& s, int streams = message_streams) {
  try {
    simulate(s, {}, streams);
  } catch (const ScheduleError& error) {
    return std::string(error.what()).substr(text("--pp-schedule: ", s.name, ": ").size());
  }
  return "";
}

// As a file for --pp-schedule: without messages, with the stages where a rank has several.
std::string as_file(const Schedule& s) {
  std::string text;
  for (int rank = 0; rank < s.p; ++rank) {
    for (int chunk = 0; chunk < s.v && s.v > 1; ++chunk)
      text += std::to_string(s.stage(rank, chunk)) + (chunk + 1 < s.v ? "," : ": ");
    text += words(s, rank) + "\n";
  }
  return text;
}

// What show_schedule prints.
std::string print_schedule(const PipelineOptions& options, int p, int m) {
  struct Captured : std::ostringstream {
    std::streambuf* const terminal = std::cout.rdbuf(rdbuf());
    ~Captured() override { std::cout.rdbuf(terminal); }
  } printed;
  PipelineOptions complete = options;
  complete.pp = p;
  show_schedule(complete, m);
  return printed.str();
}

struct Random {
  std::mt19937 engine{1};

  int number(int lowest, int highest) { return lowest + static_cast<int>(engine() % (highest - lowest + 1)); }
  Schedule schedule() {
    const auto kind = static_cast<PpSchedule>(number(0, 3));
    const int p = number(1, 9), v = kind == PpSchedule::interleaved ? number(1, 4) : 1;
    return make_schedule(kind, p, kind == PpSchedule::interleaved ? p * number(1, 4) : number(1, 24), v);
  }
  Costs costs() {
    return {number(1, 16) / 4.0, number(1, 16) / 4.0, number(1, 16) / 4.0, number(0, 8) / 4.0};
  }
};

}  // namespace

TEST_CASE("05: the orders of the papers", "[05][schedule]") {
  const Schedule zero_bubble = make_schedule(PpSchedule::zb_h1, 4, 8, 1);
  CHECK(words(zero_bubble, 0) == "F0 F1 F2 F3 B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 W7");
  CHECK(words(zero_bubble, 1) == "F0 F1 F2 B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 F6 B4 W3 F7 B5 W4 B6 W5 B7 W6 W7");
  CHECK(words(zero_bubble, 2) == "F0 F1 B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 F6 B5 W3 F7 B6 W4 B7 W5 W6 W7");
  CHECK(words(zero_bubble, 3) == "F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7");

  const Schedule one_by_one = make_schedule(PpSchedule::one_f_one_b, 4, 6, 1);
  CHECK(words(one_by_one, 0) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5");
  CHECK(words(one_by_one, 2) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5");
  CHECK(words(one_by_one, 3) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5");
  CHECK(words(make_schedule(PpSchedule::afab, 4, 3, 1), 2) == "F0 F1 F2 B0 B1 B2");

  const Schedule chunks = make_schedule(PpSchedule::interleaved, 2, 4, 2);
  CHECK(words(chunks, 0) ==
        "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0");
  CHECK(words(chunks, 1) ==
        "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0");
}

TEST_CASE("05: fewer micro-batches than ranks", "[05][schedule]") {
  const Schedule one_by_one = make_schedule(PpSchedule::one_f_one_b, 4, 2, 1);
  CHECK(words(one_by_one, 0) == "F0 F1 B0 B1");
  CHECK(words(one_by_one, 3) == "F0 B0 F1 B1");
  CHECK(words(make_schedule(PpSchedule::zb_h1, 4, 2, 1), 3) == "F0 B0 F1 B1 W0 W1");
  CHECK(words(make_schedule(PpSchedule::zb_h1, 4, 2, 1), 1) == "F0 F1 B0 B1 W0 W1");
}

TEST_CASE("05: warm-ups, and interleaving one chunk", "[05][schedule]") {
  for (int p = 1; p <= 8; ++p) {
    for (int v = 1; v <= 4; ++v) {
      const int m = 4 * p;
      const Schedule s = make_schedule(PpSchedule::interleaved, p, m, v);
      if (v == 1) CHECK(s.ranks == make_schedule(PpSchedule::one_f_one_b, p, m, 1).ranks);
      for (int k = 0; k < p; ++k) {
        const std::string order = words(s, k);
        const auto forwards = std::count(order.begin(), order.begin() + order.find('B'), 'F');
        CHECK(forwards == 1 + (v == 1 ? p - k - 1 : 2 * (p - k - 1) + (v - 1) * p));
      }
    }
  }
}

TEST_CASE("05: messages: sent at once, received one compute instruction ahead", "[05][schedule]") {
  const Schedule s = make_schedule(PpSchedule::one_f_one_b, 3, 3, 1);
  CHECK(words(s, 0, true) == "F0 SA0 F1 SA1 RG0 F2 SA2 RG1 B0 RG2 B1 B2");
  CHECK(words(s, 1, true) == "RA0 RA1 F0 SA0 RG0 F1 SA1 RA2 B0 SG0 RG1 F2 SA2 RG2 B1 SG1 B2 SG2");
  CHECK(words(s, 2, true) == "RA0 F0 RA1 B0 SG0 F1 RA2 B1 SG1 F2 B2 SG2");

  const Schedule one =
      make_schedule(PpSchedule::zb_h1, 2, 1, 1);  // the gradient not ahead of its own forward
  CHECK(words(one, 0, true) == "F0 SA0 RG0 B0 W0");
  CHECK(words(one, 1, true) == "RA0 F0 B0 SG0 W0");

  // Two ranks, two chunks: stages 0, 2 and 1, 3, so three messages each way, over two edges.
  CHECK(words(make_schedule(PpSchedule::interleaved, 2, 2, 2), 0, true) ==
        "F0.0 SA0.0 RA0.1 F1.0 SA1.0 RA1.1 F0.1 SA0.1 RG0.1 F1.1 SA1.1 RG1.1 B0.1 SG0.1 RG0.0 B1.1 SG1.1 "
        "RG1.0 B0.0 B1.0");
  for (const PpSchedule kind : {PpSchedule::afab, PpSchedule::interleaved, PpSchedule::zb_h1}) {
    const Schedule alone = make_schedule(kind, 1, 4, kind == PpSchedule::interleaved ? 3 : 1);
    CHECK(words(alone, 0, true) == words(alone, 0));
  }
}

TEST_CASE("05: bubbles are what the formulas say", "[05][schedule]") {
  // The last two have T_W > T_F, T_W > T_B: there the wait of the first, the last rank for its first work is
  // all.
  for (const Costs& costs : {Costs{1, 1, 1}, Costs{4, 3, 2}, Costs{1, 8, 4}, Costs{6, 2, 4}}) {
    const double f = costs.forward, b = costs.input_gradient, w = costs.weight_gradient;
    for (int p = 2; p <= 12; ++p) {
      for (int m = 1; m <= 36; ++m) {
        INFO("p " << p << ", m " << m << ", costs " << f << " " << b << " " << w);
        const double r = static_cast<double>(p - 1) / m;
        REQUIRE(simulate(make_schedule(PpSchedule::afab, p, m, 1), costs).bubble_ratio() == r);
        const Simulation one_by_one = simulate(make_schedule(PpSchedule::one_f_one_b, p, m, 1), costs);
        REQUIRE(one_by_one.bubble_ratio() == r);
        REQUIRE(one_by_one.bubble() == (p - 1) * (f + b + w));
        if (m < p) continue;
        const Simulation zero_bubble = simulate(make_schedule(PpSchedule::zb_h1, p, m, 1), costs);
        REQUIRE(zero_bubble.work == one_by_one.work);
        REQUIRE(zero_bubble.bubble() == (p - 1) * std::max({f + b - w, f, b}));
        for (int v = 1; v <= 4 && m % p == 0; ++v) {
          const Simulation chunks = simulate(make_schedule(PpSchedule::interleaved, p, m, v), costs);
          REQUIRE(chunks.work == v * one_by_one.work);
          REQUIRE(chunks.bubble_ratio() == static_cast<double>(p - 1) / (v * m));
        }
      }
    }
  }
  const auto bubble = [](PpSchedule kind, int p) {
    return simulate(make_schedule(kind, p, 2 * p, 1)).bubble();
  };
  CHECK(bubble(PpSchedule::one_f_one_b, 4) == 9);
  CHECK(bubble(PpSchedule::zb_h1, 4) == 3);
  CHECK(bubble(PpSchedule::one_f_one_b, 8) == 21);
  CHECK(bubble(PpSchedule::zb_h1, 8) == 7);
}

// A rank's work is 6 m chunks; the published peaks are p and p + 1/2 micro-batches of all its layers.
TEST_CASE("05: in a V the bubble is a chunk for each rank but one", "[05][schedule]") {
  for (int p = 1; p <= 12; ++p) {
    for (int m = 1; m <= 4 * p; ++m) {
      INFO("p " << p << ", m " << m);
      for (const PpSchedule kind : {PpSchedule::zb_v, PpSchedule::dualpipe_v}) {
        const Schedule s = make_schedule(kind, p, m, 2);
        for (int k = 0; k < p; ++k) {
          CHECK(s.stage(k, 0) == k);
          CHECK(s.stage(k, 1) == 2 * p - 1 - k);
        }
        const Simulation played = simulate(s);
        REQUIRE(played.work == 6 * m);
        if (m < 2 * p) continue;  // too few to fill it
        REQUIRE(played.bubble() == p - 1);
        for (const PeakInFlight& peak : played.in_flight)
          REQUIRE(peak.until_weight_gradient == 2 * p + (kind == PpSchedule::zb_v ? 0 : 1));
      }
    }
  }
}

// The paper's schedule has no bubble inside a stage. Here a step ends with a barrier: what is left is that
// the ranks do not begin at the same time.
TEST_CASE("05: zb-v is the published order, and waits only at its ends", "[05][schedule]") {
  const Schedule two = make_schedule(PpSchedule::zb_v, 2, 4, 2);
  CHECK(words(two, 0) ==
        "F0.0 F1.0 F2.0 F0.1 B0.1 W0.1 F1.1 B1.1 W1.1 F3.0 B0.0 W0.0 F2.1 B2.1 W2.1 B1.0 W1.0 F3.1 B3.1 W3.1 "
        "B2.0 W2.0 B3.0 W3.0");
  CHECK(words(two, 1) ==
        "F0.0 F0.1 F1.0 F1.1 B0.1 W0.1 F2.0 B0.0 W0.0 F2.1 B1.1 W1.1 F3.0 B1.0 W1.0 F3.1 B2.1 W2.1 B2.0 B3.1 "
        "B3.0 W2.0 W3.1 W3.0");

  CHECK(simulate(make_schedule(PpSchedule::zb_v, 4, 8, 2), {1, 1.3, 0.8}).bubble() == Approx(3.9));
  for (int p = 1; p <= 12; ++p) {
    for (int m = 2 * p - 1; m <= 4 * p; ++m) {
      INFO("p " << p << ", m " << m);
      const Schedule s = make_schedule(PpSchedule::zb_v, p, m, 2);
      for (const Costs& costs : {Costs{1, 1, 1}, Costs{10, 13, 8}, Costs{1, 4, 2}, Costs{3, 3, 2}})
        REQUIRE(simulate(s, costs).bubble() == (p - 1) * costs.input_gradient);
      const Simulation played = simulate(s);
      for (int k = 0; k < p; ++k) {
        double busy_until = k;
        for (size_t n = 0; n < s.ranks[k].size(); ++n) {
          if (is_message(s.ranks[k][n].action)) continue;
          REQUIRE(played.times[k][n].begin == busy_until);
          busy_until = played.times[k][n].end;
        }
      }
    }
  }
}

// The paper's bubble is (p/2 - 1) (F&B + B - 3W), where F&B is the time of a forward and a backward at once,
// and B that of both halves of backward. Here one runs after the other, and the next rank need not wait for
// the second one: the same as F&B = T_F + T_W.
TEST_CASE("05: dualpipe has the bubble of half as many ranks, and every stage twice", "[05][schedule]") {
  for (int p = 2; p <= 16; p += 2) {
    for (int m = 2; m <= 4 * p; m += 2) {
      INFO("p " << p << ", m " << m);
      const Schedule s = make_schedule(PpSchedule::dualpipe, p, m, 2);
      for (int k = 0; k < p; ++k) {
        CHECK((s.stage(k, 0) == k && s.copy(k, 0) == 0));
        CHECK((s.stage(k, 1) == p - 1 - k && s.copy(k, 1) == 1));
        for (const Instruction& i : s.ranks[k]) CHECK((i.micro_batch >= m / 2) == (i.chunk == 1));
      }
      for (const Costs& c : {Costs{1, 1, 1}, Costs{4, 3, 2}, Costs{2, 1, 1}}) {
        const Simulation played = simulate(s, c);
        const double f = c.forward, b = c.input_gradient, w = c.weight_gradient;
        REQUIRE(played.work == m * (f + b + w));
        if (m < 2 * p) continue;  // too few to fill it
        REQUIRE(played.bubble() == (p / 2 - 1) * (f + b - w));
        for (const PeakInFlight& peak : played.in_flight) REQUIRE(peak.until_weight_gradient == p + 1);
      }
    }
  }
}

TEST_CASE("05: micro-batches in flight", "[05][schedule]") {
  for (int p = 1; p <= 8; ++p) {
    for (int m = 1; m <= 12; ++m) {
      const Simulation all = simulate(make_schedule(PpSchedule::afab, p, m, 1));
      const Simulation one_by_one = simulate(make_schedule(PpSchedule::one_f_one_b, p, m, 1));
      const Simulation zero_bubble = simulate(make_schedule(PpSchedule::zb_h1, p, m, 1));
      for (int k = 0; k < p; ++k) {
        CHECK(all.in_flight[k].until_input_gradient == m);
        CHECK(all.in_flight[k].until_weight_gradient == m);
        CHECK(one_by_one.in_flight[k].until_input_gradient == std::min(p - k, m));
        CHECK(one_by_one.in_flight[k].until_weight_gradient == std::min(p - k, m));
        CHECK(zero_bubble.in_flight[k].until_input_gradient == std::min(p - k, m));
        CHECK(zero_bubble.in_flight[k].until_weight_gradient == std::min(p, m));
      }
    }
  }
  // p 2, v 2, from the order above: chunk 0 of rank 0 has F0 F1 F2 F3 before its first backward.
  const Schedule chunks = make_schedule(PpSchedule::interleaved, 2, 4, 2);
  CHECK(peak_in_flight(chunks.ranks[0], 0).until_weight_gradient == 4);
  CHECK(peak_in_flight(chunks.ranks[0], 1).until_weight_gradient == 2);
  CHECK(peak_in_flight(chunks.ranks[0]).until_weight_gradient == 5);
  CHECK(input_buffers(chunks, 0, 1) == 3);
  // The input gradient is the last to read an input, whenever the weight gradient is made.
  const Schedule zero_bubble = make_schedule(PpSchedule::zb_h1, 4, 8, 1);
  for (int k = 1; k < 4; ++k) CHECK(input_buffers(zero_bubble, k, 0) == 4 - k + 1);
}

// A program prints the line of a UsageError and ends with status 2.
TEST_CASE("05: every error of a schedule is one line of bad usage", "[05][schedule]") {
  Schedule cut = make_schedule(PpSchedule::one_f_one_b, 2, 4, 1), stuck = cut;
  cut.ranks[1].pop_back();
  stuck.m = 2;  // both ranks first wait for what the other one sends later
  stuck.ranks = {instructions("F0 SA0 RG0 B0 F1 SA1 RG1 B1"), instructions("RA0 F0 RA1 F1 B0 SG0 B1 SG1")};
  for (const Schedule& wrong : {cut, stuck}) {
    try {
      checked(wrong);
      FAIL("accepted");
    } catch (const UsageError& error) {
      CHECK(std::string(error.what()).find_first_of("\n?") == std::string::npos);
    }
  }
}

TEST_CASE("05: generated schedules keep the rules, and play by them", "[05][schedule]") {
  Random random;
  for (int round = 0; round < 400; ++round) {
    const Schedule s = random.schedule();
    const Costs costs = random.costs();
    INFO(s.name << ", p " << s.p << ", m " << s.m << ", v " << s.v);
    const Simulation played = simulate(s, costs);
    const auto time = [&](int rank, const Instruction& i) {
      const Instructions& list = s.ranks[rank];
      return played.times[rank][std::find(list.begin(), list.end(), i) - list.begin()];
    };
    const bool split = s.splits_backward;
    for (int rank = 0; rank < s.p; ++rank) {
      // Each begins as soon as the rules allow, and no sooner.
      double computed = 0, started = 0, complete[message_streams] = {};
      for (size_t n = 0; n < s.ranks[rank].size(); ++n) {
        const auto [action, i, chunk] = s.ranks[rank][n];
        const auto [begin, end] = played.times[rank][n];
        if (is_message(action)) {
          double& stream = complete[stream_of(action)];
          started = std::max(started, stream);
          if (action == Action::send_activation)
            started = std::max(started, time(rank, {Action::forward, i, chunk}).end);
          if (action == Action::send_gradient)
            started = std::max(started,
                               time(rank, {split ? Action::input_gradient : Action::backward, i, chunk}).end);
          const int last = i - input_buffers(s, rank, chunk);
          if (action == Action::receive_activation && last >= 0)
            started = std::max(
                started, time(rank, {split ? Action::input_gradient : Action::backward, last, chunk}).end);
          REQUIRE(begin == started);
          const bool from_first = rank == 0, from_last = rank == s.p - 1;
          const Interval other =
              action == Action::send_activation
                  ? time((rank + 1) % s.p, {Action::receive_activation, i, chunk + from_last})
              : action == Action::receive_activation
                  ? time((rank + s.p - 1) % s.p, {Action::send_activation, i, chunk - from_first})
              : action == Action::send_gradient
                  ? time((rank + s.p - 1) % s.p, {Action::receive_gradient, i, chunk - from_first})
                  : time((rank + 1) % s.p, {Action::send_gradient, i, chunk + from_last});
          REQUIRE(end == std::max(begin, other.begin) + costs.transfer);
          stream = end;
        } else {
          const int stage = chunk * s.p + rank;
          if (s.p > 1 && action == Action::forward && stage > 0)
            computed = std::max(computed, time(rank, {Action::receive_activation, i, chunk}).end);
          if (s.p > 1 && (action == Action::backward || action == Action::input_gradient) &&
              stage < s.p * s.v - 1)
            computed = std::max(computed, time(rank, {Action::receive_gradient, i, chunk}).end);
          REQUIRE(begin == computed);
          computed += action == Action::forward           ? costs.forward
                      : action == Action::input_gradient  ? costs.input_gradient
                      : action == Action::weight_gradient ? costs.weight_gradient
                                                          : costs.input_gradient + costs.weight_gradient;
          REQUIRE(end == computed);
        }
      }
      REQUIRE(played.total >= computed);
    }
  }
}

TEST_CASE("05: a receive waits until its buffer is free", "[05][schedule]") {
  // Rank 1 has two buffers: activation 2, sent at time 3, goes into that of micro-batch 0, whose backward
  // ends at 4.
  const Schedule s = {"",
                      false,
                      2,
                      3,
                      1,
                      looped(2, 1),
                      {instructions("F0 SA0 F1 SA1 F2 SA2 RG0 B0 RG1 B1 RG2 B2"),
                       instructions("RA0 F0 RA1 B0 RA2 SG0 F1 B1 SG1 F2 B2 SG2")}};
  const Simulation played = simulate(s);
  CHECK(played.times[0][5].begin == 3);
  CHECK(played.times[1][4].begin == 4);
  CHECK(played.times[0][5].end == 4);
}

TEST_CASE("05: a damaged schedule is refused where the damage is", "[05][schedule]") {
  Random random;
  for (int round = 0; round < 400; ++round) {
    const Schedule s = random.schedule();
    const int rank = random.number(0, s.p - 1), size = static_cast<int>(s.ranks[rank].size());
    const int n = random.number(0, size - 1);
    const auto begins_with = [&](const Schedule& damaged, int instruction) {
      const std::string said = complaint_of(damaged);
      INFO(s.name << ", p " << s.p << ", m " << s.m << ", v " << s.v << ": " << said);
      CHECK(said.starts_with("rank " + std::to_string(rank) + ", instruction " + std::to_string(instruction) +
                             " ("));
    };
    Schedule cut = s, twice = s, exchanged = s;
    cut.ranks[rank].resize(n);
    begins_with(cut, n);
    twice.ranks[rank].push_back(s.ranks[rank][n]);
    begins_with(twice, size);
    for (int other = n + 1; other < size; ++other) {
      Instruction &a = exchanged.ranks[rank][n], &b = exchanged.ranks[rank][other];
      if (a.micro_batch != b.micro_batch || a.chunk != b.chunk) continue;
      std::swap(a.action, b.action);
      // These two do not need each other; every other one needs what the one before it makes.
      const auto is = [&](Action first, Action second) { return b.action == first && a.action == second; };
      if (is(Action::send_activation, Action::receive_gradient)) break;
      if (is(Action::send_gradient, Action::weight_gradient)) break;
      begins_with(exchanged, n);
      break;
    }
  }
}

TEST_CASE("05: what is wrong with a schedule", "[05][schedule]") {
  const auto with = [](int m, const std::string& rank0, const std::string& rank1) {
    return Schedule{"", false, 2, m, 1, looped(2, 1), {instructions(rank0), instructions(rank1)}};
  };
  const std::string first = "F0 SA0 F1 SA1 RG0 B0 RG1 B1", last = "RA0 F0 RA1 B0 SG0 F1 B1 SG1";
  CHECK(complaint_of(with(2, first, last)) == "");
  CHECK(complaint_of(with(2, first, "F0 RA0 RA1 B0 SG0 F1 B1 SG1")) ==
        "rank 1, instruction 0 (forward of micro-batch 0, chunk 0): the receive_activation of micro-batch 0, "
        "chunk 0 has to come first");
  CHECK(complaint_of(with(2, first, "RA0 F0 RA1 B0 SG0 F1 B1")) ==
        "rank 1, instruction 7 (end of the list): 1 instructions are missing");
  CHECK(complaint_of(with(2, first, last + " F1")) ==
        "rank 1, instruction 8 (forward of micro-batch 1, chunk 0): it is one too many");
  CHECK(complaint_of(with(2, first, "RA0 F0 RA2 B0 SG0 F1 B1 SG1")) ==
        "rank 1, instruction 2 (receive_activation of micro-batch 2, chunk 0): it is one too many");
  CHECK(complaint_of(with(2, first, "RA1 RA0 F0 B0 SG0 F1 B1 SG1")) ==
        "rank 1, instruction 0 (receive_activation of micro-batch 1, chunk 0): what comes is rank 0's "
        "send_activation of micro-batch 0, chunk 0");
  CHECK(complaint_of(with(3, "F0 SA0 F1 SA1 F2 SA2 RG0 B0 RG1 B1 RG2 B2",
                          "RA0 RA1 RA2 F0 B0 SG0 F1 B1 SG1 F2 B2 SG2")) ==
        "rank 1, instruction 2 (receive_activation of micro-batch 2, chunk 0): no buffer is free");
  CHECK(complaint_of(with(2, "F0 SA0 F1 SA1 RG1 B1 RG0 B0", last)) ==
        "rank 0, instruction 4 (receive_gradient of micro-batch 1, chunk 0): what comes is rank 1's "
        "send_gradient of micro-batch 0, chunk 0");
}

TEST_CASE("05: deadlocks", "[05][schedule]") {
  const auto with = [](int m, const std::string& rank0, const std::string& rank1) {
    return Schedule{"", false, 2, m, 1, looped(2, 1), {instructions(rank0), instructions(rank1)}};
  };
  // One rank wants a gradient that the other makes only after an activation of the first.
  CHECK(complaint_of(with(2, "F0 SA0 RG0 B0 F1 SA1 RG1 B1", "RA0 F0 RA1 F1 B0 SG0 B1 SG1")) ==
        "deadlock: rank 0, instruction 3 (backward of micro-batch 0, chunk 0): what it needs is never "
        "received; "
        "rank 1, instruction 3 (forward of micro-batch 1, chunk 0): what it needs is never received");
  // Activation 2 is ready, but its send was issued behind a receive that waits for the one before it.
  const std::string last = "RA0 F0 RA1 F1 RA2 F2 B0 SG0 B1 SG1 B2 SG2";
  CHECK(complaint_of(with(3, "F0 SA0 F1 SA1 F2 RG0 SA2 RG1 B0 RG2 B1 B2", last)) == "");
  CHECK(complaint_of(with(3, "F0 SA0 F1 SA1 F2 RG0 RG1 SA2 B0 RG2 B1 B2", last)) ==
        "deadlock: rank 0, instruction 6 (receive_gradient of micro-batch 1, chunk 0): the message before it "
        "on its "
        "stream is never complete; "
        "rank 1, instruction 5 (forward of micro-batch 2, chunk 0): what it needs is never received");
  // A chunk before the one whose output it needs.
  const Schedule chunks = {"",
                           false,
                           1,
                           1,
                           2,
                           looped(1, 2),
                           {{{Action::forward, 0, 1},
                             {Action::forward, 0, 0},
                             {Action::backward, 0, 1},
                             {Action::backward, 0, 0}}}};
  CHECK(complaint_of(chunks) ==
        "rank 0, instruction 0 (forward of micro-batch 0, chunk 1): the forward of micro-batch 0, chunk 0 "
        "has to "
        "come first");

  // Why four streams: one for all stops 1f1b, one a direction closes the ring of an interleaved schedule.
  const Schedule one_by_one = make_schedule(PpSchedule::one_f_one_b, 4, 8, 1);
  const Schedule interleaved = make_schedule(PpSchedule::interleaved, 4, 8, 2);
  CHECK(complaint_of(one_by_one, 1).starts_with("deadlock:"));
  CHECK(complaint_of(one_by_one, 2) == "");
  CHECK(complaint_of(interleaved, 2).starts_with("deadlock:"));
  CHECK(complaint_of(interleaved, 4) == "");
}

TEST_CASE("05: a schedule from a file", "[05][schedule]") {
  const Schedule s = parse_schedule("two.txt",
                                    "# two ranks\n"
                                    "\n"
                                    "F0 F1\tB1 B0  # rank 0\r\n"
                                    "  # no W: B is all of backward\n"
                                    " F0 F1 B1 B0",
                                    2, 2);
  CHECK(s.name == "two.txt");
  CHECK(!s.splits_backward);
  CHECK((s.p == 2 && s.m == 2 && s.v == 1));
  CHECK(words(s, 0, true) == "F0 SA0 F1 SA1 RG1 RG0 B1 B0");
  CHECK(words(s, 1, true) == "RA0 RA1 F0 F1 B1 SG1 B0 SG0");
  CHECK(simulate(s).total == 9);
  // A comment's W splits nothing; one W does, and every B is then an input gradient.
  CHECK(!parse_schedule("", "F0 B0 # W0", 1, 1).splits_backward);
  const Schedule split = parse_schedule("", "F0 B0 W0", 1, 1);
  CHECK(split.splits_backward);
  CHECK(split.ranks[0] == instructions("F0 B0 W0", Action::input_gradient));

  const auto check_named = [](PpSchedule kind, int v) {
    for (int p = 1; p <= 5; ++p) {
      for (int m = 1; m <= 12; ++m) {
        if (kind == PpSchedule::interleaved && m % p != 0) continue;
        const Schedule named = make_schedule(kind, p, m, v), read = parse_schedule("", as_file(named), p, m);
        CHECK(read.ranks == named.ranks);
        CHECK(read.placement == named.placement);
        CHECK(read.splits_backward == named.splits_backward);
      }
    }
  };
  for (const PpSchedule kind : {PpSchedule::afab, PpSchedule::one_f_one_b, PpSchedule::zb_h1})
    check_named(kind, 1);
  for (const PpSchedule kind : {PpSchedule::interleaved, PpSchedule::zb_v, PpSchedule::dualpipe_v})
    check_named(kind, 2);
  check_named(PpSchedule::interleaved, 3);
  // F0 is F0.0.
  CHECK(parse_schedule("", "1,0: F0.1 F0 B0 B0.1", 1, 1).ranks ==
        parse_schedule("", "1,0: F0.1 F0.0 B0.0 B0.1", 1, 1).ranks);
}

TEST_CASE("05: what is wrong with the file of a schedule", "[05][schedule]") {
  const auto refused = [](const std::string& text, const std::string& value, const std::string& expected) {
    CHECK_THROWS_WITH(parse_schedule("a.txt", text, 2, 2),
                      "--pp-schedule: " + value + " is not valid; expected " + expected);
  };
  const std::string first = "F0 F1 B0 B1\n", last = "F0 B0 F1 B1\n",
                    either = "F, B or W, and a micro-batch from 0 to 1";
  CHECK_NOTHROW(parse_schedule("a.txt", first + last, 2, 2));
  refused("", "a.txt", "a line with instructions for each of 2 ranks; it has 0");
  refused(first + "# " + last, "a.txt", "a line with instructions for each of 2 ranks; it has 1");
  refused(first + last + last, "a.txt", "a line with instructions for each of 2 ranks; it has 3");
  refused("\n" + first + "\nF0 X0", "a.txt:4: X0", either);
  for (const std::string word :
       {"F", "0", "F2", "F-1", "F0x", "f0", "FF0", "F 0", "F99999999999", "F1.5", "F0,B0"})
    refused(first + word, "a.txt:2: " + word.substr(0, word.find(' ')), either);
  refused(first + std::string(1000, 'x'), "a.txt:2: xxxxxxxxxxxxxxxxxxxx", either);
  refused(first + "F0 B0 F0", "a.txt:2: F0", "it once in a line");
  refused(first + "F0 B0 B0", "a.txt:2: B0", "it once in a line");
  refused(first + "B0 F0", "a.txt:2: B0", "F0 before it");
  refused(first + "F0 B0 F1", "a.txt:2", "B1, which is missing");
  refused(first + "F0 B0", "a.txt:2", "F1, which is missing");
  refused("F0 F1 B0 B1 W0 W1\nF0 W0", "a.txt:2: W0", "B0 before it");
  refused("F0 F1 B0 B1 W0 W1\nF0 B0 W0 F1 B1", "a.txt:2", "W1, which is missing");
  refused("F0 F1 B0 B1\nF0 B0 W0 F1 B1 W1", "a.txt:1", "W0, which is missing");
}

TEST_CASE("05: what is wrong with the stages in a file", "[05][schedule]") {
  const auto refused = [](const std::string& text, const std::string& value, const std::string& expected) {
    CHECK_THROWS_WITH(parse_schedule("a.txt", text, 2, 1),
                      "--pp-schedule: " + value + " is not valid; expected " + expected);
  };
  const std::string first = "0,3: F0 F0.1 B0.1 B0\n",
                    stages = "stages such as 0,3: with each of 0 to 3 on one rank",
                    either = "F, B or W, and a micro-batch from 0 to 0, and a chunk from .0 to .1";
  CHECK_NOTHROW(parse_schedule("a.txt", first + "1,2: F0 F0.1 B0.1 B0", 2, 1));
  for (const std::string wrong : {"1,3:", "1,4:", "1,-1:", "1:", "1,1:", ":", "1,:", "a,b:", "1;2:", "1,2x:"})
    refused(first + wrong + " F0 F0.1 B0.1 B0", "a.txt:2: " + wrong, stages);
  refused(first + "F0 F0.1 B0.1 B0", "a.txt:2: ", stages);
  refused("F0 B0\n1,2: F0 B0", "a.txt:1: ", stages);
  for (const std::string word : {"F0.2", "F0.-1", "F0.", "F0.1x", "F0.1.1", "F.1", "F1.0"})
    refused(first + "1,2: " + word, "a.txt:2: " + word, either);
  refused(first + "1,2: F0 F0.1 B0 B0.1 B0", "a.txt:2: B0", "it once in a line");
  refused(first + "1,2: F0 B0.1", "a.txt:2: B0.1", "F0.1 before it");
  refused(first + "1,2: F0 F0.1 B0", "a.txt:2", "B0.1, which is missing");
}

// What complete_pipeline_options says of a file before anything runs.
TEST_CASE("05: a file that cannot run is refused", "[05][schedule]") {
  const auto complete = [](const std::string& text, Recompute recompute = Recompute::none) {
    TrainingConfig training;
    training.model.layers = 8;
    training.recompute = recompute;
    PipelineOptions options;
    options.pp_schedule = PpSchedule::from_file;
    options.pp_schedule_file = "a.txt";
    options.pp_schedule_text = text;
    complete_pipeline_options(training, options, 2, 2);
  };
  CHECK_NOTHROW(complete("F0 F1 B1 B0\nF0 F1 B1 B0"));
  CHECK_NOTHROW(complete("F0 F1 B1 B0\nF0 F1 B1 B0", Recompute::full));
  CHECK_THROWS_WITH(
      complete("F0 F1 B1 B0"),
      "--pp-schedule: a.txt is not valid; expected a line with instructions for each of 2 ranks; it "
      "has 1");
  CHECK_THROWS_WITH(
      complete("F0 F1 B1 W1 B0 W0\nF0 F1 B1 B0 W0 W1", Recompute::full),
      "--recompute: full is not valid; expected none or selective with a.txt, whose weight gradients "
      "need what full recomputation throws away");
  CHECK_THROWS_WITH(
      complete("F0 B0 F1 B1\nF0 F1 B0 B1"),
      "--pp-schedule: a.txt: deadlock: rank 0, instruction 3 (backward of micro-batch 0, chunk 0): what "
      "it needs is never received; rank 1, instruction 3 (forward of micro-batch 1, chunk 0): what it "
      "needs is never received");
  CHECK_THROWS_WITH(
      complete("F0 F1 B0 B1\nF1 F0 B0 B1"),
      "--pp-schedule: a.txt: rank 1, instruction 0 (receive_activation of micro-batch 1, chunk 0): what "
      "comes is rank 0's send_activation of micro-batch 0, chunk 0");
  CHECK_THROWS_WITH(
      complete("F0 F1 B0 B1\nF0 F1 B1 B0"),
      "--pp-schedule: a.txt: rank 0, instruction 2 (receive_gradient of micro-batch 0, chunk 0): what "
      "comes is rank 1's send_gradient of micro-batch 1, chunk 0");
}

TEST_CASE("05: a buffer holds one micro-batch at a time, in any order", "[05][schedule]") {
  // Micro-batch 1 leaves first, so the next one has its buffer.
  const Schedule odd = parse_schedule("", "F0 F1 B1 F2 B2 B0", 1, 3);
  CHECK(assign_activations(odd, 0, 0) == std::vector{0, 1, 1});
  CHECK(last_micro_batch(odd.ranks[0], 0) == 0);

  Random random;
  int ran = 0;
  for (int round = 0; round < 600; ++round) {
    const bool named = round % 2 == 0;
    const int p = random.number(1, 8), m = random.number(1, 12), v = random.number(1, 3);
    const Placement placement = round % 3 == 0 ? v_shaped(p) : looped(p, v);
    const Schedule s =
        named ? random.schedule()
              : parse_schedule("", tests::random_schedule(placement, m, round % 4 == 1, random.engine), p, m);
    if (!named && !complaint_of(s).empty()) continue;  // an order that its messages stop
    ++ran;
    INFO(s.name << "\n" << as_file(s));
    for (int rank = 0; rank < s.p; ++rank) {
      for (int chunk = 0; chunk < s.v; ++chunk) {
        const auto check = [&](const std::vector<int>& buffers, int count, Action take, Action free) {
          std::vector<int> holds(count, -1);
          for (const Instruction& i : s.ranks[rank]) {
            if (i.chunk != chunk || (i.action != take && i.action != free)) continue;
            int& held = holds.at(buffers[i.micro_batch]);
            REQUIRE(held == (i.action == take ? -1 : i.micro_batch));
            held = i.action == take ? i.micro_batch : -1;
            if (named) REQUIRE(buffers[i.micro_batch] == i.micro_batch % count);
          }
        };
        const Instructions& list = s.ranks[rank];
        const Action input_gradient = s.splits_backward ? Action::input_gradient : Action::backward;
        const Action end = s.splits_backward ? Action::weight_gradient : Action::backward;
        check(assign_activations(s, rank, chunk), peak_in_flight(list, chunk).until_weight_gradient,
              Action::forward, end);
        if (s.stage(rank, chunk) > 0)
          check(assign_inputs(s, rank, chunk), input_buffers(s, rank, chunk), fills_input(s, rank, chunk),
                input_gradient);
      }
    }
  }
  CHECK(ran > 440);
}

TEST_CASE("05: layers are split so that the slowest stage is fastest", "[05][schedule]") {
  CHECK(split_layers(8, 4, 0) == std::vector{0, 2, 4, 6, 8});
  CHECK(split_layers(10, 4, 0) == std::vector{0, 2, 4, 7, 10});
  CHECK(split_layers(8, 4, 2) == std::vector{0, 2, 4, 7, 8});
  CHECK(split_layers(4, 4, 5) == std::vector{0, 1, 2, 3, 4});
  CHECK(split_layers(6, 1, 1) == std::vector{0, 6});

  // Against all splits: the stages before `stage` cost `so_far` at most.
  Random random;
  for (int round = 0; round < 300; ++round) {
    const int stages = random.number(1, 5), layers = random.number(stages, 11);
    const double head = random.number(0, 12) / 4.0;
    const auto cost = [&](int stage, int count) { return count + (stage == stages - 1 ? head : 0); };
    const auto best = [&](const auto& self, int stage, int left) -> double {
      if (stage == stages - 1) return cost(stage, left);
      double least = 1e9;
      for (int count = 1; count <= left - (stages - 1 - stage); ++count)
        least = std::min(least, std::max(cost(stage, count), self(self, stage + 1, left - count)));
      return least;
    };
    const std::vector<int> boundaries = split_layers(layers, stages, head);
    double most = 0;
    for (int s = 0; s < stages; ++s) {
      REQUIRE(boundaries[s + 1] > boundaries[s]);
      most = std::max(most, cost(s, boundaries[s + 1] - boundaries[s]));
    }
    CHECK(boundaries.front() == 0);
    CHECK(boundaries.back() == layers);
    CHECK(most == best(best, 0, layers));
  }
}

TEST_CASE("05: requests that no schedule can serve", "[05][schedule]") {
  TrainingConfig training;
  training.model.layers = 8;
  PipelineOptions options;
  const auto complete = [&](int ranks, int m) {
    PipelineOptions copy = options;
    complete_pipeline_options(training, copy, ranks, m);
    return copy;
  };
  options.pp_schedule = PpSchedule::interleaved;
  options.vpp = 2;
  CHECK(complete(4, 8).pp == 4);
  CHECK(complete(4, 8).vpp == 2);
  CHECK(complete(1, 3).vpp == 1);
  CHECK_THROWS_WITH(
      complete(4, 6),
      "--pp-schedule: interleaved is not valid; expected 1f1b, or micro-batches in multiples of "
      "the 4 ranks; there are 6");
  CHECK_THROWS_WITH(complete(8, 8),
                    "--layers: 8 is not valid; expected at least 16, one a stage: 8 ranks x 2 chunks");
  options.pp = 4;
  CHECK_THROWS_WITH(complete(2, 8),
                    "--pp: 4 is not valid; expected the number of ranks, 2, unless with --show-schedule");
  options.show_schedule = true;
  CHECK(complete(1, 8).pp == 4);
  options = PipelineOptions();
  options.pp_schedule = PpSchedule::zb_h1;
  options.vpp = 1;
  CHECK_NOTHROW(complete(8, 3));
  CHECK_THROWS_WITH(complete(9, 9),
                    "--layers: 8 is not valid; expected at least 9, one a stage: 9 ranks x 1 chunks");
  options.pp_schedule = PpSchedule::from_file;  // layers first: no list is made, and no file is read
  CHECK_THROWS_WITH(complete(9, 1 << 20),
                    "--layers: 8 is not valid; expected at least 9, one a stage: 9 ranks x 1 chunks");
  options.pp_schedule = PpSchedule::dualpipe;
  options.vpp = 2;
  CHECK_NOTHROW(complete(8, 4));  // a copy has a stage a rank
  for (const auto& [ranks, m] : {std::pair(3, 4), {4, 3}}) {
    CHECK_THROWS_WITH(complete(ranks, m),
                      "--pp-schedule: dualpipe is not valid; expected dualpipe-v, or even "
                      "numbers of ranks and micro-batches; there are " +
                          std::to_string(ranks) + " and " + std::to_string(m));
  }
  options.pp_schedule = PpSchedule::zb_h1;
  options.vpp = 1;
  training.recompute = Recompute::full;
  CHECK_THROWS_WITH(complete(2, 2),
                    "--recompute: full is not valid; expected none or selective with zb-h1, whose weight "
                    "gradients need what full recomputation throws away");
}

TEST_CASE("05: a schedule as text", "[05][schedule]") {
  const auto text = [](PpSchedule kind, int p, int m, int v) {
    return draw_schedule(make_schedule(kind, p, m, v));
  };
  CHECK(text(PpSchedule::one_f_one_b, 2, 2, 1) ==
        "1f1b: 2 ranks, 2 micro-batches. Time 9 = work 6 + bubble 3 (50 % of the work)\n"
        "\n"
        "rank 0  F0F1....B0--..B1--  2 in flight\n"
        "rank 1  ..F0B0--F1B1--....  1 in flight\n");
  CHECK(text(PpSchedule::zb_h1, 2, 2, 1) ==
        "zb-h1: 2 ranks, 2 micro-batches. Time 7 = work 6 + bubble 1 (16.7 % of the work)\n"
        "\n"
        "rank 0  F0F1..B0W0B1W1  2 in flight\n"
        "rank 1  ..F0B0F1B1W0W1  2 in flight, 1 until B\n");
  CHECK(text(PpSchedule::interleaved, 2, 6, 2) ==  // longer than a line
        "interleaved: 2 ranks, 2 chunks a rank, 6 micro-batches. Time 19.5 = work 18 + bubble 1.5 (8.3 % of "
        "the "
        "work)\n"
        "\n"
        "rank 0  F0F1f0f1F2..b0--F3b1--f2B0--f3B1--F4b2--F5b3--f4B2--f5B3--..b4--..b5  5 in flight\n"
        "rank 1  ..F0F1f0b0--f1b1--F2B0--F3B1--f2b2--f3b3--F4B2--F5B3--f4b4--f5b5--B4  3 in flight\n"
        "\n"
        "rank 0  --B4--B5--\n"
        "rank 1  --B5--....\n");

  for (const PpSchedule kind : {PpSchedule::afab, PpSchedule::one_f_one_b, PpSchedule::zb_h1}) {
    std::istringstream lines(text(kind, 4, 8, 1));
    int count = 0;
    for (std::string line; std::getline(lines, line); ++count) CHECK(line.size() <= 100);
    CHECK(count == 6);  // each rank in one line
  }

  // With two-digit numbers, too, no cell is cut: each instruction stands whole in one row, once.
  const std::string many = text(PpSchedule::one_f_one_b, 4, 16, 1);
  const auto count_of = [&](const std::string& label) {
    int count = 0;
    for (size_t at = many.find(label); at != std::string::npos; at = many.find(label, at + 1)) ++count;
    return count;
  };
  for (int m = 10; m < 16; ++m) {
    CHECK(count_of("F" + std::to_string(m)) == 4);
    CHECK(count_of("B" + std::to_string(m)) == 4);
  }
}

TEST_CASE("05: a schedule from a file is drawn beside the others", "[05][schedule]") {
  PipelineOptions options;
  options.pp_schedule = PpSchedule::from_file;
  options.pp_schedule_file = "order.txt";
  options.pp_schedule_text = "F0 F1 B1 B0\nF0 F1 B1 B0\n";
  CHECK(print_schedule(options, 2, 2) ==
        "order.txt: 2 ranks, 2 micro-batches. Time 9 = work 6 + bubble 3 (50 % of the work)\n"
        "\n"
        "rank 0  F0F1......B1--B0--  2 in flight\n"
        "rank 1  ..F0F1B1--B0--....  2 in flight\n"
        "\n"
        "                 time  bubble  of the work  in flight\n"
        "afab                9       3         50 %          2\n"
        "1f1b                9       3         50 %          2\n"
        "interleaved       7.5     1.5         25 %          2\n"
        "zb-h1               7       1       16.7 %          2\n"
        "zb-v              6.5     0.5        8.3 %          2\n"
        "dualpipe            6       0          0 %          2, two copies of the model\n"
        "dualpipe-v        6.5     0.5        8.3 %          2\n"
        "order.txt           9       3         50 %          2\n");
}
