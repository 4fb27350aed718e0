// Shared and global memory with bounds: every index of the kernel text and every address of an intrinsic is checked.
#pragma once

#include <type_traits>

#include "fibers.h"

namespace tl_emulator {

constexpr size_t kSharedLimit = 232448;  // bytes of dynamic shared memory that a Hopper block may have
alignas(1024) inline unsigned char shared_memory[kSharedLimit];
inline size_t shared_bytes = 0;  // of this launch

struct Region {
  std::string name;
  const char* begin;
  const char* end;
  bool contains(const void* address, size_t bytes) const {
    auto first = static_cast<const char*>(address);
    return first >= begin && first + bytes <= end;
  }
};

inline std::vector<Region> global_regions;  // tensors of this launch

inline uint32_t shared_offset(const void* address, size_t bytes, size_t alignment, const char* what) {
  auto offset = static_cast<const unsigned char*>(address) - shared_memory;
  if (offset < 0 || offset + bytes > shared_bytes) {
    fail(format("%s: %zu bytes at %p are not in the shared memory of the block (offset %td of %zu)", what, bytes,
                address, offset, shared_bytes));
  }
  if (offset % alignment) {
    fail(format("%s: shared offset %td is not a multiple of %zu", what, offset, alignment));
  }
  return static_cast<uint32_t>(offset);
}

inline void check_global(const void* address, size_t bytes, size_t alignment, const char* what) {
  for (const Region& region : global_regions) {
    if (region.contains(address, bytes)) {
      if (reinterpret_cast<uintptr_t>(address) % alignment) {
        fail(format("%s: address in %s is not a multiple of %zu", what, region.name.c_str(), alignment));
      }
      return;
    }
  }
  std::string near;
  for (const Region& region : global_regions) {
    near += format("\n  %s: offset %td of %td bytes", region.name.c_str(),
                   static_cast<const char*>(address) - region.begin, region.end - region.begin);
  }
  fail(format("%s: %zu bytes at %p are in no tensor", what, bytes, address) + near);
}

inline bool in_shared(const void* address) {
  auto offset = static_cast<const unsigned char*>(address) - shared_memory;
  return offset >= 0 && offset < static_cast<std::ptrdiff_t>(kSharedLimit);
}

// A pointer that knows the array it points into. Takes the place of raw pointers in the rewritten kernel text.
template <class T>
class Pointer {
 public:
  Pointer(T* at, const void* begin, size_t bytes, const char* name)
      : at_(at), begin_(static_cast<const char*>(begin)), bytes_(bytes), name_(name) {}

  T& operator[](int64_t i) const { return *check(at_ + i, sizeof(T), 1); }
  T& operator*() const { return *check(at_, sizeof(T), 1); }
  T* unchecked() const { return at_; }
  Pointer operator+(int64_t i) const { return {at_ + i, begin_, bytes_, name_}; }
  Pointer operator-(int64_t i) const { return {at_ - i, begin_, bytes_, name_}; }

  // `*(float4*)(ws + i)`: the whole vector must lie inside and be aligned as the GPU demands.
  template <class U>
  operator U*() const {
    size_t bytes = sizeof(T);
    size_t alignment = 1;
    if constexpr (!std::is_void_v<U>) {
      bytes = sizeof(U);
      alignment = alignof(U);
    }
    return reinterpret_cast<U*>(const_cast<std::remove_const_t<T>*>(check(at_, bytes, alignment)));
  }

 private:
  T* check(T* at, size_t bytes, size_t alignment) const {
    auto offset = reinterpret_cast<const char*>(at) - begin_;
    if (__builtin_expect(offset < 0 || offset + bytes > bytes_, 0)) {
      fail(format("%s[%td] is outside its %zu elements (%zu bytes at byte %td)", name_,
                  offset / static_cast<std::ptrdiff_t>(sizeof(T)), bytes_ / sizeof(T), bytes, offset));
    }
    if (__builtin_expect(alignment > 1 && reinterpret_cast<uintptr_t>(at) % alignment, 0)) {
      fail(format("%s at byte %td: a vector access needs a multiple of %zu", name_, offset, alignment));
    }
    return at;
  }

  T* at_;
  const char* begin_;
  size_t bytes_;
  const char* name_;
};

// One array of the dynamic shared memory; its type appears only where the kernel casts it.
struct SharedArray {
  const char* name;
  size_t offset, bytes;
  template <class T>
  Pointer<T> as() const {
    unsigned char* begin = shared_memory + offset;
    return {reinterpret_cast<T*>(begin), begin, bytes, name};
  }
};

inline SharedArray shared_array(const char* name, size_t offset, size_t bytes) {
  size_t end = bytes ? offset + bytes : shared_bytes;  // 0: up to the end (arrays may share memory)
  if (end > shared_bytes || offset > end) {
    fail(format("shared array %s ends at byte %zu, the launch asked for %zu", name, end, shared_bytes));
  }
  return {name, offset, end - offset};
}

}  // namespace tl_emulator
