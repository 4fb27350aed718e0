// Operations of a warp: all lanes of the mask meet, exchange one 64-bit value each, and go on.
#pragma once

#include <array>

#include "barriers.h"

namespace tl_emulator {

struct Exchange {
  std::array<uint64_t, 32> values;
  uint32_t present;
  uint64_t of(int lane) const {
    if (!(present >> lane & 1)) {
      fail(format("reads a value from lane %d, which does not take part", lane));
    }
    return values[lane];
  }
};

inline std::array<Exchange, Block::kMaxThreads> last_exchange;  // what each thread received

class WarpMeeting final : public Waitable {
 public:
  void reset() { open_.clear(); }

  const Exchange& join(const char* operation, uint32_t mask, uint64_t value) {
    int self = block().thread();
    int lane = self & 31;
    warp_ = self / 32;
    if (!(mask >> lane & 1)) {
      fail(format("%s: lane %d is not in its own mask %08x", operation, lane, mask));
    }
    Meeting* meeting = nullptr;
    for (Meeting& m : open_) {
      if (m.mask == mask) {
        meeting = &m;
      }
    }
    if (!meeting) {
      open_.push_back({operation, mask, {}});
      meeting = &open_.back();
    }
    if (strcmp(meeting->operation, operation)) {
      fail(format("lanes of warp %d execute different operations: %s and %s", warp_, meeting->operation, operation));
    }
    meeting->exchange.values[lane] = value;
    meeting->exchange.present |= 1u << lane;
    waiting_ |= 1u << lane;
    close_if_complete();
    while (waiting_ >> lane & 1) {
      block().wait_for(*this);
    }
    return last_exchange[self];
  }

  // Lanes that have finished are not waited for.
  void close_if_complete() {
    for (size_t i = 0; i < open_.size(); ++i) {
      uint32_t needed = open_[i].mask & unfinished_lanes();
      if ((open_[i].exchange.present & needed) != needed) {
        continue;
      }
      for (int lane = 0; lane < 32; ++lane) {
        if (open_[i].exchange.present >> lane & 1) {
          last_exchange[warp_ * 32 + lane] = open_[i].exchange;
          waiting_ &= ~(1u << lane);
          block().wake(warp_ * 32 + lane);
        }
      }
      open_.erase(open_.begin() + i);
      return;
    }
  }

  std::string describe(int) const override {
    std::string text;
    for (const Meeting& m : open_) {
      text += format("%s of warp %d (lanes %08x of %08x have come) ", m.operation, warp_, m.exchange.present, m.mask);
    }
    return text;
  }

 private:
  struct Meeting {
    const char* operation;
    uint32_t mask;
    Exchange exchange;
  };
  uint32_t unfinished_lanes() const {
    uint32_t lanes = 0;
    for (int lane = 0; lane < 32; ++lane) {
      int thread = warp_ * 32 + lane;
      lanes |= thread < block().threads() && !block().finished(thread) ? 1u << lane : 0;
    }
    return lanes;
  }

  int warp_ = 0;
  uint32_t waiting_ = 0;
  std::vector<Meeting> open_;
};

inline std::vector<WarpMeeting> warps(Block::kMaxThreads / 32);

inline const Exchange& exchange(const char* operation, uint32_t mask, uint64_t value) {
  return warps[block().thread() / 32].join(operation, mask, value);
}

template <class T>
T shuffle(const char* operation, uint32_t mask, T value, int source_lane) {
  static_assert(sizeof(T) <= 8);
  uint64_t word = 0;
  memcpy(&word, &value, sizeof(T));
  uint64_t found = exchange(operation, mask, word).of(source_lane);
  memcpy(&value, &found, sizeof(T));
  return value;
}

inline int lane() { return block().thread() & 31; }

// Addresses of the 8x8 matrices of ldmatrix and stmatrix: lane 8 m + r names row r of matrix m.
inline const Exchange& matrix_rows(const char* operation, const void* address, int matrices) {
  if (lane() < 8 * matrices) {
    shared_offset(address, 16, 16, operation);
  }
  return exchange(operation, ~0u, reinterpret_cast<uint64_t>(address));
}

template <bool transposed, class... Words>
void store_matrices(void* address, Words... words) {
  uint32_t values[] = {static_cast<uint32_t>(words)...};
  constexpr int count = sizeof...(words);
  const Exchange& rows = matrix_rows("stmatrix", address, count);
  for (int m = 0; m < count; ++m) {
    for (int half = 0; half < 2; ++half) {
      int i = lane() / 4, j = lane() % 4 * 2 + half;
      int row = transposed ? j : i, column = transposed ? i : j;
      uint16_t element = values[m] >> (16 * half);
      memcpy(reinterpret_cast<char*>(rows.of(m * 8 + row)) + column * 2, &element, 2);
    }
  }
}

template <bool transposed, int count>
void load_matrices(const void* address, void* registers) {
  const Exchange& rows = matrix_rows("ldmatrix", address, count);
  for (int m = 0; m < count; ++m) {
    for (int half = 0; half < 2; ++half) {
      int i = lane() / 4, j = lane() % 4 * 2 + half;
      int row = transposed ? j : i, column = transposed ? i : j;
      memcpy(static_cast<char*>(registers) + m * 4 + half * 2,
             reinterpret_cast<const char*>(rows.of(m * 8 + row)) + column * 2, 2);
    }
  }
}

}  // namespace tl_emulator

