// Barriers of a block: mbarrier objects with phases and transaction counts, and the sixteen named barriers.
#pragma once

#include <map>

#include "cuda_types.h"

namespace tl_emulator {

// An mbarrier. A phase completes when all arrivals and all announced bytes have come.
class Mbarrier final : public Waitable {
 public:
  Mbarrier(const char* name, int index) : name_(format("%s[%d]", name, index)) {}

  void init(uint32_t arrivals) {
    if (expected_) {
      fail("mbarrier " + name_ + " is initialised twice");
    }
    if (arrivals < 1 || arrivals > 0xFFFFF) {
      fail("mbarrier " + name_ + format(": %u arrivals are out of range", arrivals));
    }
    expected_ = pending_ = arrivals;
  }

  // Blocks until the phase of this parity is complete. Checked again after every wake-up: a thread that comes more
  // than one phase late waits for the wrong one, as on the GPU.
  void wait(uint32_t parity) {
    require_init();
    if (parity > 1) {
      fail("mbarrier " + name_ + format(": parity %u", parity));
    }
    while (!test_wait(parity)) {
      waiting_.push_back(block().thread());
      block().wait_for(*this, parity);
    }
  }
  bool test_wait(uint32_t parity, uint32_t = 1) {
    require_init();
    return (phase_ & 1) != parity;
  }
  bool try_wait(uint32_t parity) { return test_wait(parity); }

  void arrive() {
    require_init();
    if (pending_ == 0) {
      fail("mbarrier " + name_ + format(": more than %d arrivals in phase %u", expected_, phase_));
    }
    --pending_;
    complete_if_due();
  }
  void expect_transaction(uint32_t bytes) {
    require_init();
    bytes_ += bytes;
  }
  void arrive_and_expect_tx(uint32_t bytes) {
    expect_transaction(bytes);
    arrive();
  }
  void receive(uint32_t bytes) {
    require_init();
    bytes_ -= bytes;
    complete_if_due();
  }
  void add_pending() {  // cp.async arrivals that are not counted in the initial number
    require_init();
    ++pending_;
  }

  std::string describe(int parity) const override {
    return "mbarrier " + name_ + format(", parity %d (in phase %u: %d of %d arrivals and %lld bytes missing)", parity,
                                        phase_, pending_, expected_, static_cast<long long>(bytes_));
  }

 private:
  void require_init() const {
    if (!expected_) {
      fail("mbarrier " + name_ + " is used before init");
    }
  }
  void complete_if_due() {
    if (pending_ || bytes_) {
      return;
    }
    ++phase_;
    pending_ = expected_;
    for (int thread : waiting_) {
      block().wake(thread);
    }
    waiting_.clear();
  }

  std::string name_;
  int expected_ = 0, pending_ = 0;
  int64_t bytes_ = 0;
  uint32_t phase_ = 0;
  std::vector<int> waiting_;
};

inline std::map<std::string, std::vector<Mbarrier>> mbarriers;

class MbarrierArray {
 public:
  MbarrierArray(const char* name, int count) : name_(name) {
    auto& found = mbarriers[name];
    while (static_cast<int>(found.size()) < count) {
      found.emplace_back(name, static_cast<int>(found.size()));
    }
    items_ = &found;
  }
  Mbarrier& operator[](int64_t i) const {
    if (i < 0 || i >= static_cast<int64_t>(items_->size())) {
      fail(format("%s[%lld]: there are %zu barriers", name_, static_cast<long long>(i), items_->size()));
    }
    return (*items_)[i];
  }

