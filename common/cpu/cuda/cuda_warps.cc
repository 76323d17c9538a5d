// Fibers begin in a context of their own (makecontext) and then switch by longjmp, which makes no system
// call.
#undef _FORTIFY_SOURCE  // its longjmp refuses to change the stack
#include "cuda_warps.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#elif defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace {

constexpr size_t kStackBytes = size_t{128} << 10;
constexpr unsigned kLanes = cuda_cpu::lanes_of_warp;

[[noreturn]] void refuse(const char* what) {
  std::fprintf(stderr, "a kernel's warps: %s\n", what);
  std::abort();
}

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
  bool zeros;
  void perform() const { zeros ? std::memset(to, 0, bytes) : std::memcpy(to, from, bytes); }
};

enum class State { ready, in_operation, at_barrier, finished };

// What the sanitizers have to know of a stack, before a switch and after it. At a longjmp AddressSanitizer
// forgets what it knew of the memory above the stack pointer, up to the end of the stack. ThreadSanitizer
// counts calls and returns: functions that switch must not be counted.
struct Stack {
#if defined(__SANITIZE_ADDRESS__)
  const void* begin = nullptr;
  size_t bytes = 0;
  void* fake = nullptr;  // for frames that are used after they have returned

  void create(const void* memory) { begin = memory, bytes = kStackBytes; }
  void leave_for(const Stack& next) { __sanitizer_start_switch_fiber(&fake, next.begin, next.bytes); }
  void arrive_from(Stack& last) { __sanitizer_finish_switch_fiber(fake, &last.begin, &last.bytes); }
#elif defined(__SANITIZE_THREAD__)
  struct Destroy {
    void operator()(void* fiber) const { __tsan_destroy_fiber(fiber); }
  };
  std::unique_ptr<void, Destroy> of_fiber;
  void* current = nullptr;

  void create(const void*) { of_fiber.reset(current = __tsan_create_fiber(0)); }
  [[gnu::no_sanitize("thread")]] void leave_for(const Stack& next) {
    if (!of_fiber) current = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(next.current, 0);
  }
  [[gnu::no_sanitize("thread")]] void arrive_from(Stack&) {}
#else
  void create(const void*) {}
  void leave_for(const Stack&) {}
  void arrive_from(Stack&) {}
#endif
};

struct Fiber {
  State state;
  bool started;
  jmp_buf where;
  ucontext_t context;
  std::unique_ptr<char[]> memory;
  Stack stack;
  std::vector<Copy> copies;  // begun, and not yet done
};

struct Warp {
  unsigned arrived = 0;
  void (*operation)(void* const*) = nullptr;
  void* arguments[kLanes];
};

// The fibers of the block that this thread runs.
struct Fibers {
  std::vector<Fiber> of_thread;
  std::vector<Warp> warps;
  cuda_cpu::BlockBody body;
  unsigned current = 0;
  jmp_buf scheduler;
  Stack of_scheduler;
  std::minstd_rand chance;
};
thread_local Fibers fibers;

std::atomic<long> reads{0}, reads_with_conflicts{0};

// Lets others run until this fiber is ready again.
[[gnu::no_sanitize("thread")]] void leave(State state) {
  Fiber& self = fibers.of_thread[fibers.current];
  self.state = state;
  if (_setjmp(self.where) == 0) {
    self.stack.leave_for(fibers.of_scheduler);
    _longjmp(fibers.scheduler, 1);
  }
  self.stack.arrive_from(fibers.of_scheduler);
}

[[gnu::no_sanitize("thread")]] void begin_fiber() {
  fibers.of_thread[fibers.current].stack.arrive_from(fibers.of_scheduler);
  fibers.body.call(fibers.body.bound);
  leave(State::finished);
}

