// Asynchronous copies: cp.async, bulk and tensor (TMA) loads, bulk stores and reduce-adds.
#pragma once

#include <memory>

#include "atomics.h"

// Arguments of cuTensorMapEncodeTiled, already checked by the Python side. Strides in bytes.
struct CUtensorMap {
  char* base;
  int32_t rank, element_bytes, swizzle_bytes, is_float32;
  int64_t size[5], stride[5];
  int32_t box[5];
};

namespace tl_emulator {

// Where the copy engine and the matrix unit put byte `offset` of a swizzled tile: 16-byte chunks of a row are
// permuted by the row's number within its group of 8, 4 or 2 rows. Offsets count from the 1024-byte aligned base.
inline uint32_t swizzle(uint32_t offset, int span) {
  switch (span) {
    case 128:
      return offset ^ ((offset >> 7 & 7) << 4);
    case 64:
      return offset ^ ((offset >> 7 & 3) << 4);
    case 32:
      return offset ^ ((offset >> 7 & 1) << 4);
    default:
      return offset;
  }
}

// ---- cp.async: a thread's own copies. Done when a group is waited for or a barrier arrival needs them. ----

struct CopyItem {
  void* to;
  const void* from;  // null: zero fill
  int bytes;
  bool done;
};

struct CopyQueue {
  std::deque<std::shared_ptr<CopyItem>> items;  // all that may be incomplete, oldest first
  size_t uncommitted = 0;
  std::deque<size_t> groups;  // sizes of committed groups, oldest first
};

inline std::vector<CopyQueue> copy_queues(Block::kMaxThreads);

inline void perform(CopyItem& item) {
  if (item.done) {
    return;
  }
  item.done = true;
  if (item.from) {
    memcpy(item.to, item.from, item.bytes);
  } else {
    memset(item.to, 0, item.bytes);
  }
}

inline void copy_async(const void* to, const void* from, int bytes, bool read) {
  shared_offset(to, bytes, bytes, "cp.async destination");
  if (read) {
    check_global(from, bytes, bytes, "cp.async source");
  }
  CopyQueue& queue = copy_queues[block().thread()];
  queue.items.push_back(
      std::make_shared<CopyItem>(CopyItem{const_cast<void*>(to), read ? from : nullptr, bytes, false}));
  ++queue.uncommitted;
  if (block().decide_early()) {
    perform(*queue.items.back());
  }
}

inline void commit_copies() {
  CopyQueue& queue = copy_queues[block().thread()];
  queue.groups.push_back(queue.uncommitted);
  queue.uncommitted = 0;
}

// wait_all (allowed 0) includes copies that were never committed.
inline void wait_for_copies(size_t allowed) {
  CopyQueue& queue = copy_queues[block().thread()];
  if (allowed == 0) {
    commit_copies();
  }
  while (queue.groups.size() > allowed) {
    for (size_t i = 0; i < queue.groups.front(); ++i) {
      perform(*queue.items.front());
      queue.items.pop_front();
    }
    queue.groups.pop_front();
  }
  block().give_way();
}

// The arrival comes when all earlier copies of this thread have landed.
inline void arrive_after_copies(Mbarrier& barrier, bool counted) {
  if (!counted) {
    barrier.add_pending();
  }
  std::vector<std::shared_ptr<CopyItem>> earlier(copy_queues[block().thread()].items.begin(),
                                                 copy_queues[block().thread()].items.end());
  block().submit([earlier, &barrier] {
    for (auto& item : earlier) {
      perform(*item);
    }
    barrier.arrive();
  });
}

// ---- Tensor tiles ----

struct Tile {
  CUtensorMap map;
  uint32_t shared;
  int64_t corner[5];

  Tile(const CUtensorMap& m, const void* address, std::initializer_list<int64_t> coordinates) : map(m) {
    if (static_cast<int>(coordinates.size()) != map.rank) {
      fail(format("tensor copy: %zu coordinates for a map of rank %d", coordinates.size(), map.rank));
    }
    std::copy(coordinates.begin(), coordinates.end(), corner);
    shared = shared_offset(address, bytes(), 128, "tensor copy");
  }
  uint32_t row_bytes() const { return map.box[0] * map.element_bytes; }
  uint32_t bytes() const {
    uint32_t rows = 1;
    for (int i = 1; i < map.rank; ++i) {
      rows *= map.box[i];
    }
    return rows * row_bytes();
  }

