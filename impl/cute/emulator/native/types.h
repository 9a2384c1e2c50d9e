// Names of the basic types, faults, and small helpers used everywhere.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace emulator {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;
using f32 = float;
using f64 = double;

constexpr int LANES = 32;
constexpr u32 FULL = 0xFFFFFFFFu;

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))

}  // namespace emulator

#include "isa.h"  // generated from impl.cute.emulator.isa

namespace emulator {

// What ends a launch. Whoever knows the place fills it in, the first one wins.
struct Fault {
  Kind kind;
  std::string text;
  i32 line = 0;
  i32 warp = -1;
  i32 cta[3] = {0, 0, 0};
  bool placed = false;
};

[[noreturn]] NOINLINE __attribute__((format(printf, 2, 3))) inline void fail(Kind kind, const char* format,
                                                                             ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  Fault fault;
  fault.kind = kind;
  fault.text = text;
  throw fault;
}

// Bytes aligned for vectors, never shrinking, not cleared.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  u8* need(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = (bytes + 4095) / 4096 * 4096;
      data_ = static_cast<u8*>(std::aligned_alloc(64, size_));
      if (!data_) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return data_;
  }
  u8* data() const { return data_; }

 private:
  u8* data_ = nullptr;
  size_t size_ = 0;
};

template <class To, class From>
ALWAYS_INLINE To bits_of(From value) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

// The lanes in which a predicate register (one byte a lane, 0 or 1) is true.
ALWAYS_INLINE u32 predicate_mask(const u8* predicate) {
  u32 mask = 0;
  for (int i = 0; i < 4; i++) {
    u64 eight;
    std::memcpy(&eight, predicate + 8 * i, 8);
    mask |= static_cast<u32>(eight * 0x0102040810204080ull >> 56) << 8 * i;
  }
  return mask;
}

// The schedule's random numbers.
struct SplitMix {
  u64 state;
  u64 next() {
    state += 0x9E3779B97F4A7C15ull;
    u64 z = state;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
  }
  u64 below(u64 n) { return (next() >> 32) * n >> 32; }
};

}  // namespace emulator
