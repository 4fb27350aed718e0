// CUDA's built-in names as the emitted text uses them: vector types, bfloat16, arithmetic with the GPU's rules.
#pragma once

#include <cmath>
#include <limits>

#include "memory.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define TL_DEVICE inline
#define CUDART_INF_F std::numeric_limits<float>::infinity()
#define CUDART_NAN_F std::numeric_limits<float>::quiet_NaN()
#define threadIdx (tl_emulator::block().thread_index)
#define blockIdx (tl_emulator::block().block_index)
#define blockDim (tl_emulator::block().block_size)
#define gridDim (tl_emulator::block().grid_size)

using uint = unsigned int;
using uchar = unsigned char;
using ushort = unsigned short;
using std::isinf;
using std::isnan;

#define TL_EMULATOR_VECTORS(scalar, name, align2, align4)                                       \
  struct name##1 {                                                                              \
    scalar x;                                                                                   \
  };                                                                                            \
  struct alignas(align2) name##2 {                                                              \
    scalar x, y;                                                                                \
  };                                                                                            \
  struct name##3 {                                                                              \
    scalar x, y, z;                                                                             \
  };                                                                                            \
  struct alignas(align4) name##4 {                                                              \
    scalar x, y, z, w;                                                                          \
  };                                                                                            \
  inline name##1 make_##name##1(scalar x) { return {x}; }                                       \
  inline name##2 make_##name##2(scalar x, scalar y) { return {x, y}; }                          \
  inline name##3 make_##name##3(scalar x, scalar y, scalar z) { return {x, y, z}; }             \
  inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }

TL_EMULATOR_VECTORS(signed char, char, 2, 4)
TL_EMULATOR_VECTORS(unsigned char, uchar, 2, 4)
TL_EMULATOR_VECTORS(short, short, 4, 8)
TL_EMULATOR_VECTORS(unsigned short, ushort, 4, 8)
TL_EMULATOR_VECTORS(int, int, 8, 16)
TL_EMULATOR_VECTORS(unsigned int, uint, 8, 16)
TL_EMULATOR_VECTORS(float, float, 8, 16)
TL_EMULATOR_VECTORS(long long, longlong, 16, 16)
TL_EMULATOR_VECTORS(unsigned long long, ulonglong, 16, 16)
TL_EMULATOR_VECTORS(double, double, 16, 16)
#undef TL_EMULATOR_VECTORS

// Trivial, so that an array of it starts as garbage, as on the GPU.
struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    bool nan = (word & 0x7FFFFFFF) > 0x7F800000;
    uint32_t nearest = word + 0x7FFF + ((word >> 16) & 1);  // ties to even
    bits = nan ? 0x7FFF : static_cast<uint16_t>(nearest >> 16);
  }
  operator float() const {
    uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
  }
};
struct alignas(4) __nv_bfloat162 {
  bfloat16_t x, y;
};

inline unsigned __pack_half2(bfloat16_t x, bfloat16_t y) { return static_cast<unsigned>(y.bits) << 16 | x.bits; }
inline unsigned __pack_nv_bfloat162(bfloat16_t x, bfloat16_t y) { return __pack_half2(x, y); }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {bfloat16_t(v.x), bfloat16_t(v.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }

// Of a NaN and a number, the number; integers of two types meet as in CUDA's overloads.
template <class A, class B>
inline auto min(A a, B b) -> std::common_type_t<A, B> {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) {
    return std::fmin(static_cast<T>(a), static_cast<T>(b));
  } else {
    return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
  }
}
template <class A, class B>
inline auto max(A a, B b) -> std::common_type_t<A, B> {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) {
    return std::fmax(static_cast<T>(a), static_cast<T>(b));
  } else {
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
  }
}

template <class To, class From>
inline To bit_cast_(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}
inline float __int_as_float(int v) { return bit_cast_<float>(v); }
inline float __uint_as_float(uint v) { return bit_cast_<float>(v); }
inline int __float_as_int(float v) { return bit_cast_<int>(v); }
inline uint __float_as_uint(float v) { return bit_cast_<uint>(v); }

inline int __popc(uint v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v ? __builtin_clz(static_cast<uint>(v)) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll(static_cast<unsigned long long>(v)) : 64; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline uint __brev(uint v) {
  uint r = 0;
  for (int i = 0; i < 32; ++i) {
    r |= (v >> i & 1) << (31 - i);
  }
  return r;
}
inline uint __funnelshift_l(uint low, uint high, uint n) {
  n &= 31;
  return n ? high << n | low >> (32 - n) : high;
}
inline uint __funnelshift_r(uint low, uint high, uint n) {
  n &= 31;
  return n ? high << (32 - n) | low >> n : low;
}
template <class T>
inline T __ldg(const T* at) {
  return *at;
}
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline float __expf(float v) { return std::exp(v); }
inline float __logf(float v) { return std::log(v); }
inline float __log2f(float v) { return std::log2(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline void __threadfence() {}
inline void __threadfence_block() {}

namespace tl_emulator {

// Arithmetic on the GPU yields 0x7fffffff for every NaN, x86 keeps payloads and makes negative ones. The rewritten
// text passes a sum through here where the kernel goes on to look at its bits.
inline float canonical_nan(float value) { return std::isnan(value) ? __uint_as_float(0x7FFFFFFF) : value; }

}  // namespace tl_emulator

namespace tl {

enum class DataType { kFloat16, kBFloat16, kFloat32, kTensorFloat32 };

inline float fast_rcp(float v) {  // rcp.approx.ftz: denormals count as zero
  return std::fabs(v) < 0x1p-126f ? std::copysign(CUDART_INF_F, v) : 1.0f / v;
}
template <class T>
inline T fast_max(T a, T b) {
  return ::max(a, b);
}
template <class T>
inline T fast_min(T a, T b) {
  return ::min(a, b);
}
template <class Vector, class Unit>
inline Vector broadcast(Unit unit) {
  Vector result;
  for (size_t i = 0; i < sizeof(Vector) / sizeof(Unit); ++i) {
    memcpy(reinterpret_cast<char*>(&result) + i * sizeof(Unit), &unit, sizeof(Unit));
  }
  return result;
}
template <class Vector, class E, class... Rest>
inline Vector make_vec(E first, Rest... rest) {
  E values[] = {first, static_cast<E>(rest)...};
  static_assert(sizeof values == sizeof(Vector));
  Vector result;
  memcpy(&result, values, sizeof result);
  return result;
}
template <class T>
inline T from_uint1(uint1 v) {
  return bit_cast_<T>(v);
}
template <class T>
inline uint1 to_uint1(T v) {
  return bit_cast_<uint1>(v);
}
inline float2 add2(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
inline float2 sub2(float2 a, float2 b) { return {a.x - b.x, a.y - b.y}; }
inline float2 mul2(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }
inline float2 fma2(float2 a, float2 b, float2 c) { return {std::fma(a.x, b.x, c.x), std::fma(a.y, b.y, c.y)}; }
inline float2 max2(float2 a, float2 b) { return {::max(a.x, b.x), ::max(a.y, b.y)}; }
inline float2 min2(float2 a, float2 b) { return {::min(a.x, b.x), ::min(a.y, b.y)}; }

}  // namespace tl