  // visit(shared byte, global element or null, bytes): elements outside the tensor have no address.
  template <class Visit>
  void for_each_piece(Visit visit) const {
    uint32_t width = row_bytes();
    for (uint32_t row = 0; row * width < bytes(); ++row) {
      int64_t offset = 0;
      bool inside = true;
      int64_t rest = row;
      for (int i = 1; i < map.rank; ++i) {
        int64_t x = corner[i] + rest % map.box[i];
        rest /= map.box[i];
        inside &= x >= 0 && x < map.size[i];
        offset += x * map.stride[i];
      }
      for (int e = 0; e < map.box[0]; ++e) {
        int64_t x = corner[0] + e;
        uint32_t at = swizzle(shared + row * width + e * map.element_bytes, map.swizzle_bytes);
        bool exists = inside && x >= 0 && x < map.size[0];
        visit(at, exists ? map.base + offset + x * map.element_bytes : nullptr);
      }
    }
  }
};

inline void load_tile(const Tile& tile, Mbarrier& barrier) {
  int size = tile.map.element_bytes;
  tile.for_each_piece([&](uint32_t at, const char* element) {
    if (element) {
      memcpy(shared_memory + at, element, size);
    } else {
      memset(shared_memory + at, 0, size);
    }
  });
  barrier.receive(tile.bytes());
}

inline void add_float(char* to, const unsigned char* from) {
  float sum, value;
  memcpy(&sum, to, 4);
  memcpy(&value, from, 4);
  sum += value;
  memcpy(to, &sum, 4);
}

inline void store_tile(const Tile& tile, bool add) {
  tile.for_each_piece([&](uint32_t at, char* element) {
    if (!element) {
      return;
    }
    if (add) {
      add_float(element, shared_memory + at);
    } else {
      memcpy(element, shared_memory + at, tile.map.element_bytes);
    }
  });
}

// ---- Bulk groups of stores: shared memory is read when the group is waited for (late) or at once (early) ----

struct BulkQueue {
  std::vector<std::function<void()>> open;
  std::deque<std::vector<std::function<void()>>> groups;
};

inline std::vector<BulkQueue> bulk_queues(Block::kMaxThreads);

inline void submit_store(std::function<void()> store) {
  if (block().decide_early()) {
    store();
    store = [] {};
  }
  bulk_queues[block().thread()].open.push_back(std::move(store));
}

inline void wait_for_stores(size_t allowed) {
  auto& groups = bulk_queues[block().thread()].groups;
  while (groups.size() > allowed) {
    for (auto& store : groups.front()) {
      store();
    }
    groups.pop_front();
  }
  block().give_way();
}

inline void check_bulk(const void* shared, const void* global, uint32_t bytes, const char* what) {
  if (bytes % 16) {
    fail(format("%s: %u bytes are not a multiple of 16", what, bytes));
  }
  shared_offset(shared, bytes, 16, what);
  check_global(global, bytes, 16, what);
}

inline void end_of_thread_transfers(int thread) {
  if (!bulk_queues[thread].open.empty() || !bulk_queues[thread].groups.empty()) {
    fail("the thread ends while a bulk store may still read shared memory (commit and wait are missing)");
  }
}

}  // namespace tl_emulator