// Returns when the fiber leaves.
[[gnu::noinline, gnu::no_sanitize("thread")]] void resume(Fiber& fiber) {
  if (_setjmp(fibers.scheduler) != 0) return fibers.of_scheduler.arrive_from(fiber.stack);
  fibers.of_scheduler.leave_for(fiber.stack);
  if (fiber.started) _longjmp(fiber.where, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}

void prepare(Fiber& fiber) {
  if (!fiber.memory) {
    fiber.memory.reset(new char[kStackBytes]);
    fiber.stack.create(fiber.memory.get());
  }
  fiber.state = State::ready;
  fiber.started = false;
  fiber.copies.clear();
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.memory.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, begin_fiber, 0);
}

bool all_in(State state, unsigned first, unsigned last) {
  const auto begin = fibers.of_thread.begin();
  return std::all_of(begin + first, begin + last, [&](const Fiber& f) { return f.state == state; });
}

// Gives each lane of a warp that is ready its turn. False if there was none.
bool run_warp(unsigned warp) {
  bool ran = false;
  for (unsigned i = warp * kLanes; i < (warp + 1) * kLanes; ++i) {
    if (fibers.of_thread[i].state != State::ready) continue;
    fibers.current = i;
    resume(fibers.of_thread[i]);
    ran = true;
  }
  return ran;
}

// When no warp can go on, all must have finished or be at a barrier, which then opens.
bool open_barrier(unsigned threads) {
  if (all_in(State::finished, 0, threads)) return false;
  if (!all_in(State::at_barrier, 0, threads)) refuse("threads wait for others that will not come");
  for (unsigned i = 0; i < threads; ++i) fibers.of_thread[i].state = State::ready;
  return true;
}

// ---- Fragments --------------------------------------------------------------------------------------------

// Halves of registers: element i of a fragment is in register i / 2.
template <class T>
float element(const uint32_t* registers, int i) {
  return static_cast<float>(std::bit_cast<T>(static_cast<uint16_t>(registers[i / 2] >> 16 * (i % 2))));
}

struct Mma {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};

template <class T>
void multiply(void* const* of_lane) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const Mma& mma = *static_cast<const Mma*>(of_lane[lane]);
    const int group = lane / 4, in_group = lane % 4;
    for (int i = 0; i < 8; ++i) {
      const int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
      a[row][in_group * 2 + i % 2 + (i >= 4 ? 8 : 0)] = element<T>(mma.a, i);
    }
    for (int i = 0; i < 4; ++i) b[in_group * 2 + i % 2 + (i >= 2 ? 8 : 0)][group] = element<T>(mma.b, i);
  }
  float product[16][8] = {};
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) product[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    float* d = static_cast<const Mma*>(of_lane[lane])->d;
    for (int i = 0; i < 4; ++i) d[i] += product[lane / 4 + (i < 2 ? 0 : 8)][lane % 4 * 2 + i % 2];
  }
}

struct Ldmatrix {
  uint32_t* registers;
  const void* row;
  bool transposed;
};

// Eight rows of 16 bytes are read at once where they are in different banks.
void count_read(void* const* of_row) {
  unsigned banks = 0;
  for (int row = 0; row < 8; ++row) {
    banks |= 1u << (reinterpret_cast<uintptr_t>(static_cast<const Ldmatrix*>(of_row[row])->row) / 16 % 8);
  }
  ++reads;
  if (banks != 0xff) ++reads_with_conflicts;
}

// Lanes 8 m to 8 m + 7 bring the addresses of the rows of matrix m.
void load_matrices(void* const* of_lane) {
  uint16_t matrix[8][8];
  for (int m = 0; m < 4; ++m) {
    for (int row = 0; row < 8; ++row) {
      std::memcpy(matrix[row], static_cast<const Ldmatrix*>(of_lane[8 * m + row])->row, 16);
    }
    count_read(of_lane + 8 * m);
    for (int lane = 0; lane < 32; ++lane) {
      const Ldmatrix& load = *static_cast<const Ldmatrix*>(of_lane[lane]);
      const int i = lane / 4, j = lane % 4 * 2;
      load.registers[m] = load.transposed ? matrix[j][i] | uint32_t{matrix[j + 1][i]} << 16
                                          : matrix[i][j] | uint32_t{matrix[i][j + 1]} << 16;
    }
  }
}

