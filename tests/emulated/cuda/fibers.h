// One thread block on one CPU thread: a fiber per CUDA thread, a deterministic scheduler, and a single way to fail.
//
// A fiber runs until it has to wait (a barrier, a warp operation); then the scheduler picks the next one. Copies and
// matrix products are separate actors: see Timing. Nothing here throws: a failure stores a message and jumps to the
// scheduler, because the stacks of the other fibers could not be unwound.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

namespace tl_emulator {

enum class Order { forward, reverse, random };

// When an asynchronous operation takes effect. `late` (as late as its waits allow) shows a missing wait as wrong
// numbers; `early` (at once) shows operands that were not ready, and buffers overwritten while still in use; `random`
// decides anew for every operation.
enum class Timing { late, early, random };

struct Options {
  Order order;
  Timing timing;
  uint64_t seed;
  int poison;  // byte that fills shared memory at block start
  int time_limit;  // CPU seconds per launch
};

struct Dim3 {
  unsigned int x, y, z;
};

class Random {
 public:
  void seed(uint64_t value) { state_ = value * 0x9E3779B97F4A7C15u + 1; }
  uint64_t next() {  // splitmix64
    uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  bool coin() { return next() & 1; }
  size_t below(size_t n) { return next() % n; }

 private:
  uint64_t state_ = 1;
};

inline std::string format(const char* pattern, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, pattern);
  vsnprintf(text, sizeof text, pattern, arguments);
  va_end(arguments);
  return text;
}

// Something that a thread can wait for; describes itself for the deadlock report.
struct Waitable {
  virtual std::string describe(int detail) const = 0;

 protected:
  ~Waitable() = default;
};

class Block {
 public:
  static constexpr int kMaxThreads = 1024;

  // Runs `body` in every thread of one block. Returns false, with `failure` set, on any fault.
  bool run(void (*body)(), int threads, Dim3 block_dim, const Options& options);

  // For code inside a fiber.
  int thread() const { return current_; }
  int threads() const { return static_cast<int>(fibers_.size()); }
  bool finished(int thread) const { return fibers_[thread].state == State::done; }
  int unfinished() const { return unfinished_; }
  void wait_for(const Waitable& what, int detail = 0);
  void wake(int thread) { fibers_[thread].state = State::ready; }
  void give_way() { switch_out(); }
  [[noreturn]] void fail(const std::string& message);

  // An operation of a copy engine. It may run after the thread that issued it has finished.
  void submit(std::function<void()> operation);
  bool decide_early();

  std::string failure;
  std::vector<std::function<void(int)>> on_thread_end;
  std::vector<std::function<void()>> on_block_end;
  Dim3 thread_index{}, block_index{}, block_size{}, grid_size{};
  std::string kernel;

 private:
  enum class State { ready, blocked, done };
  struct Fiber {
    State state;
    bool started;
    ucontext_t entry;
    jmp_buf resume;
    const Waitable* waiting_for;
    int detail;
  };

  static constexpr size_t kStackBytes = 256 * 1024;

  static void trampoline();
  void make_stacks(int threads);
  void resume(int thread);
  void switch_out();
  void run_one_operation();
  [[noreturn]] void report_deadlock();
  void schedule(std::vector<int>& turn);

  static void on_signal(int number, siginfo_t* info, void*);

