// Warpgroup matrix products (wgmma m64nNk16, bf16 in, fp32 out), queued per thread and computed at their wait.
#pragma once

#include "transfers.h"

namespace tl {

// The descriptor of a shared operand, bit for bit: address, leading and stride offsets in units of 16 bytes, swizzle.
struct GmmaDescriptor {
  uint64_t bits = 0;
  explicit operator uint64_t() const { return bits; }
  template <class T>
  GmmaDescriptor operator+(T offset) const {
    GmmaDescriptor moved = *this;
    moved.advance(static_cast<uint32_t>(offset));
    return moved;
  }
  void advance(uint32_t offset) {  // a 32-bit addition, as on the GPU: no carry into the strides
    bits = (bits & 0xFFFFFFFF00000000u) | static_cast<uint32_t>(static_cast<uint32_t>(bits) + offset);
  }
};

template <int layout = 0, int leading = 0, int stride = 0, class T>
void initialize_wgmma_descriptor(GmmaDescriptor& descriptor, T* start) {
  uint64_t address = tl_emulator::shared_offset(start, 16, 16, "wgmma operand") >> 4;
  descriptor.bits = (address & 0x3FFF) | (static_cast<uint64_t>(leading) & 0x3FFF) << 16 |
                    (static_cast<uint64_t>(stride) & 0x3FFF) << 32 | static_cast<uint64_t>(layout) << 62;
}
template <class T>
void increase_descriptor_offset(GmmaDescriptor& descriptor, T bytes) {
  descriptor.advance(static_cast<uint32_t>(bytes >> 4));
}

}  // namespace tl

namespace tl_emulator {

// A 64x16 or Nx16 operand in shared memory. K-major: the 16 elements along k of a row are neighbours. MN-major: the
// elements along m or n are.
class SharedOperand {
 public:
  SharedOperand(uint64_t bits, bool mn_major) : mn_major_(mn_major) {
    start_ = (bits & 0x3FFF) << 4;
    leading_ = (bits >> 16 & 0x3FFF) << 4;
    stride_ = (bits >> 32 & 0x3FFF) << 4;
    constexpr int kSpans[4] = {16, 128, 64, 32};
    span_ = kSpans[bits >> 62];
  }
  float at(int mn, int k) const {
    uint32_t offset = swizzle(start_ + (mn_major_ ? mn_major(mn, k) : k_major(mn, k)), span_);
    if (offset + 2 > shared_bytes) {
      fail(format("wgmma reads shared byte %u, the block has %zu", offset, shared_bytes));
    }
    bfloat16_t value;
    memcpy(&value, shared_memory + offset, 2);
    return value;
  }

 private:
  uint32_t k_major(int mn, int k) const {
    if (span_ == 16) {  // no swizzle: 8x8 bricks of 128 bytes
      return mn / 8 * stride_ + k / 8 * leading_ + mn % 8 * 16 + k % 8 * 2;
    }
    return mn / 8 * stride_ + mn % 8 * span_ + k * 2;
  }
  uint32_t mn_major(int mn, int k) const {
    int wide = span_ / 2;  // elements of a swizzled row
    if (span_ == 16) {
      return mn / 8 * stride_ + k / 8 * leading_ + k % 8 * 16 + mn % 8 * 2;
    }
    return mn / wide * leading_ + k / 8 * stride_ + k % 8 * span_ + mn % wide * 2;
  }

  uint32_t start_, leading_, stride_;
  int span_;
  bool mn_major_;
};

// One instruction of one warp: 16 of the 64 rows, all N columns. The lanes contribute their registers.
struct Product {
  uint64_t a, b;
  bool a_in_registers, a_mn_major, b_mn_major, accumulate;
  int n, a_sign, b_sign;
  float* c[32];
  const bfloat16_t* a_registers[32];