inline void __syncwarp(uint32_t mask = ~0u) { tl_emulator::exchange("syncwarp", mask, 0); }

inline uint32_t __ballot_sync(uint32_t mask, int predicate) {
  const auto& all = tl_emulator::exchange("ballot", mask, predicate ? 1 : 0);
  uint32_t votes = 0;
  for (int i = 0; i < 32; ++i) {
    votes |= (all.present >> i & 1) && all.values[i] ? 1u << i : 0;
  }
  return votes;
}
inline uint32_t __ballot(int predicate) { return __ballot_sync(~0u, predicate); }
inline int __any_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

// A source outside the segment of `width` lanes means the lane itself.
template <class T>
T __shfl_sync(uint32_t mask, T value, int source, int width = 32) {
  int lane = tl_emulator::lane();
  return tl_emulator::shuffle("shfl", mask, value, (lane & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, int delta, int width = 32) {
  int lane = tl_emulator::lane();
  return tl_emulator::shuffle("shfl_up", mask, value, (lane & (width - 1)) < delta ? lane : lane - delta);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T value, int delta, int width = 32) {
  int lane = tl_emulator::lane();
  return tl_emulator::shuffle("shfl_down", mask, value, (lane & (width - 1)) + delta >= width ? lane : lane + delta);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int lane_mask, int width = 32) {
  int lane = tl_emulator::lane();
  int source = lane ^ lane_mask;
  return tl_emulator::shuffle("shfl_xor", mask, value, source > (lane | (width - 1)) ? lane : source);
}

namespace tl {

template <class T>
T shfl_sync(uint32_t mask, T value, int source) {
  return __shfl_sync(mask, value, source);
}
template <class T>
T shfl_up_sync(uint32_t mask, T value, int delta) {
  return __shfl_up_sync(mask, value, delta);
}
template <class T>
T shfl_down_sync(uint32_t mask, T value, int delta) {
  return __shfl_down_sync(mask, value, delta);
}
template <class T>
T shfl_xor_sync(uint32_t mask, T value, int lane_mask) {
  return __shfl_xor_sync(mask, value, lane_mask);
}

struct SumOp {
  template <class T>
  T operator()(T a, T b) const {
    return a + b;
  }
};
struct MaxOp {
  template <class T>
  T operator()(T a, T b) const {
    return ::max(a, b);
  }
};
struct MinOp {
  template <class T>
  T operator()(T a, T b) const {
    return ::min(a, b);
  }
};
struct BitAndOp {
  template <class T>
  T operator()(T a, T b) const {
    return a & b;
  }
};
struct BitOrOp {
  template <class T>
  T operator()(T a, T b) const {
    return a | b;
  }
};

template <class T, class Op>
T warp_reduce(T value, Op op) {
  for (int offset = 16; offset; offset /= 2) {
    value = op(value, __shfl_xor_sync(~0u, value, offset));
  }
  return value;
}
template <class T>
T warp_reduce_sum(T value) {
  return warp_reduce(value, SumOp());
}
template <class T>
T warp_reduce_max(T value) {
  return warp_reduce(value, MaxOp());
}
template <class T>
T warp_reduce_min(T value) {
  return warp_reduce(value, MinOp());
}
template <class T>
T warp_reduce_bitand(T value) {
  return warp_reduce(value, BitAndOp());
}
template <class T>
T warp_reduce_bitor(T value) {
  return warp_reduce(value, BitOrOp());
}

// Reduction over threads `scale` apart: by shuffles inside a warp, through shared memory across warps.
template <class Op, int threads, int scale, int first_thread = 0, class Sync = SyncThreadsBarrier, int batch = 1,
          int stride = 0>
struct AllReduce {
  template <class T>
  static T run(T value, T* buffer = nullptr) {
    T values[1] = {value};
    reduce<1>(values, buffer);
    return values[0];
  }
  template <class T>
  static void run_batch(T* values, T* buffer = nullptr) {
    reduce<batch>(values, buffer);
  }

 private:
  template <int count, class T>
  static void reduce(T* values, T* buffer) {
    int self = static_cast<int>(threadIdx.x) - first_thread;
    for (int offset = threads / 2; offset >= scale; offset /= 2) {
      if (offset < 32) {
        for (int i = 0; i < count; ++i) {
          values[i] = Op()(values[i], __shfl_xor_sync(~0u, values[i], offset));
        }
        continue;
      }
      Sync::template sync<1>();
      for (int i = 0; i < count; ++i) {
        tl_emulator::shared_offset(buffer + self + i * stride, sizeof(T), sizeof(T), "AllReduce");
        buffer[self + i * stride] = values[i];
      }
      Sync::template sync<2>();
      for (int i = 0; i < count; ++i) {
        values[i] = Op()(values[i], buffer[(self ^ offset) + i * stride]);
      }
    }
  }
};

// The thread that acts for `extent` threads; 0 stands for the whole block.
template <int extent>
bool tl_shuffle_elect() {
  int thread = tl_emulator::block().thread();
  if constexpr (extent == 0) {
    return thread == 0;
  } else {
    return thread % 32 == 0 && thread / 32 % ((extent + 31) / 32) == 0;
  }
}
inline int get_lane_idx(int = 32) { return tl_emulator::lane(); }
inline int get_warp_idx(int = 32) { return tl_emulator::block().thread() / 32; }
inline int get_warp_idx_sync(int = 32) { return get_warp_idx(); }
inline int get_warp_group_idx(int = 32, int = 4) { return tl_emulator::block().thread() / 128; }

#define TL_EMULATOR_STMATRIX(name, transposed)            \
  template <class... Words>                               \
  void name(void* address, Words... words) {              \
    tl_emulator::store_matrices<transposed>(address, words...); \
  }
TL_EMULATOR_STMATRIX(ptx_stmatrix_m8n8_x1, false)
TL_EMULATOR_STMATRIX(ptx_stmatrix_m8n8_x2, false)
TL_EMULATOR_STMATRIX(ptx_stmatrix_m8n8_x4, false)
TL_EMULATOR_STMATRIX(ptx_stmatrix_m8n8_x1_trans, true)
TL_EMULATOR_STMATRIX(ptx_stmatrix_m8n8_x2_trans, true)
TL_EMULATOR_STMATRIX(ptx_stmatrix_m8n8_x4_trans, true)
#undef TL_EMULATOR_STMATRIX

#define TL_EMULATOR_LDMATRIX(name, transposed, count)                     \
  inline void name(const void* address, void* registers) {                \
    tl_emulator::load_matrices<transposed, count>(address, registers);    \
  }
TL_EMULATOR_LDMATRIX(ptx_ldmatrix_x1, false, 1)
TL_EMULATOR_LDMATRIX(ptx_ldmatrix_x2, false, 2)
TL_EMULATOR_LDMATRIX(ptx_ldmatrix_x4, false, 4)
TL_EMULATOR_LDMATRIX(ptx_ldmatrix_x1_trans, true, 1)
TL_EMULATOR_LDMATRIX(ptx_ldmatrix_x2_trans, true, 2)
TL_EMULATOR_LDMATRIX(ptx_ldmatrix_x4_trans, true, 4)
#undef TL_EMULATOR_LDMATRIX

}  // namespace tl