namespace tl {

enum class CacheHintSm90 : uint64_t {
  EVICT_NORMAL = 0x1000000000000000,
  EVICT_FIRST = 0x12F0000000000000,
  EVICT_LAST = 0x14F0000000000000,
};

template <int bytes>
void cp_async_gs(const void* to, const void* from) {
  tl_emulator::copy_async(to, from, bytes, true);
}
template <int bytes>
void cp_async_gs_conditional(const void* to, const void* from, bool condition) {
  tl_emulator::copy_async(to, from, bytes, condition);
}
inline void cp_async_commit() { tl_emulator::commit_copies(); }
template <int groups>
void cp_async_wait() {
  tl_emulator::wait_for_copies(groups);
}
inline void mbarrier_cp_async_arrive(Barrier& barrier) { tl_emulator::arrive_after_copies(barrier, false); }
inline void mbarrier_cp_async_arrive_noinc(Barrier& barrier) { tl_emulator::arrive_after_copies(barrier, true); }

template <class... Coordinates>
void issue_tensor_load(const CUtensorMap& map, Barrier& barrier, const void* shared, Coordinates... coordinates) {
  tl_emulator::Tile tile(map, shared, {static_cast<int64_t>(coordinates)...});
  tl_emulator::block().submit([tile, &barrier] { tl_emulator::load_tile(tile, barrier); });
}
template <CacheHintSm90 = CacheHintSm90::EVICT_NORMAL, class... Coordinates>
void tma_load(const CUtensorMap& map, Barrier& barrier, const void* shared, Coordinates... coordinates) {
  issue_tensor_load(map, barrier, shared, coordinates...);
}
inline void tma_load(void* shared, const void* global, Barrier& barrier, uint32_t bytes) {
  tl_emulator::check_bulk(shared, global, bytes, "bulk load");
  tl_emulator::block().submit([=, &barrier] {
    memcpy(shared, global, bytes);
    barrier.receive(bytes);
  });
}

template <CacheHintSm90 = CacheHintSm90::EVICT_NORMAL, class... Coordinates>
void tma_store(const CUtensorMap& map, const void* shared, Coordinates... coordinates) {
  tl_emulator::Tile tile(map, shared, {static_cast<int64_t>(coordinates)...});
  tl_emulator::submit_store([tile] { tl_emulator::store_tile(tile, false); });
}
template <CacheHintSm90 = CacheHintSm90::EVICT_NORMAL>
void tma_store(void* global, void* shared, uint32_t bytes) {
  tl_emulator::check_bulk(shared, global, bytes, "bulk store");
  tl_emulator::submit_store([=] { memcpy(global, shared, bytes); });
}
template <class... Coordinates>
void tma_store_add(const CUtensorMap& map, const void* shared, Coordinates... coordinates) {
  if (!map.is_float32) {
    tl_emulator::fail("tma_store_add: only float32 is emulated");
  }
  tl_emulator::Tile tile(map, shared, {static_cast<int64_t>(coordinates)...});
  tl_emulator::submit_store([tile] { tl_emulator::store_tile(tile, true); });
}
inline void tma_store_add(float* shared, float* global, int bytes) {
  tl_emulator::check_bulk(shared, global, bytes, "bulk reduce-add");
  tl_emulator::submit_store([=] {
    for (int i = 0; i < bytes / 4; ++i) {
      tl_emulator::add_float(reinterpret_cast<char*>(global + i), reinterpret_cast<unsigned char*>(shared + i));
    }
  });
}
inline void tma_store_arrive() {
  auto& queue = tl_emulator::bulk_queues[tl_emulator::block().thread()];
  queue.groups.push_back(std::move(queue.open));
  queue.open.clear();
}
template <int groups, bool read = true>
void tma_store_wait() {
  tl_emulator::wait_for_stores(groups);
}
template <class Map>
void prefetch_tma_descriptor(const Map&) {}

inline uint32_t load_global_32(const void* at) {
  tl_emulator::check_global(at, 4, 4, "load_global_32");
  return *static_cast<const uint32_t*>(at);
}
inline uint2 load_global_64(const void* at) {
  tl_emulator::check_global(at, 8, 8, "load_global_64");
  return *static_cast<const uint2*>(at);
}
inline uint4 load_global_128(const void* at) {
  tl_emulator::check_global(at, 16, 16, "load_global_128");
  return *static_cast<const uint4*>(at);
}
inline uint32_t load_global_32_conditional(const void* at, bool yes) { return yes ? load_global_32(at) : 0; }
inline uint2 load_global_64_conditional(const void* at, bool yes) { return yes ? load_global_64(at) : uint2{}; }
inline uint4 load_global_128_conditional(const void* at, bool yes) { return yes ? load_global_128(at) : uint4{}; }
inline uint4 load_shared_128(const void* at) {
  tl_emulator::shared_offset(at, 16, 16, "load_shared_128");
  return *static_cast<const uint4*>(at);
}
inline void store_shared_32(void* at, uint32_t value) {
  tl_emulator::shared_offset(at, 4, 4, "store_shared_32");
  *static_cast<uint32_t*>(at) = value;
}
inline void store_shared_64(void* at, uint2 value) {
  tl_emulator::shared_offset(at, 8, 8, "store_shared_64");
  *static_cast<uint2*>(at) = value;
}
inline void store_shared_128(void* at, uint4 value) {
  tl_emulator::shared_offset(at, 16, 16, "store_shared_128");
  *static_cast<uint4*>(at) = value;
}
inline void store_global_32(void* at, uint32_t value) {
  tl_emulator::check_global(at, 4, 4, "store_global_32");
  *static_cast<uint32_t*>(at) = value;
}
inline void store_global_64(void* at, uint2 value) {
  tl_emulator::check_global(at, 8, 8, "store_global_64");
  *static_cast<uint2*>(at) = value;
}
inline void store_global_128(void* at, uint4 value) {
  tl_emulator::check_global(at, 16, 16, "store_global_128");
  *static_cast<uint4*>(at) = value;
}
inline void store_global_128_conditional(void* at, uint4 value, bool yes) {
  if (yes) {
    store_global_128(at, value);
  }
}

}  // namespace tl