  bool same_operation(const Product& o) const {
    return a == o.a && b == o.b && a_in_registers == o.a_in_registers && a_mn_major == o.a_mn_major &&
           b_mn_major == o.b_mn_major && accumulate == o.accumulate && n == o.n;
  }
};

// Row of the warp's 16 and k of one element in a lane's A registers; the accumulator has the same rows.
inline int fragment_row(int lane, int half) { return lane / 4 + 8 * half; }

__attribute__((optimize("O3"))) inline void multiply(const Product& p, int warp_in_group) {
  float a[16][16];
  static float b[16][256], c[256];
  if (p.a_in_registers) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 8; ++i) {  // registers: [k half][row half][pair]
        a[fragment_row(lane, i / 2 % 2)][i / 4 * 8 + lane % 4 * 2 + i % 2] = p.a_registers[lane][i];
      }
    }
  } else {
    SharedOperand operand(p.a, p.a_mn_major);
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < 16; ++k) {
        a[row][k] = operand.at(warp_in_group * 16 + row, k);
      }
    }
  }
  SharedOperand operand(p.b, p.b_mn_major);
  float sign = static_cast<float>(p.a_sign * p.b_sign);
  for (int n = 0; n < p.n; ++n) {
    for (int k = 0; k < 16; ++k) {
      b[k][n] = sign * operand.at(n, k);
    }
  }
  for (int row = 0; row < 16; ++row) {
    // Lane and register of column n: lane (row % 8) * 4 + n / 2 % 4, register n / 8 * 4 + row / 8 * 2 + n % 2.
    for (int n = 0; n < p.n; ++n) {
      c[n] = p.accumulate ? p.c[row % 8 * 4 + n / 2 % 4][n / 8 * 4 + row / 8 * 2 + n % 2] : 0.0f;
    }
    for (int k = 0; k < 16; ++k) {
      float factor = a[row][k];
      for (int n = 0; n < p.n; ++n) {
        c[n] += factor * b[k][n];
      }
    }
    for (int n = 0; n < p.n; ++n) {
      p.c[row % 8 * 4 + n / 2 % 4][n / 8 * 4 + row / 8 * 2 + n % 2] = c[n];
    }
  }
}

// The products of one warp in program order. A product can run once all 32 lanes have issued it: at once when timing
// is early, else when a lane waits for it.
class MatrixQueue final : public Waitable {
 public:
  void arrive() { lanes_[lane()].fenced = true; }

  void issue(Product product, float* c, const uint32_t* a_registers) {
    Lane& self = lanes_[lane()];
    warp_ = block().thread() / 32;
    if (!self.fenced) {
      fail("wgmma without a warpgroup_arrive since its registers were handed back");
    }
    size_t index = self.issued++;
    if (index == log_.size()) {
      log_.push_back({product, 0, block().decide_early()});
    }
    Entry& entry = log_[index];
    if (!entry.product.same_operation(product)) {
      fail(format("lanes of warp %d issue different wgmma instructions (number %zu)", warp_, index));
    }
    entry.product.c[lane()] = c;
    entry.product.a_registers[lane()] = reinterpret_cast<const bfloat16_t*>(a_registers);
    if (++entry.lanes < 32) {
      return;
    }
    if (entry.early && done_ == index) {
      execute_up_to(index + 1);
    }
    wake_waiting();  // they may have waited for this lane
  }

  void commit() {
    Lane& self = lanes_[lane()];
    self.commits.push_back(self.issued);
  }

  void wait(size_t allowed) {
    Lane& self = lanes_[lane()];
    size_t needed = self.commits.size() > allowed ? self.commits[self.commits.size() - 1 - allowed] : 0;
    while (done_ < needed && log_[needed - 1].lanes < 32) {
      waiting_.push_back(block().thread());
      block().wait_for(*this);
    }
    if (done_ < needed) {
      execute_up_to(needed);
    }
    if (done_ >= self.issued) {
      self.fenced = false;  // from here on the kernel may touch the registers
    }
    block().give_way();
  }

  size_t issued(int lane) const { return lanes_[lane].issued; }
  size_t done() const { return done_; }

  std::string describe(int) const override {
    return format("wgmma %zu of warp %d: not all lanes have issued it", done_, warp_);
  }