  std::vector<Fiber> fibers_;
  std::deque<std::function<void()>> operations_;
  char* stacks_ = nullptr;
  int current_ = -1, unfinished_ = 0, stacks_made_ = 0;
  void (*body_)() = nullptr;
  Options options_{};
  Random random_;
  jmp_buf scheduler_;
  sigjmp_buf failed_;
  volatile sig_atomic_t overdue_ = 0;
  friend class SignalGuard;
};

inline Block& block() {
  static Block instance;
  return instance;
}

[[noreturn]] inline void fail(const std::string& message) { block().fail(message); }

inline void Block::make_stacks(int threads) {
  if (!stacks_) {  // address space only; pages come when touched
    void* memory = mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    stacks_ = memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
    if (!stacks_) {
      fail("no memory for the stacks of the fibers");
    }
  }
  for (; stacks_made_ < threads; ++stacks_made_) {  // an overrun faults instead of damaging the neighbour
    mprotect(stacks_ + stacks_made_ * kStackBytes, 4096, PROT_NONE);
  }
}

inline void Block::trampoline() {
  Block& self = block();
  self.body_();
  self.fibers_[self.current_].state = State::done;
  --self.unfinished_;
  for (auto& hook : self.on_thread_end) {
    hook(self.current_);
  }
  _longjmp(self.scheduler_, 1);
}

inline void Block::resume(int thread) {
  Fiber& fiber = fibers_[thread];
  current_ = thread;
  unsigned int x = block_size.x, y = block_size.y;
  thread_index = {thread % x, thread / x % y, thread / x / y};
  if (!_setjmp(scheduler_)) {
    if (fiber.started) {
      _longjmp(fiber.resume, 1);
    }
    fiber.started = true;
    setcontext(&fiber.entry);  // only the first entry: it costs a system call, the jumps do not
  }
  current_ = -1;
  if (overdue_) {
    fail(format("still running after %d s of CPU time", options_.time_limit));
  }
}

inline void Block::switch_out() {
  if (!_setjmp(fibers_[current_].resume)) {
    _longjmp(scheduler_, 1);
  }
}

inline void Block::wait_for(const Waitable& what, int detail) {
  Fiber& fiber = fibers_[current_];
  fiber.state = State::blocked;
  fiber.waiting_for = &what;
  fiber.detail = detail;
  switch_out();
}

inline void Block::fail(const std::string& message) {
  std::string where = current_ < 0 ? "" : format(", thread %d", current_);
  failure = format("%s, block (%u, %u, %u)%s: ", kernel.c_str(), block_index.x, block_index.y, block_index.z,
                   where.c_str()) + message;
  siglongjmp(failed_, 1);
}

inline bool Block::decide_early() {
  return options_.timing == Timing::early || (options_.timing == Timing::random && random_.coin());
}

inline void Block::submit(std::function<void()> operation) {
  if (decide_early()) {
    operation();
  } else {
    operations_.push_back(std::move(operation));
  }
}

inline void Block::run_one_operation() {
  // Copies may complete in any order. Newest first leaves the oldest, which most code has long waited for, to the end.
  size_t pick = options_.timing == Timing::random ? random_.below(operations_.size()) : operations_.size() - 1;
  auto operation = std::move(operations_[pick]);
  operations_.erase(operations_.begin() + pick);
  operation();
}

inline void Block::report_deadlock() {
  std::string report = "deadlock, no thread can go on:";
  for (int first = 0; first < threads();) {
    auto same = [&](int other) {
      const Fiber &a = fibers_[first], &b = fibers_[other];
      return a.state == b.state &&
             (a.state == State::done || (a.waiting_for == b.waiting_for && a.detail == b.detail));
    };
    int last = first;
    while (last + 1 < threads() && same(last + 1)) {
      ++last;
    }
    const Fiber& fiber = fibers_[first];
    report += format("\n  threads %d-%d: ", first, last);
    report += fiber.state == State::done ? "finished" : "wait for " + fiber.waiting_for->describe(fiber.detail);
    first = last + 1;
  }
  fail(report);
}

inline void Block::schedule(std::vector<int>& turn) {
  while (true) {
    uint64_t resting = 0;  // a random half of the warps sits a round out, so that warps drift apart
    if (options_.order == Order::random) {
      for (size_t i = turn.size(); i > 1; --i) {
        std::swap(turn[i - 1], turn[random_.below(i)]);
      }
      resting = random_.next();
    }
    bool progress = false;
    for (int thread : turn) {
      if (fibers_[thread].state == State::ready) {
        if (!(resting >> (thread / 32) & 1)) {
          resume(thread);
        }
        progress = true;
      }
    }
    if (options_.timing == Timing::random && !operations_.empty() && random_.coin()) {
      run_one_operation();
    } else if (!progress && !operations_.empty()) {
      run_one_operation();
    } else if (!progress) {
      if (unfinished_ == 0) {
        return;
      }
      report_deadlock();
    }
  }
}

inline bool Block::run(void (*body)(), int threads, Dim3 block_dim, const Options& options) {
  options_ = options;
  body_ = body;
  block_size = block_dim;
  current_ = -1;
  overdue_ = 0;
  operations_.clear();
  random_.seed(options.seed + 1000003 * block_index.x + 7919 * block_index.y + block_index.z);
  if (sigsetjmp(failed_, 1)) {
    current_ = -1;
    return false;
  }
  make_stacks(threads);
  fibers_.assign(threads, Fiber{});
  unfinished_ = threads;
  for (int t = 0; t < threads; ++t) {
    getcontext(&fibers_[t].entry);
    fibers_[t].entry.uc_stack.ss_sp = stacks_ + t * kStackBytes;
    fibers_[t].entry.uc_stack.ss_size = kStackBytes;
    fibers_[t].entry.uc_link = nullptr;
    makecontext(&fibers_[t].entry, &Block::trampoline, 0);
  }
  std::vector<int> turn(threads);
  std::iota(turn.begin(), turn.end(), 0);
  if (options.order == Order::reverse) {
    std::reverse(turn.begin(), turn.end());
  }
  schedule(turn);
  for (auto& hook : on_block_end) {
    hook();
  }
  return true;
}

inline void Block::on_signal(int number, siginfo_t* info, void*) {
  Block& self = block();
  if (number == SIGPROF) {
    // The scheduler sees the flag at the next switch. A loop that never switches is left at the second tick.
    if (!self.overdue_) {
      self.overdue_ = 1;
      return;
    }
    self.fail("a loop without any wait does not end");
  }
  const char* what = number == SIGFPE ? "integer division by zero"
                     : number == SIGILL ? "index outside a local array"
                                        : "access to an address that is not mapped";
  self.fail(format("%s (signal %d, address %p)", what, number, info->si_addr));
}

// Turns faults inside a kernel into failures; gives the process its own handlers back afterwards.
class SignalGuard {
 public:
  explicit SignalGuard(int time_limit) : stack_(64 * 1024) {
    stack_t alternative{};
    alternative.ss_sp = stack_.data();
    alternative.ss_size = stack_.size();
    sigaltstack(&alternative, &old_stack_);
    struct sigaction action{};
    action.sa_sigaction = &Block::on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < kCount; ++i) {
      sigaction(kSignals[i], &action, &old_[i]);
    }
    set_timer(time_limit);
  }
  ~SignalGuard() {
    set_timer(0);
    for (int i = 0; i < kCount; ++i) {
      sigaction(kSignals[i], &old_[i], nullptr);
    }
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  static void set_timer(int seconds) {
    itimerval timer{};
    timer.it_value.tv_sec = seconds;
    timer.it_interval.tv_sec = seconds ? 2 : 0;
    setitimer(ITIMER_PROF, &timer, nullptr);
  }
  static constexpr int kCount = 5;
  static constexpr int kSignals[kCount] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGPROF};
  std::vector<char> stack_;
  stack_t old_stack_{};
  struct sigaction old_[kCount];
};

}  // namespace tl_emulator