struct Shuffle {
  float value, result;
  int bit;
};

void shuffle(void* const* of_lane) {
  for (int lane = 0; lane < 32; ++lane) {
    Shuffle& self = *static_cast<Shuffle*>(of_lane[lane]);
    self.result = static_cast<const Shuffle*>(of_lane[lane ^ self.bit])->value;
  }
}

bool aligned(const void* address, size_t bytes) { return reinterpret_cast<uintptr_t>(address) % bytes == 0; }

}  // namespace

namespace cuda_cpu {

void run_fibers(unsigned threads, BlockBody body) {
  if (threads % kLanes != 0) refuse("threads that do not fill a warp");
  const unsigned warps = threads / kLanes;
  if (fibers.of_thread.size() < threads) fibers.of_thread.resize(threads);
  for (unsigned i = 0; i < threads; ++i) prepare(fibers.of_thread[i]);
  fibers.warps.assign(warps, {});
  fibers.body = body;
  constexpr unsigned kTurns = 64;  // of a warp, about, until chance lets another one go on
  do {
    unsigned warp = fibers.chance() % warps, blocked = 0;  // warps in sequence that cannot go on
    while (blocked < warps) {
      if (run_warp(warp)) {
        blocked = 0;
        if (fibers.chance() % kTurns == 0) warp = fibers.chance() % warps;
      } else {
        ++blocked;
        warp = (warp + 1) % warps;
      }
    }
  } while (open_barrier(threads));
}

unsigned fiber() { return fibers.current; }

void synchronize_fibers() { leave(State::at_barrier); }

void together(void (*operation)(void* const*), void* argument) {
  const unsigned self = fibers.current, first = self / kLanes * kLanes;
  Warp& warp = fibers.warps[self / kLanes];
  if (warp.arrived > 0 && warp.operation != operation) refuse("lanes are at different operations");
  warp.operation = operation;
  warp.arguments[self - first] = argument;
  if (++warp.arrived < kLanes) return leave(State::in_operation);
  operation(warp.arguments);
  warp.arrived = 0;
  for (unsigned i = first; i < first + kLanes; ++i) fibers.of_thread[i].state = State::ready;
}

template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  Mma mma = {d, a, {b0, b1}};
  together(multiply<T>, &mma);
}
template void mma_m16n8k16<__nv_bfloat16>(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t);
template void mma_m16n8k16<__half>(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t);

void ldmatrix_x4(uint32_t (&registers)[4], const void* row, bool transposed) {
  if (!aligned(row, 16)) refuse("ldmatrix of a misaligned row");
  Ldmatrix load = {registers, row, transposed};
  together(load_matrices, &load);
}

float shuffle_xor(float value, int bit) {
  Shuffle exchange = {value, 0, bit};
  together(shuffle, &exchange);
  return exchange.result;
}

void cp_async(void* to, const void* from, size_t bytes, bool zeros) {
  if (!aligned(to, bytes) || !aligned(from, bytes)) refuse("cp.async of a misaligned address");
  const Copy copy = {to, from, bytes, zeros};
  if (fibers.chance() % 2 == 0) return copy.perform();
  fibers.of_thread[fibers.current].copies.push_back(copy);
}

void cp_async_wait_all() {
  std::vector<Copy>& copies = fibers.of_thread[fibers.current].copies;
  for (const Copy& copy : copies) copy.perform();
  copies.clear();
}

int32_t atomic_add(int32_t* to, int32_t term) { return std::atomic_ref(*to).fetch_add(term); }

void wait_until(const int32_t* at, int32_t number) {
  while (std::atomic_ref(const_cast<int32_t&>(*at)).load() != number) std::this_thread::yield();
}

void set_released(int32_t* at, int32_t number) { std::atomic_ref(*at).store(number); }

RowReads row_reads() { return {reads, reads_with_conflicts}; }

}  // namespace cuda_cpu