 private:
  const char* name_;
  std::vector<Mbarrier>* items_;
};

class NamedBarrierState final : public Waitable {
 public:
  // count 0: every unfinished thread of the block (__syncthreads).
  void arrive(int id, int count, bool wait) {
    id_ = id;
    if (count % 32 || count < 0) {
      fail(format("named barrier %d: %d threads are not whole warps", id, count));
    }
    if (!arrived_.empty() && count != count_) {
      fail(format("named barrier %d: joined with %d threads while others expect %d", id, count, count_));
    }
    count_ = count;
    int self = block().thread();
    if (std::find(arrived_.begin(), arrived_.end(), self) != arrived_.end()) {
      fail(format("named barrier %d: the thread arrives twice in one round", id));
    }
    arrived_.push_back(self);
    uint64_t round = round_;
    complete_if_due();
    while (wait && round_ == round) {
      block().wait_for(*this);
    }
  }
  void complete_if_due() {
    int needed = count_ ? count_ : block().unfinished();
    if (arrived_.empty() || static_cast<int>(arrived_.size()) < needed) {
      return;
    }
    require_whole_warps();
    ++round_;
    for (int thread : arrived_) {
      if (!block().finished(thread)) {
        block().wake(thread);
      }
    }
    arrived_.clear();
  }
  bool waiting_for_all() const { return !arrived_.empty() && count_ == 0; }
  std::string describe(int) const override {
    int needed = count_ ? count_ : block().unfinished();
    return format("named barrier %d (%zu of %d threads have arrived)", id_, arrived_.size(), needed);
  }

 private:
  void require_whole_warps() const {
    std::map<int, int> lanes;
    for (int thread : arrived_) {
      ++lanes[thread / 32];
    }
    for (auto [warp, present] : lanes) {
      int unfinished = 0;
      for (int t = warp * 32; t < std::min(warp * 32 + 32, block().threads()); ++t) {
        unfinished += !block().finished(t);
      }
      if (present < unfinished) {
        fail(format("named barrier %d: only %d of %d threads of warp %d take part", id_, present, unfinished, warp));
      }
    }
  }

  int id_ = 0, count_ = 0;
  uint64_t round_ = 0;
  std::vector<int> arrived_;
};

inline std::vector<NamedBarrierState> named_barriers(16);

inline NamedBarrierState& named_barrier(int id) {
  if (id < 0 || id > 15) {
    fail(format("named barrier %d: there are 16", id));
  }
  return named_barriers[id];
}

inline int votes[Block::kMaxThreads];

inline int count_across_block(int predicate) {
  votes[block().thread()] = predicate ? 1 : 0;
  named_barrier(0).arrive(0, 0, true);
  int sum = std::accumulate(votes, votes + block().threads(), 0);
  named_barrier(0).arrive(0, 0, true);  // nobody votes again before all have counted
  votes[block().thread()] = 0;          // a thread that finishes counts as no
  return sum;
}

}  // namespace tl_emulator

using Barrier = tl_emulator::Mbarrier;

inline void __syncthreads() { tl_emulator::named_barrier(0).arrive(0, 0, true); }
inline int __syncthreads_count(int predicate) { return tl_emulator::count_across_block(predicate); }
inline int __syncthreads_or(int predicate) { return tl_emulator::count_across_block(predicate) > 0; }
inline int __syncthreads_and(int predicate) { return tl_emulator::count_across_block(!predicate) == 0; }

namespace tl {

inline void __sync_thread_partial(int id = 0, int count = 0) { tl_emulator::named_barrier(id).arrive(id, count, true); }
inline void __named_barrier_arrive(int id, int count) { tl_emulator::named_barrier(id).arrive(id, count, false); }
inline void mbarrier_init(Barrier& barrier, uint32_t arrivals) { barrier.init(arrivals); }
inline void mbarrier_wait(Barrier& barrier, int parity) { barrier.wait(parity); }
inline void mbarrier_arrive(Barrier& barrier) { barrier.arrive(); }
inline void mbarrier_expect_tx(Barrier& barrier, uint32_t bytes) { barrier.expect_transaction(bytes); }
inline void mbarrier_arrive_expect_tx(Barrier& barrier, uint32_t bytes) { barrier.arrive_and_expect_tx(bytes); }

// Fences order memory between hardware proxies; this memory has one view, so their absence does not show here.
inline void fence_barrier_init() {}
inline void fence_proxy_async() {}

template <int threads>
struct NamedBarrier {
  template <int id = 1>
  static void sync() {
    __sync_thread_partial(id, threads);
  }
};
struct SyncThreadsBarrier {
  template <int id = 0>
  static void sync() {
    __syncthreads();
  }
};

}  // namespace tl
