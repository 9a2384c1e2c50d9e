// Arithmetic of one lane: fp32 with canonical NaNs, bf16, approximate functions.
#pragma once
#include "types.h"

namespace emulator {

constexpr u32 NAN_BITS = 0x7FFFFFFFu;
constexpr f32 MIN_NORMAL = 0x1p-126f;

ALWAYS_INLINE f32 canonical(f32 x) { return x != x ? bits_of<f32>(NAN_BITS) : x; }
ALWAYS_INLINE f32 flushed(f32 x) { return std::fabs(x) < MIN_NORMAL ? std::copysign(0.0f, x) : x; }
ALWAYS_INLINE f32 from_bf16(u16 x) { return bits_of<f32>(static_cast<u32>(x) << 16); }
ALWAYS_INLINE u16 to_bf16(f32 x) {
  const u32 u = bits_of<u32>(x);
  return x != x ? 0x7FFF : static_cast<u16>((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

// The number if one operand is NaN; -0 < +0.
ALWAYS_INLINE f32 min_number(f32 a, f32 b) {
  const f32 zero = bits_of<f32>(bits_of<u32>(a) | bits_of<u32>(b));  // either sign makes the minimum -0
  const f32 least = a < b ? a : b < a ? b : zero;
  return canonical(a != a ? b : b != b ? a : least);
}
ALWAYS_INLINE f32 max_number(f32 a, f32 b) {
  const f32 zero = bits_of<f32>(bits_of<u32>(a) & bits_of<u32>(b));
  const f32 most = a > b ? a : b > a ? b : zero;
  return canonical(a != a ? b : b != b ? a : most);
}
ALWAYS_INLINE f32 saturated(f32 x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }

ALWAYS_INLINE i32 to_s32(f32 x) {
  if (x != x) return 0;
  if (x >= 0x1p31f) return INT32_MAX;
  return x < -0x1p31f ? INT32_MIN : static_cast<i32>(x);
}
ALWAYS_INLINE u32 to_u32(f32 x) {
  if (!(x > 0)) return 0;
  return x >= 0x1p32f ? UINT32_MAX : static_cast<u32>(x);
}

ALWAYS_INLINE i32 divide_s32(i32 a, i32 b) {
  return b == 0 ? -1 : static_cast<i32>(static_cast<i64>(a) / (b == 0 ? 1 : b));
}
ALWAYS_INLINE i32 remainder_s32(i32 a, i32 b) {
  return b == 0 ? a : static_cast<i32>(static_cast<i64>(a) % (b == 0 ? 1 : b));
}

ALWAYS_INLINE u32 pick_bytes(u32 a, u32 b, u32 control) {
  const u64 both = static_cast<u64>(b) << 32 | a;
  u32 result = 0;
  for (int i = 0; i < 4; i++) {
    const u32 nibble = control >> 4 * i & 15;
    u32 byte = both >> 8 * (nibble & 7) & 255;
    if (nibble & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * i;
  }
  return result;
}

ALWAYS_INLINE u32 reversed(u32 x) {
  x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
  x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
  x = (x >> 4 & 0x0F0F0F0Fu) | (x & 0x0F0F0F0Fu) << 4;
  return __builtin_bswap32(x);
}

// How approximate instructions compute.
enum class Functions : i32 { exact_sm90 = 0, rounded = 1, perturbed = 2 };
enum class Approximate : i32 { ex2, rsqrt, rcp, divide, divide_full };

// The H200's function tables: 2^f by 23 bits of f; 1/sqrt over [1, 4); 1/x over [1, 2).
struct Tables {
  const u32* ex2;
  const u32* rsqrt;
  const u32* rcp;
};

ALWAYS_INLINE f32 table_ex2(const Tables& t, f32 x) {
  const u32 u = bits_of<u32>(x), sign = u >> 31;
  const i32 exponent = u >> 23 & 255, shift = exponent - 127;
  const i64 mantissa = (u & 0x7FFFFF) | 0x800000;
  const f32 infinity = bits_of<f32>(0x7F800000u);
  if (exponent == 255) return u & 0x7FFFFF ? bits_of<f32>(NAN_BITS) : sign ? 0.0f : x;
  if (!exponent) return 1.0f;
  if (shift > 7) return sign ? 0.0f : infinity;
  i64 fixed = shift >= 0 ? mantissa << shift : shift < -40 ? 0 : mantissa >> -shift;
  if (sign) fixed = fixed & 0x7FFFFF ? ~fixed : -fixed;
  const i64 n = fixed >> 23;
  if (n < -126) return 0.0f;
  return n > 127 ? infinity : bits_of<f32>(t.ex2[fixed & 0x7FFFFF] + (static_cast<u32>(n + 127) << 23));
}

ALWAYS_INLINE f32 table_rsqrt_normal(const Tables& t, f32 x) {
  const u32 u = bits_of<u32>(x), sign = u >> 31, mantissa = u & 0x7FFFFF;
  const i32 exponent = u >> 23 & 255;
  if (exponent == 255 && mantissa) return bits_of<f32>(NAN_BITS);
  if (!exponent) return bits_of<f32>(0x7F800000u | sign << 31);
  if (sign) return bits_of<f32>(NAN_BITS);
  if (exponent == 255) return 0.0f;
  const i32 odd = (exponent - 127) & 1, half = (exponent - 127 - odd) >> 1;
  return bits_of<f32>(t.rsqrt[static_cast<u32>(odd) << 23 | mantissa] - (static_cast<u32>(half) << 23));
}

ALWAYS_INLINE f32 table_rsqrt(const Tables& t, f32 x) {
  if (std::fabs(x) < MIN_NORMAL) return canonical(table_rsqrt_normal(t, x * 0x1p24f) * 4096.0f);
  return table_rsqrt_normal(t, x);
}

ALWAYS_INLINE f32 table_rcp(const Tables& t, f32 x) {
  const u32 u = bits_of<u32>(x), sign = u & 0x80000000u, mantissa = u & 0x7FFFFF;
  const i32 exponent = u >> 23 & 255;
  if (exponent == 255) return bits_of<f32>(mantissa ? NAN_BITS : sign);
  if (!exponent) return bits_of<f32>(0x7F800000u | sign);
  const u32 entry = t.rcp[mantissa];
  const i32 result = static_cast<i32>(entry >> 23) - (exponent - 127);
  return bits_of<f32>(result > 0 ? (entry & 0x7FFFFF) | static_cast<u32>(result) << 23 | sign : sign);
}

ALWAYS_INLINE f32 table_divide(const Tables& t, f32 a, f32 b) {
  return canonical(flushed(flushed(a) * table_rcp(t, b)));
}
ALWAYS_INLINE f32 table_divide_full(const Tables& t, f32 a, f32 b) {
  const f32 scale = std::fabs(b) > 0x1p126f ? 0.25f : std::fabs(b) < MIN_NORMAL ? 0x1p24f : 1.0f;
  return canonical((a * scale) * table_rcp(t, b * scale));
}

// ln(2)^i / i!, each from the one before, in double.
struct Ex2Coefficients {
  f64 c[14];
  Ex2Coefficients() {
    c[0] = 1.0;
    for (int i = 1; i < 14; i++) c[i] = c[i - 1] * 0.6931471805599453 / i;
  }
};
inline const Ex2Coefficients EX2_COEFFICIENTS;

ALWAYS_INLINE f32 rounded_ex2(f32 x) {
  x = flushed(x);
  const f64 wide = x < -200.0f ? -200.0 : x > 200.0f ? 200.0 : x == x ? static_cast<f64>(x) : 0.0;
  const f64 n = std::nearbyint(wide), f = wide - n;
  f64 p = EX2_COEFFICIENTS.c[13];
  for (int i = 12; i >= 0; i--) p = p * f + EX2_COEFFICIENTS.c[i];
  const f64 scale = bits_of<f64>(static_cast<u64>(static_cast<i64>(n) + 1023) << 52);
  const f32 r = flushed(static_cast<f32>(p * scale));
  const f32 limited = x >= 128.0f ? bits_of<f32>(0x7F800000u) : x < -150.0f ? 0.0f : r;
  return x != x ? bits_of<f32>(NAN_BITS) : limited;
}

template <Approximate F>
ALWAYS_INLINE f32 rounded(f32 a, f32 b) {
  switch (F) {
    case Approximate::ex2: return rounded_ex2(a);
    case Approximate::rsqrt: return canonical(static_cast<f32>(1.0 / std::sqrt(static_cast<f64>(a))));
    case Approximate::rcp: return canonical(flushed(static_cast<f32>(1.0 / static_cast<f64>(flushed(a)))));
    case Approximate::divide: return canonical(flushed(flushed(a) / flushed(b)));
    default: return canonical(a / b);
  }
}

template <Approximate F>
ALWAYS_INLINE f32 from_tables(const Tables& t, f32 a, f32 b) {
  switch (F) {
    case Approximate::ex2: return table_ex2(t, a);
    case Approximate::rsqrt: return table_rsqrt(t, a);
    case Approximate::rcp: return table_rcp(t, a);
    case Approximate::divide: return table_divide(t, a, b);
    default: return table_divide_full(t, a, b);
  }
}

// A rounded result moved by a few units in the last place, by a hash of the operands.
template <Approximate F>
ALWAYS_INLINE f32 perturbed(f32 a, f32 b, u64 seed) {
  constexpr u32 reach = F == Approximate::rcp ? 1 : 2;
  constexpr bool two = F == Approximate::divide || F == Approximate::divide_full;
  const u32 r = bits_of<u32>(rounded<F>(a, b));
  const u64 second = two ? static_cast<u64>(bits_of<u32>(b)) << 32 : 0;
  SplitMix hash{bits_of<u32>(a) ^ second ^ seed * 0x9E3779B97F4A7C15ull};
  const u32 moved = r + static_cast<u32>(hash.next() % (2 * reach + 1)) - reach;
  const auto normal = [](u32 u) { return (u >> 23 & 255) - 1 < 254; };
  return bits_of<f32>(normal(r) && normal(moved) ? moved : r);
}

}  // namespace emulator
