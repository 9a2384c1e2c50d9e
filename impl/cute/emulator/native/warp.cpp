// The interpreter: a warp's lanes through its instructions.
#include "cta.h"

#include <cfenv>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace emulator {

namespace {

// d[l] = f(l) in the lanes of the mask. A destination is one of the operands' places or apart from
// them all, so lanes do not depend on one another.
template <class D, class F>
ALWAYS_INLINE void lanes(u32 mask, D* d, F f) {
  if (mask == FULL) {
#pragma GCC ivdep
    for (int l = 0; l < LANES; l++) d[l] = f(l);
  } else {
#pragma GCC ivdep
    for (int l = 0; l < LANES; l++) d[l] = mask >> l & 1 ? f(l) : d[l];
  }
}

// Fused multiply-add rounded toward -inf, zero or +inf (1, 2, 3).
#if defined(__AVX512F__)
template <int ROUNDING>
void directed_fma(f32* to, const f32* a, const f32* b, const f32* c) {
  for (int l = 0; l < LANES; l += 16) {
    const __m512 r = _mm512_fmadd_round_ps(_mm512_loadu_ps(a + l), _mm512_loadu_ps(b + l),
                                           _mm512_loadu_ps(c + l), ROUNDING | _MM_FROUND_NO_EXC);
    _mm512_storeu_ps(to + l, r);
  }
}
void directed_fma(f32* to, const f32* a, const f32* b, const f32* c, i64 rounding) {
  if (rounding == 1) return directed_fma<_MM_FROUND_TO_NEG_INF>(to, a, b, c);
  if (rounding == 2) return directed_fma<_MM_FROUND_TO_ZERO>(to, a, b, c);
  directed_fma<_MM_FROUND_TO_POS_INF>(to, a, b, c);
}
#else
NOINLINE __attribute__((optimize("rounding-math"))) void directed_fma(f32* to, const f32* a, const f32* b,
                                                                      const f32* c, i64 rounding) {
  std::fesetround(rounding == 1 ? FE_DOWNWARD : rounding == 2 ? FE_TOWARDZERO : FE_UPWARD);
  for (int l = 0; l < LANES; l++) {
    const volatile f32 x = a[l];
    const volatile f32 r = __builtin_fmaf(x, b[l], c[l]);
    to[l] = r;
  }
  std::fesetround(FE_TONEAREST);
}
#endif

template <Approximate F>
NOINLINE void approximate(const LaunchView& view, u32 mask, f32* d, const f32* a, const f32* b) {
  switch (static_cast<Functions>(view.functions)) {
    case Functions::exact_sm90:
      return lanes(mask, d, [=, &view](int l) { return from_tables<F>(view.tables, a[l], b[l]); });
    case Functions::rounded: return lanes(mask, d, [=](int l) { return rounded<F>(a[l], b[l]); });
    default:
      return lanes(mask, d, [=, seed = view.function_seed](int l) { return perturbed<F>(a[l], b[l], seed); });
  }
}

template <class T>
ALWAYS_INLINE void compare(i64 how, u32 mask, u8* d, const T* a, const T* b) {
  switch (how) {
    case 0: return lanes(mask, d, [=](int l) -> u8 { return a[l] == b[l]; });
    case 1: return lanes(mask, d, [=](int l) -> u8 { return a[l] != b[l]; });
    case 2: return lanes(mask, d, [=](int l) -> u8 { return a[l] < b[l]; });
    case 3: return lanes(mask, d, [=](int l) -> u8 { return a[l] <= b[l]; });
    case 4: return lanes(mask, d, [=](int l) -> u8 { return a[l] > b[l]; });
    default: return lanes(mask, d, [=](int l) -> u8 { return a[l] >= b[l]; });
  }
}

NOINLINE void compare_f32(i64 how, u32 mask, u8* d, const f32* a, const f32* b) {
  switch (how) {  // in the order of COMPARISONS
    case 1: return lanes(mask, d, [=](int l) -> u8 { return (a[l] < b[l]) | (a[l] > b[l]); });
    case 6: return lanes(mask, d, [=](int l) -> u8 { return !((a[l] < b[l]) | (a[l] > b[l])); });
    case 7: return lanes(mask, d, [=](int l) -> u8 { return !(a[l] == b[l]); });
    case 8: return lanes(mask, d, [=](int l) -> u8 { return !(a[l] >= b[l]); });
    case 9: return lanes(mask, d, [=](int l) -> u8 { return !(a[l] > b[l]); });
    case 10: return lanes(mask, d, [=](int l) -> u8 { return !(a[l] <= b[l]); });
    case 11: return lanes(mask, d, [=](int l) -> u8 { return !(a[l] < b[l]); });
    case 12: return lanes(mask, d, [=](int l) -> u8 { return (a[l] == a[l]) & (b[l] == b[l]); });
    case 13: return lanes(mask, d, [=](int l) -> u8 { return (a[l] != a[l]) | (b[l] != b[l]); });
    default: return compare(how, mask, d, a, b);
  }
}

template <class Part, class Whole>
NOINLINE void pack(Warp& w, const Instruction& i, u32 mask) {
  const i32* list = w.cta->launch->program.operands + i.list;
  Whole whole[LANES] = {};
  for (int j = 0; j < i.count; j++) {
    const Part* part = w.reg<Part>(list[j]);
    for (int l = 0; l < LANES; l++)
      whole[l] |= static_cast<Whole>(static_cast<Whole>(part[l]) << 8 * sizeof(Part) * j);
  }
  lanes(mask, w.reg<Whole>(i.dst), [&](int l) { return whole[l]; });
}

template <class Part, class Whole>
NOINLINE void unpack(Warp& w, const Instruction& i, u32 mask) {
  const i32* list = w.cta->launch->program.operands + i.list;
  Whole whole[LANES];
  std::memcpy(whole, w.reg<Whole>(i.a), sizeof whole);
  for (int j = 0; j < i.count; j++)
    if (list[j] != NONE)
      lanes(mask, w.reg<Part>(list[j]),
            [&](int l) { return static_cast<Part>(whole[l] >> 8 * sizeof(Part) * j); });
}

// The instances for an instruction's sizes.
template <bool PACKING>
NOINLINE void repack(Warp& w, const Instruction& i, u32 mask) {
#define SIZES(PART, WHOLE)                                         \
  if (i.size == sizeof(PART) && i.size * i.count == sizeof(WHOLE)) \
  return PACKING ? pack<PART, WHOLE>(w, i, mask) : unpack<PART, WHOLE>(w, i, mask)
  SIZES(u32, u64);
  SIZES(u16, u32);
  SIZES(u16, u64);
  SIZES(u8, u16);
  SIZES(u8, u32);
  SIZES(u8, u64);
  SIZES(u8, u8);
  SIZES(u16, u16);
  SIZES(u32, u32);
  SIZES(u64, u64);
#undef SIZES
  fail(Kind::unsupported, "%d elements of %d bytes packed", i.count, i.size);
}

NOINLINE void shuffle(Warp& w, const Instruction& i, u32 mask) {
  const u32 *a = w.reg<u32>(i.a), *b = w.reg<u32>(i.b);
  u32 value[LANES];
  u8 inside[LANES];
  for (int l = 0; l < LANES; l++) {
    const int by = b[l] & 31;
    int from = 0;
    switch (static_cast<Op>(i.op)) {
      case Op::SHFL_BFLY: from = l ^ by; break;
      case Op::SHFL_IDX: from = by; break;
      case Op::SHFL_UP: from = l - by; break;
      default: from = l + by;
    }
    inside[l] = from >= 0 && from < LANES;
    value[l] = a[inside[l] ? from : l];
  }
  if (i.dst != NONE) lanes(mask, w.reg<u32>(i.dst), [&](int l) { return value[l]; });
  if (i.dst2 != NONE) lanes(mask, w.reg<u8>(i.dst2), [&](int l) { return inside[l]; });
}

NOINLINE void logic3(u32 mask, u32* d, const u32* a, const u32* b, const u32* c, i64 table) {
  u32 term[8];
  for (int t = 0; t < 8; t++) term[t] = table >> t & 1 ? FULL : 0;
  lanes(mask, d, [&](int l) {
    u32 r = 0;
    for (int t = 0; t < 8; t++)
      r |= term[t] & (t & 4 ? a[l] : ~a[l]) & (t & 2 ? b[l] : ~b[l]) & (t & 1 ? c[l] : ~c[l]);
    return r;
  });
}

// Two packed fp32 a lane: 64 numbers in a row.
template <class F>
ALWAYS_INLINE void pairs(u32 mask, f32* d, F f) {
  if (mask == FULL) {
#pragma GCC ivdep
    for (int e = 0; e < 2 * LANES; e++) d[e] = f(e);
  } else {
#pragma GCC ivdep
    for (int e = 0; e < 2 * LANES; e++) d[e] = mask >> (e / 2) & 1 ? f(e) : d[e];
  }
}

// Whether the phase each lane waits for is complete; the warp sees what came before those that are.
u32 ready_lanes(Warp& w, const Instruction& i, u32 mask) {
  Cta& cta = *w.cta;
  const u32 *a = w.reg<u32>(i.a), *b = w.reg<u32>(i.b);
  u32 ready = 0;
  u32 last_address = 0, last_parity = 2;
  bool last = false;
  for (u32 m = mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    const u32 address = a[l] + static_cast<u32>(i.imm), parity = b[l];
    if (parity > 1) fail(Kind::barrier, "a wait for a phase of parity %u; it must be 0 or 1", parity);
    if (address != last_address || parity != last_parity) {
      last = (cta.mbarriers[cta.mbarrier_index(address)].phase & 1) != parity;
      last_address = address;
      last_parity = parity;
    }
    ready |= static_cast<u32>(last) << l;
  }
  return ready;
}

void acquire(Warp& w, const Instruction& i, u32 ready) {
  Cta& cta = *w.cta;
  u32 last = FULL;
  for (u32 m = ready; m; m &= m - 1) {
    const u32 address = w.reg<u32>(i.a)[__builtin_ctz(m)] + static_cast<u32>(i.imm);
    if (address == last) continue;
    last = address;
    join(w.vc, cta.mbarriers[cta.mbarrier_index(address)].done.data(), cta.entities.size);
  }
}

// Under random priorities a wait may give up, as hardware's does: once at a place for a phase.
bool times_out(Warp& w, const Instruction& i, u32 mask, i32 pc) {
  Launch& launch = *w.cta->launch;
  if (launch.mode != Mode::priority) return false;
  const u32 address = w.reg<u32>(i.a)[__builtin_ctz(mask)] + static_cast<u32>(i.imm);
  const std::tuple<i32, u32, u64> key{pc, address, w.cta->mbarriers[w.cta->mbarrier_index(address)].phase};
  if (w.timed_out.count(key) || launch.rng.below(4)) return false;
  w.timed_out.insert(key);
  return true;
}

NOINLINE void mbarrier_op(Warp& w, const Instruction& i, u32 mask) {
  Cta& cta = *w.cta;
  for (u32 m = mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    const u32 address = w.reg<u32>(i.a)[l] + static_cast<u32>(i.imm);
    if (i.op == static_cast<i32>(Op::MBAR_INIT)) {
      cta.mbarrier_init(w, address, w.reg<u32>(i.b)[l]);
    } else if (i.op == static_cast<i32>(Op::MBAR_INVAL)) {
      cta.mbarrier_inval(address);
    } else {
      Mbarrier& b = cta.mbarriers[cta.mbarrier_index(address)];
      const i64 arrivals = i.b == NONE ? 1 : w.reg<u32>(i.b)[l];
      const u64 state = b.phase & 1;
      if (i.c != NONE) b.tx += w.reg<u32>(i.c)[l];
      if (i.op == static_cast<i32>(Op::MBAR_EXPECT)) {
        cta.mbarrier_check(b);
        continue;
      }
      cta.release(w, b.released.data());
      cta.mbarrier_arrive(b, arrivals);
      if (i.dst != NONE) w.reg<u64>(i.dst)[l] = state;
    }
  }
}

void place(Warp& w, i32 pc, u32 mask) {
  auto at = w.groups.begin();
  while (at != w.groups.end() && at->pc < pc) ++at;
  if (at != w.groups.end() && at->pc == pc) {
    at->mask |= mask;
  } else {
    w.groups.insert(at, Group{pc, mask});
  }
}

struct Outcome {
  i64 executed;
  bool registered;
};

// Run one group until something stops it.
Outcome run(Warp& w, size_t which, i64 budget) {
  Cta& cta = *w.cta;
  Launch& launch = *cta.launch;
  const Instruction* const code = launch.program.code;
  const i64 left = launch.view.max_instructions - launch.executed, stop = std::min(budget, left);
  const bool alone = w.groups.size() == 1;
  i32 pc = w.groups[which].pc;
  u32 mask = w.groups[which].mask;
  bool registered = false, split = false;
  i64 n = 0;
  try {
    for (;;) {
      const Instruction& i = code[pc];
      if (n && !alone && (i.flags & LEADER)) break;
      if (n >= stop) {
        if (n >= budget) break;
        fail(Kind::limit, "more than %lld instructions",
             static_cast<long long>(launch.view.max_instructions));
      }
      u32 m = mask;
      if (i.flags & CONVERGED && mask != w.live) break;
      if (i.guard != NONE) {
        const u32 guard = predicate_mask(w.reg<u8>(i.guard));
        m &= i.negate ? ~guard : guard;
        if (!m) {
          n++;
          pc++;
          continue;
        }
        if (i.flags & CONVERGED && m != w.live)
          fail(Kind::divergence, "lanes 0x%x of the live 0x%x at an instruction of the whole warp", m,
               w.live);
      }
#define OP3(NAME, D, A, B, C, ...)                                                      \
  case Op::NAME: {                                                                      \
    [[maybe_unused]] const A* a = w.reg<A>(i.a);                                        \
    [[maybe_unused]] const B* b = w.reg<B>(i.b);                                        \
    [[maybe_unused]] const C* c = w.reg<C>(i.c);                                        \
    lanes(m, w.reg<D>(i.dst), [=](int l) -> D { return static_cast<D>(__VA_ARGS__); }); \
    break;                                                                              \
  }
#define SAME1(NAME, T, ...) OP3(NAME, T, T, T, T, __VA_ARGS__)
#define FTZ3(NAME, PLAIN, FLUSHED)                                     \
  case Op::NAME: {                                                     \
    [[maybe_unused]] const f32* a = w.reg<f32>(i.a);                   \
    [[maybe_unused]] const f32* b = w.reg<f32>(i.b);                   \
    f32* d = w.reg<f32>(i.dst);                                        \
    if (i.imm) {                                                       \
      lanes(m, d, [=](int l) { return canonical(flushed(FLUSHED)); }); \
    } else {                                                           \
      lanes(m, d, [=](int l) { return canonical(PLAIN); });            \
    }                                                                  \
    break;                                                             \
  }
      switch (static_cast<Op>(i.op)) {
        SAME1(MOV1, u8, a[l])
        SAME1(MOV2, u16, a[l])
        SAME1(MOV4, u32, a[l])
        SAME1(MOV8, u64, a[l])
        OP3(ZEXT_2_4, u32, u16, u16, u16, a[l])
        OP3(SEXT_2_4, i32, i16, u16, u16, a[l])
        OP3(ZEXT_4_8, u64, u32, u32, u32, a[l])
        OP3(SEXT_4_8, i64, i32, u32, u32, a[l])
        OP3(TRUNC_4_2, u16, u32, u32, u32, a[l])
        OP3(TRUNC_8_4, u32, u64, u64, u64, a[l])
        case Op::PACK: repack<true>(w, i, m); break;
        case Op::UNPACK:
          repack<false>(w, i, m);
          break;
          OP3(SEL1, u8, u8, u8, u8, c[l] ? a[l] : b[l])
          OP3(SEL2, u16, u16, u16, u8, c[l] ? a[l] : b[l])
          OP3(SEL4, u32, u32, u32, u8, c[l] ? a[l] : b[l])
          OP3(SEL8, u64, u64, u64, u8, c[l] ? a[l] : b[l])

          SAME1(ADD4, u32, a[l] + b[l])
          SAME1(SUB4, u32, a[l] - b[l])
          SAME1(MUL4, u32, a[l] * b[l])
          SAME1(MAD4, u32, a[l] * b[l] + c[l])
          SAME1(MULHI_S4, i32, static_cast<i64>(a[l]) * b[l] >> 32)
          SAME1(MULHI_U4, u32, static_cast<u64>(a[l]) * b[l] >> 32)
          SAME1(ADD8, u64, a[l] + b[l])
          SAME1(SUB8, u64, a[l] - b[l])
          SAME1(MUL8, u64, a[l] * b[l])
          SAME1(MAD8, u64, a[l] * b[l] + c[l])
          OP3(WIDE_S4, i64, i32, i32, i32, static_cast<i64>(a[l]) * b[l])
          OP3(WIDE_U4, u64, u32, u32, u32, static_cast<u64>(a[l]) * b[l])
          SAME1(NEG4, u32, 0u - a[l])
          SAME1(NEG8, u64, 0ull - a[l])
          SAME1(ABS4, u32, a[l] >> 31 ? 0u - a[l] : a[l])
          SAME1(DIV_S4, i32, divide_s32(a[l], b[l]))
          SAME1(DIV_U4, u32, b[l] == 0 ? FULL : a[l] / (b[l] == 0 ? 1 : b[l]))
          SAME1(REM_S4, i32, remainder_s32(a[l], b[l]))
          SAME1(REM_U4, u32, b[l] == 0 ? a[l] : a[l] % (b[l] == 0 ? 1 : b[l]))
          SAME1(MIN_S4, i32, a[l] < b[l] ? a[l] : b[l])
          SAME1(MAX_S4, i32, a[l] > b[l] ? a[l] : b[l])
          SAME1(MIN_U4, u32, a[l] < b[l] ? a[l] : b[l])
          SAME1(MAX_U4, u32, a[l] > b[l] ? a[l] : b[l])
          SAME1(MIN_S8, i64, a[l] < b[l] ? a[l] : b[l])
          SAME1(MAX_S8, i64, a[l] > b[l] ? a[l] : b[l])
          SAME1(AND1, u8, a[l] & b[l])
          SAME1(OR1, u8, a[l] | b[l])
          SAME1(XOR1, u8, a[l] ^ b[l])
          SAME1(NOT1, u8, a[l] ^ 1)
          SAME1(AND2, u16, a[l] & b[l])
          SAME1(OR2, u16, a[l] | b[l])
          SAME1(XOR2, u16, a[l] ^ b[l])
          SAME1(NOT2, u16, ~a[l])
          SAME1(AND4, u32, a[l] & b[l])
          SAME1(OR4, u32, a[l] | b[l])
          SAME1(XOR4, u32, a[l] ^ b[l])
          SAME1(NOT4, u32, ~a[l])
          SAME1(AND8, u64, a[l] & b[l])
          SAME1(OR8, u64, a[l] | b[l])
          SAME1(XOR8, u64, a[l] ^ b[l])
          SAME1(NOT8, u64, ~a[l])
        case Op::LOP3:
          logic3(m, w.reg<u32>(i.dst), w.reg<u32>(i.a), w.reg<u32>(i.b), w.reg<u32>(i.c), i.imm);
          break;
          SAME1(SHL4, u32, b[l] < 32 ? a[l] << (b[l] & 31) : 0)
          OP3(SHL8, u64, u64, u32, u32, b[l] < 64 ? a[l] << (b[l] & 63) : 0)
          SAME1(SHR_U4, u32, b[l] < 32 ? a[l] >> (b[l] & 31) : 0)
          OP3(SHR_S4, i32, i32, u32, u32, a[l] >> (b[l] < 31 ? b[l] : 31))
          OP3(SHR_U8, u64, u64, u32, u32, b[l] < 64 ? a[l] >> (b[l] & 63) : 0)
          OP3(SHR_S8, i64, i64, u32, u32, a[l] >> (b[l] < 63 ? b[l] : 63))
          SAME1(SHF_L, u32, ((static_cast<u64>(b[l]) << 32 | a[l]) << (c[l] & 31)) >> 32)
          SAME1(SHF_R, u32, (static_cast<u64>(b[l]) << 32 | a[l]) >> (c[l] & 31))
          SAME1(PRMT, u32, pick_bytes(a[l], b[l], c[l]))
          SAME1(POPC4, u32, __builtin_popcount(a[l]))
          SAME1(CLZ4, u32, a[l] ? __builtin_clz(a[l] | 1) : 32)
          SAME1(BREV4, u32, reversed(a[l]))
        case Op::SET_S4: compare(i.imm, m, w.reg<u8>(i.dst), w.reg<i32>(i.a), w.reg<i32>(i.b)); break;
        case Op::SET_U4: compare(i.imm, m, w.reg<u8>(i.dst), w.reg<u32>(i.a), w.reg<u32>(i.b)); break;
        case Op::SET_S8: compare(i.imm, m, w.reg<u8>(i.dst), w.reg<i64>(i.a), w.reg<i64>(i.b)); break;
        case Op::SET_U8: compare(i.imm, m, w.reg<u8>(i.dst), w.reg<u64>(i.a), w.reg<u64>(i.b)); break;
        case Op::SET_F:
          compare_f32(i.imm, m, w.reg<u8>(i.dst), w.reg<f32>(i.a), w.reg<f32>(i.b));
          break;

          FTZ3(ADD_F, a[l] + b[l], flushed(a[l]) + flushed(b[l]))
          FTZ3(SUB_F, a[l] - b[l], flushed(a[l]) - flushed(b[l]))
          FTZ3(MUL_F, a[l] * b[l], flushed(a[l]) * flushed(b[l]))
        case Op::FMA_F: {
          const f32 *a = w.reg<f32>(i.a), *b = w.reg<f32>(i.b), *c = w.reg<f32>(i.c);
          f32* d = w.reg<f32>(i.dst);
          if (i.imm) {
            alignas(64) f32 r[LANES];
            directed_fma(r, a, b, c, i.imm);
            lanes(m, d, [&](int l) { return canonical(r[l]); });
          } else {
            lanes(m, d, [=](int l) { return canonical(__builtin_fmaf(a[l], b[l], c[l])); });
          }
          break;
        }
          SAME1(FMA_FTZ, f32, canonical(flushed(__builtin_fmaf(flushed(a[l]), flushed(b[l]), flushed(c[l])))))
          OP3(ADD_BF16_F, f32, u16, f32, f32, canonical(from_bf16(a[l]) + b[l]))
          FTZ3(NEG_F, -a[l], -a[l])
          FTZ3(ABS_F, std::fabs(a[l]), std::fabs(a[l]))
          FTZ3(MIN_F, min_number(a[l], b[l]), min_number(flushed(a[l]), flushed(b[l])))
          FTZ3(MAX_F, max_number(a[l], b[l]), max_number(flushed(a[l]), flushed(b[l])))
          FTZ3(DIV_F, a[l] / b[l], flushed(a[l]) / flushed(b[l]))
        case Op::DIV_FULL_F:
          approximate<Approximate::divide_full>(launch.view, m, w.reg<f32>(i.dst), w.reg<f32>(i.a),
                                                w.reg<f32>(i.b));
          break;
        case Op::DIV_APPROX_F:
          approximate<Approximate::divide>(launch.view, m, w.reg<f32>(i.dst), w.reg<f32>(i.a),
                                           w.reg<f32>(i.b));
          break;
        case Op::RCP_APPROX_F:
          approximate<Approximate::rcp>(launch.view, m, w.reg<f32>(i.dst), w.reg<f32>(i.a), w.reg<f32>(i.a));
          break;
        case Op::EX2_APPROX_F:
          approximate<Approximate::ex2>(launch.view, m, w.reg<f32>(i.dst), w.reg<f32>(i.a), w.reg<f32>(i.a));
          break;
        case Op::RSQRT_APPROX_F:
          approximate<Approximate::rsqrt>(launch.view, m, w.reg<f32>(i.dst), w.reg<f32>(i.a),
                                          w.reg<f32>(i.a));
          break;
          FTZ3(SQRT_F, std::sqrt(a[l]), std::sqrt(flushed(a[l])))
          SAME1(SAT_F, f32, saturated(a[l]))
        case Op::ADD_F2: {
          const f32 *a = w.reg<f32>(i.a), *b = w.reg<f32>(i.b);
          pairs(m, w.reg<f32>(i.dst), [=](int e) { return canonical(a[e] + b[e]); });
          break;
        }
        case Op::MUL_F2: {
          const f32 *a = w.reg<f32>(i.a), *b = w.reg<f32>(i.b);
          pairs(m, w.reg<f32>(i.dst), [=](int e) { return canonical(a[e] * b[e]); });
          break;
        }
        case Op::FMA_F2: {
          const f32 *a = w.reg<f32>(i.a), *b = w.reg<f32>(i.b), *c = w.reg<f32>(i.c);
          pairs(m, w.reg<f32>(i.dst), [=](int e) { return canonical(__builtin_fmaf(a[e], b[e], c[e])); });
          break;
        }
          OP3(S4_TO_F, f32, i32, i32, i32, a[l])
          OP3(U4_TO_F, f32, u32, u32, u32, a[l])
          OP3(F_TO_S4, i32, f32, f32, f32, to_s32(a[l]))
          OP3(F_TO_U4, u32, f32, f32, f32, to_u32(a[l]))
          OP3(F_TO_BF16, u16, f32, f32, f32, to_bf16(a[l]))
          OP3(F2_TO_BF16X2, u32, f32, f32, f32, static_cast<u32>(to_bf16(a[l])) << 16 | to_bf16(b[l]))
          OP3(BF16_TO_F, u32, u16, u16, u16, static_cast<u32>(a[l]) << 16)

        case Op::LD_GLOBAL: access_global(w, i, m, false); break;
        case Op::ST_GLOBAL: access_global(w, i, m, true); break;
        case Op::LD_SHARED: access_shared(w, i, m, false); break;
        case Op::ST_SHARED: access_shared(w, i, m, true); break;
        case Op::ATOM_ADD:
        case Op::ATOM_EXCH:
        case Op::ATOM_CAS: atomic(w, i, m); break;

        case Op::SHFL_BFLY:
        case Op::SHFL_IDX:
        case Op::SHFL_UP:
        case Op::SHFL_DOWN: shuffle(w, i, m); break;
        case Op::ELECT: {
          const u32 leader = static_cast<u32>(__builtin_ctz(m));
          if (i.dst != NONE) lanes(m, w.reg<u32>(i.dst), [=](int) { return leader; });
          if (i.dst2 != NONE)
            lanes(m, w.reg<u8>(i.dst2), [=](int l) -> u8 { return static_cast<u32>(l) == leader; });
          break;
        }
        case Op::VOTE_ANY:
        case Op::VOTE_ALL:
        case Op::BALLOT: {
          const u32 votes = predicate_mask(w.reg<u8>(i.a)) & m;
          if (i.op == static_cast<i32>(Op::BALLOT)) {
            lanes(m, w.reg<u32>(i.dst), [=](int) { return votes; });
          } else {
            const u8 result = i.op == static_cast<i32>(Op::VOTE_ANY) ? votes != 0 : votes == m;
            lanes(m, w.reg<u8>(i.dst), [=](int) { return result; });
          }
          break;
        }
        case Op::BAR_WARP: cta.bump(w); break;

        case Op::BAR_SYNC: {
          const bool first = w.barrier == AtBarrier::no;
          if (!cta.barrier_arrive(w, i.imm, static_cast<u32>(i.count), true)) {
            registered = first;
            goto stopped;
          }
          break;
        }
        case Op::BAR_ARRIVE: cta.barrier_arrive(w, i.imm, static_cast<u32>(i.count), false); break;
        case Op::MBAR_INIT:
        case Op::MBAR_INVAL:
        case Op::MBAR_ARRIVE:
        case Op::MBAR_EXPECT: mbarrier_op(w, i, m); break;
        case Op::MBAR_TRY_WAIT:
          if (ready_lanes(w, i, m) == m) {
            acquire(w, i, m);
            if (i.dst != NONE) lanes(m, w.reg<u8>(i.dst), [](int) -> u8 { return 1; });
          } else if (times_out(w, i, m, pc)) {
            if (i.dst != NONE) lanes(m, w.reg<u8>(i.dst), [](int) -> u8 { return 0; });
          } else {
            goto stopped;
          }
          break;
        case Op::MBAR_TEST_WAIT: {
          const u32 ready = ready_lanes(w, i, m);
          acquire(w, i, ready);
          if (i.dst != NONE) lanes(m, w.reg<u8>(i.dst), [=](int l) -> u8 { return ready >> l & 1; });
          w.yielded = true;
          w.unready = ready != m;
          n++;
          pc++;
          goto stopped;
        }
        case Op::FENCE_PROXY: cta.fence_proxy(w); break;
        case Op::FENCE_MBARRIER: cta.show_mbarriers(w); break;
        case Op::DEPENDENCY_WAIT: w.vc[cta.entities.dependency] = 1; break;

        case Op::BULK_LOAD: cta.bulk_load(w, i, m); break;
        case Op::BULK_STORE: cta.bulk_store(w, i, m); break;
        case Op::BULK_COMMIT:
          for (int l = 0; l < LANES; l++) w.bulk_group[l] += m >> l & 1;
          break;
        case Op::BULK_WAIT: cta.bulk_wait(w, i, m); break;
        case Op::TMA_LOAD: cta.tma_load(w, i, m); break;
        case Op::CP_ASYNC: cta.cp_async(w, i, m); break;
        case Op::CP_ASYNC_COMMIT: w.copy_group++; break;
        case Op::CP_ASYNC_WAIT: cta.cp_async_wait(w, i); break;
        case Op::LDMATRIX: matrix(w, i, m, false); break;
        case Op::STMATRIX: matrix(w, i, m, true); break;

        case Op::TC_ALLOC: cta.tc_alloc(w, i); break;
        case Op::TC_DEALLOC: cta.tc_dealloc(w, i); break;
        case Op::TC_MMA: cta.tc_mma(w, i, m); break;
        case Op::TC_COMMIT: cta.tc_commit(w, i, m); break;
        case Op::TC_LOAD: cta.tc_load(w, i, m); break;
        case Op::TC_WAIT_LOAD: cta.tc_wait_load(w, m); break;
        case Op::TC_FENCE_BEFORE: {
          const int loads = cta.entities.tensor_loads(w.index);
          if (w.loading.empty()) w.vc[loads] = cta.clock[loads];
          cta.clock[loads]++;
          break;
        }
        case Op::TC_FENCE_AFTER: join(w.vt, w.vc, cta.entities.size); break;
        case Op::WG_FENCE: w.fenced = true; break;
        case Op::WG_MMA: cta.wg_mma(w, i, m); break;
        case Op::WG_COMMIT: w.product_group++; break;
        case Op::WG_WAIT: cta.wg_wait(w, i); break;

        case Op::BRA:
          n++;
          if (m == mask) {
            pc = i.target;
            continue;
          }
          w.groups.erase(w.groups.begin() + static_cast<std::ptrdiff_t>(which));
          place(w, i.target, m);
          place(w, pc + 1, mask & ~m);
          split = true;
          goto stopped;
        case Op::EXIT:
          n++;
          w.live &= ~m;
          w.groups.erase(w.groups.begin() + static_cast<std::ptrdiff_t>(which));
          if (mask & ~m) place(w, pc + 1, mask & ~m);
          if (w.groups.empty()) cta.unfinished--;
          split = true;
          goto stopped;
        case Op::TRAP: fail(Kind::trap, "the kernel trapped");
        case Op::CLOCK: {
          const u64 now = static_cast<u64>(w.executed + n);
          if (i.size == 8) {
            lanes(m, w.reg<u64>(i.dst), [=](int) { return now; });
          } else {
            lanes(m, w.reg<u32>(i.dst), [=](int) { return static_cast<u32>(now); });
          }
          break;
        }
        case Op::NOP: break;
        default: fail(Kind::unsupported, "operation %d", i.op);
      }
#undef OP3
#undef SAME1
#undef FTZ3
      n++;
      pc++;
    }
  stopped:;
  } catch (Fault& fault) {
    if (!fault.placed) {
      fault.placed = true;
      fault.line = code[pc].line;
      fault.warp = w.index;
      std::copy(cta.id, cta.id + 3, fault.cta);
    }
    throw;
  }
  w.executed += n;
  launch.executed += n;
  if (n && !split) {
    w.groups.erase(w.groups.begin() + static_cast<std::ptrdiff_t>(which));
    place(w, pc, mask);
  }
  return {n, registered};
}

}  // namespace

bool step(Warp& w, i64 budget) {
  w.yielded = w.unready = false;
  bool registered = false;
  for (size_t g = 0; g < w.groups.size(); g++) {
    const Outcome outcome = run(w, g, budget);
    registered |= outcome.registered;
    if (outcome.executed) return true;
  }
  return registered;
}

}  // namespace emulator
