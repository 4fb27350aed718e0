// Atomics at their real addresses. Fibers switch only at waits, so a plain read and write is atomic here.
#pragma once

#include "warps.h"

namespace tl_emulator {

enum class Reach { shared_or_global, global_only };

template <class T>
void check_atomic(const T* address, Reach reach, const char* what) {
  if (!in_shared(address)) {
    check_global(address, sizeof(T), alignof(T), what);
  } else if (reach == Reach::global_only) {
    // The template behind it is a `red.global` or a vector atomic, which fault on a shared address.
    fail(format("%s: the instruction works on global memory only, the address is in shared memory", what));
  } else {
    shared_offset(address, sizeof(T), alignof(T), what);
  }
}

template <class T, class Change>
T update(T* address, Reach reach, const char* what, Change change) {
  check_atomic(address, reach, what);
  T old = *address;
  *address = change(old);
  return old;
}

}  // namespace tl_emulator

#define TL_EMULATOR_ATOMIC(cuda, tl_name, reach, expression)                                      \
  template <class T, class V>                                                                     \
  T cuda(T* address, V operand) {                                                                 \
    T v = static_cast<T>(operand);                                                                \
    return tl_emulator::update(address, tl_emulator::Reach::shared_or_global, #cuda,              \
                               [v](T old) -> T { return static_cast<T>(expression); });           \
  }                                                                                               \
  template <class T, class V>                                                                     \
  T tl_name##Ret(T* address, V operand, int = 0) {                                                \
    T v = static_cast<T>(operand);                                                                \
    return tl_emulator::update(address, tl_emulator::Reach::shared_or_global, #tl_name "Ret",     \
                               [v](T old) -> T { return static_cast<T>(expression); });           \
  }                                                                                               \
  template <class T, class V>                                                                     \
  void tl_name(T* address, V operand, int = 0) {                                                  \
    T v = static_cast<T>(operand);                                                                \
    tl_emulator::update(address, tl_emulator::Reach::reach, #tl_name,                             \
                        [v](T old) -> T { return static_cast<T>(expression); });                  \
  }
TL_EMULATOR_ATOMIC(atomicAdd, AtomicAdd, shared_or_global, old + v)
TL_EMULATOR_ATOMIC(atomicMax, AtomicMax, shared_or_global, ::max(old, v))
TL_EMULATOR_ATOMIC(atomicMin, AtomicMin, shared_or_global, ::min(old, v))
TL_EMULATOR_ATOMIC(atomicOr, AtomicOr, global_only, old | v)
TL_EMULATOR_ATOMIC(atomicAnd, AtomicAnd, global_only, old& v)
TL_EMULATOR_ATOMIC(atomicXor, AtomicXor, global_only, old ^ v)
TL_EMULATOR_ATOMIC(atomicExch, AtomicExch, shared_or_global, (static_cast<void>(old), v))
#undef TL_EMULATOR_ATOMIC

template <class T>
T atomicCAS(T* address, T expected, T desired) {
  return tl_emulator::update(address, tl_emulator::Reach::shared_or_global, "atomicCAS",
                             [=](T old) { return old == expected ? desired : old; });
}
template <class T>
T AtomicLoad(T* address, int) {
  return tl_emulator::update(address, tl_emulator::Reach::shared_or_global, "AtomicLoad", [](T old) { return old; });
}
template <class T, class V>
void AtomicStore(T* address, V value, int) {
  tl_emulator::update(address, tl_emulator::Reach::shared_or_global, "AtomicStore",
                      [&](T) { return static_cast<T>(value); });
}

// Vector additions take the operand as a vector or as a pointer to its elements.
inline float2 operand2(float2 v) { return v; }
inline float2 operand2(const float* v) { return {v[0], v[1]}; }
inline float4 operand4(float4 v) { return v; }
inline float4 operand4(const float* v) { return {v[0], v[1], v[2], v[3]}; }

template <class V>
float2 AtomicAddx2Ret(float* address, V operand, int = 0) {
  float2 v = operand2(operand);
  return tl_emulator::update(reinterpret_cast<float2*>(address), tl_emulator::Reach::global_only, "AtomicAddx2",
                             [v](float2 old) -> float2 { return {old.x + v.x, old.y + v.y}; });
}
template <class V>
float4 AtomicAddx4Ret(float* address, V operand, int = 0) {
  float4 v = operand4(operand);
  return tl_emulator::update(
      reinterpret_cast<float4*>(address), tl_emulator::Reach::global_only, "AtomicAddx4",
      [v](float4 old) -> float4 { return {old.x + v.x, old.y + v.y, old.z + v.z, old.w + v.w}; });
}
template <class V>
void AtomicAddx2(float* address, V operand, int = 0) {
  AtomicAddx2Ret(address, operand);
}
template <class V>
void AtomicAddx4(float* address, V operand, int = 0) {
  AtomicAddx4Ret(address, operand);
}
