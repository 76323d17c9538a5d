// Two passes at once on one stream, a forward and a backward. Each has a thread of the host, and they take
// turns: a pass issues its work until it would wait for messages, and then lets the other one go on. So the
// stream gets the products of one pass while the messages of the other travel. No two threads run at the same
// time, and how long anything takes changes no turn. So all ranks issue the same operations in the same
// order, as NCCL demands.
#pragma once

#include <functional>
#include <semaphore>
#include <thread>

#include "device/cuda.h"

namespace pentatron {

class Turns {
 public:
  // Calls both functions, and returns when both have returned. `first` begins.
  static void take(const std::function<void()>& first, const std::function<void()>& second) {
    Turns turns;
    const trace::Position position = trace::here;
    int device = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    std::thread thread([&] {
      CUDA_CHECK(cudaSetDevice(device));
      turns.wait(1);
      trace::here = position;
      turns.play(1, second);
    });
    turns.play(0, first);
    thread.join();
    advance_clock(turns.clock_);
  }

  // Whether this thread shares the stream with another pass.
  static bool shared() { return turns_ != nullptr; }

  // Lets the other pass go on, and returns when that passes or ends.
  static void pass() {
    if (!shared() || turns_->one_has_ended_) return;
    turns_->hand_over();
    turns_->wait(player_);
  }

 private:
  void play(int player, const std::function<void()>& function) {
    turns_ = this, player_ = player;
    function();
    one_has_ended_ = true;
    hand_over();
    turns_ = nullptr;
  }
  void hand_over() {
    clock_ = now();
    turn_[1 - player_].release();
  }
  void wait(int player) {
    turn_[player].acquire();
    advance_clock(clock_);
  }

  static inline thread_local Turns* turns_ = nullptr;  // those that this thread takes part in
  static inline thread_local int player_ = 0;
  std::binary_semaphore turn_[2] = {std::binary_semaphore(0), std::binary_semaphore(0)};
  bool one_has_ended_ = false;
  double clock_ = 0;  // now() of the thread that handed over: the modelled clock is a thread's
};

}  // namespace pentatron
