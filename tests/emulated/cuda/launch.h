// Runs a grid block by block and hands the outcome to Python. Included before the rewritten kernel text.
#pragma once

#include "wgmma.h"

namespace tl_emulator {

// One kernel argument; the Python side fills the same layout.
struct Argument {
  const char* name;
  void* data;        // tensor: first element
  int64_t bytes;     // tensor: extent from there
  int64_t integer;   // scalars
  double real;
  CUtensorMap map;   // tensor maps
};

struct Launch {
  const char* kernel;
  const Argument* arguments;
  int32_t count;
  int32_t grid[3], block[3];
  int32_t shared_bytes;
  int32_t order, timing, poison, time_limit;
  uint64_t seed;
};

inline const Launch* current_launch;

template <class T>
Pointer<T> tensor(int i) {
  const Argument& a = current_launch->arguments[i];
  return {static_cast<T*>(a.data), a.data, static_cast<size_t>(a.bytes), a.name};
}
template <class T>
T scalar(int i) {
  const Argument& a = current_launch->arguments[i];
  return std::is_floating_point_v<T> ? static_cast<T>(a.real) : static_cast<T>(a.integer);
}
inline const CUtensorMap& tensor_map(int i) { return current_launch->arguments[i].map; }

inline void reset_block(int poison) {
  memset(shared_memory, poison, shared_bytes);
  mbarriers.clear();
  named_barriers.assign(16, {});
  std::fill(votes, votes + Block::kMaxThreads, 0);
  warps.assign(Block::kMaxThreads / 32, {});
  copy_queues.assign(Block::kMaxThreads, {});
  bulk_queues.assign(Block::kMaxThreads, {});
  matrix_queues.clear();
  matrix_queues.resize(Block::kMaxThreads / 32);
}

inline void end_of_thread_meetings(int thread) {
  if (named_barriers[0].waiting_for_all()) {
    named_barriers[0].complete_if_due();
  }
  warps[thread / 32].close_if_complete();
}

inline bool run_grid(const Launch& launch, void (*body)()) {
  Block& b = block();
  current_launch = &launch;
  b.kernel = launch.kernel;
  b.failure.clear();
  b.on_thread_end = {end_of_thread_transfers, end_of_thread_products, end_of_thread_meetings};
  b.on_block_end = {end_of_block_products};
  shared_bytes = launch.shared_bytes;
  global_regions.clear();
  for (int i = 0; i < launch.count; ++i) {
    const Argument& a = launch.arguments[i];
    if (a.data) {
      auto begin = static_cast<const char*>(a.data);
      global_regions.push_back({a.name, begin, begin + a.bytes});
    }
  }
  auto extent = [](const int32_t* v) {
    return Dim3{static_cast<unsigned>(v[0]), static_cast<unsigned>(v[1]), static_cast<unsigned>(v[2])};
  };
  b.grid_size = extent(launch.grid);
  Options options{static_cast<Order>(launch.order), static_cast<Timing>(launch.timing), launch.seed, launch.poison,
                  launch.time_limit};
  int threads = launch.block[0] * launch.block[1] * launch.block[2];
  int64_t blocks = static_cast<int64_t>(launch.grid[0]) * launch.grid[1] * launch.grid[2];
  SignalGuard guard(launch.time_limit);
  for (int64_t i = 0; i < blocks; ++i) {
    int64_t n = options.order == Order::reverse ? blocks - 1 - i : i;
    unsigned x = launch.grid[0], y = launch.grid[1];
    b.block_index = {static_cast<unsigned>(n % x), static_cast<unsigned>(n / x % y), static_cast<unsigned>(n / x / y)};
    reset_block(launch.poison);
    if (!b.run(body, threads, extent(launch.block), options)) {
      return false;
    }
  }
  return true;
}

inline int run_and_report(const Launch& launch, void (*body)(), char* message, size_t capacity) {
  if (run_grid(launch, body)) {
    return 0;
  }
  snprintf(message, capacity, "%s", block().failure.c_str());
  return 1;
}

}  // namespace tl_emulator