 private:
  struct Entry {
    Product product;
    int lanes;
    bool early;
  };
  struct Lane {
    size_t issued = 0;
    bool fenced = false;
    std::vector<size_t> commits;  // number of products issued at each commit
  };

  void wake_waiting() {
    for (int thread : waiting_) {
      block().wake(thread);
    }
    waiting_.clear();
  }

  void execute_up_to(size_t count) {  // in order: a later product may accumulate on an earlier one
    for (; done_ < count; ++done_) {
      multiply(log_[done_].product, warp_ % 4);
    }
  }

  int warp_ = 0;
  size_t done_ = 0;
  std::deque<Entry> log_;
  Lane lanes_[32];
  std::vector<int> waiting_;
};

inline std::vector<MatrixQueue> matrix_queues(Block::kMaxThreads / 32);

inline MatrixQueue& matrix_queue() { return matrix_queues[block().thread() / 32]; }

inline void end_of_thread_products(int thread) {
  const MatrixQueue& queue = matrix_queues[thread / 32];
  if (queue.issued(thread % 32) > queue.done()) {
    fail("the thread ends with a wgmma in flight");
  }
}

// The four warps of a warpgroup take part in every product.
inline void end_of_block_products() {
  for (int warp = 0; warp < block().threads() / 32; ++warp) {
    size_t own = matrix_queues[warp].done(), leader = matrix_queues[warp / 4 * 4].done();
    if (own != leader) {
      fail(format("warp %d executed %zu wgmma instructions, the first warp of its group %zu", warp, own, leader));
    }
  }
}

template <tl::DataType a, tl::DataType b, tl::DataType c, int m, int n, int k>
constexpr void require_supported() {
  static_assert(a == tl::DataType::kBFloat16 && b == tl::DataType::kBFloat16 && c == tl::DataType::kFloat32,
                "only bf16 x bf16 -> fp32 wgmma is emulated");
  static_assert(m == 64 && k == 16 && n % 8 == 0 && n <= 256);
}

}  // namespace tl_emulator

namespace tl {

template <DataType type_a, DataType type_b, DataType type_c, int m, int n, int k, bool a_mn, bool b_mn, int sign_a = 1,
          int sign_b = 1>
void wgmma_ss(uint64_t a, uint64_t b, uint32_t* c, bool accumulate) {
  tl_emulator::require_supported<type_a, type_b, type_c, m, n, k>();
  tl_emulator::Product product{a, b, false, a_mn, b_mn, accumulate, n, sign_a, sign_b, {}, {}};
  tl_emulator::matrix_queue().issue(product, reinterpret_cast<float*>(c), nullptr);
}
template <DataType type_a, DataType type_b, DataType type_c, int m, int n, int k, bool a_mn, bool b_mn, int sign_a = 1,
          int sign_b = 1>
void wgmma_rs(const uint32_t* a, uint64_t b, uint32_t* c, bool accumulate) {
  static_assert(!a_mn);
  tl_emulator::require_supported<type_a, type_b, type_c, m, n, k>();
  tl_emulator::Product product{0, b, true, false, b_mn, accumulate, n, sign_a, sign_b, {}, {}};
  tl_emulator::matrix_queue().issue(product, reinterpret_cast<float*>(c), a);
}
inline void warpgroup_arrive() { tl_emulator::matrix_queue().arrive(); }
inline void warpgroup_commit_batch() { tl_emulator::matrix_queue().commit(); }
template <int groups>
void wait_wgmma() {
  tl_emulator::matrix_queue().wait(groups);
}
template <int groups>
void warpgroup_wait() {
  wait_wgmma<groups>();
}
template <class T>
void warpgroup_fence_operand(T*, int) {}

// The register file is not modelled.
template <uint32_t count>
void warpgroup_reg_alloc() {
  static_assert(count % 8 == 0 && count >= 24 && count <= 256);
}
template <uint32_t count>
void warpgroup_reg_dealloc() {
  static_assert(count % 8 == 0 && count >= 24 && count <= 256);
}

}  // namespace tl
