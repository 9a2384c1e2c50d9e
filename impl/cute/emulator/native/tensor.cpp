// Tensor memory and the matrix products of tcgen05 and wgmma.
#include "cta.h"

namespace emulator {

namespace {

// A K-major bf16 operand in shared memory, as a descriptor gives it.
struct Operand {
  u32 start, lead, stride, row, mask;

  // Offset in shared memory (may lie outside) of elements 8 h .. 8 h + 7 of row r.
  ALWAYS_INLINE u32 chunk(u32 r, u32 h) const {
    if (!row) return start + r / 8 * stride + r % 8 * 16 + h * lead - SHARED_BASE;
    const u32 plain = start + r / 8 * stride + r % 8 * row + h * 16;
    return (plain ^ ((plain >> 7 & mask) << 4)) - SHARED_BASE;
  }
};

constexpr u32 ROW_BYTES[4] = {0, 32, 64, 128}, ROW_MASK[4] = {0, 1, 3, 7};

Operand operand(u64 d, int swizzle) {
  return {static_cast<u32>(d & 0x3FFF) << 4, static_cast<u32>(d >> 16 & 0x3FFF) << 4,
          static_cast<u32>(d >> 32 & 0x3FFF) << 4, ROW_BYTES[swizzle], ROW_MASK[swizzle]};
}

Operand blackwell(u64 d) {
  const u32 code = d >> 61 & 7;
  if ((d >> 46 & 7) != 1 || (d >> 49 & 7) || (code & 1))
    fail(Kind::descriptor, "shared-memory descriptor 0x%016llx: version %u, base offset %u, swizzle code %u",
         static_cast<unsigned long long>(d), static_cast<u32>(d >> 46 & 7), static_cast<u32>(d >> 49 & 7),
         code);
  return operand(d, code == 0 ? 0 : code == 2 ? 3 : code == 4 ? 2 : 1);
}

Operand hopper(u64 d) {
  const u64 known = 3ull << 62 | 0x3FFFull | 0x3FFFull << 16 | 0x3FFFull << 32;
  if (d & ~known)
    fail(Kind::descriptor, "shared-memory descriptor 0x%016llx has bits that wgmma does not take",
         static_cast<unsigned long long>(d));
  const u32 code = static_cast<u32>(d >> 62);
  return operand(d, code == 0 ? 0 : 4 - static_cast<int>(code));
}

void check_inside(const Cta& cta, const Operand& o, u32 first, u32 rows, const char* what) {
  const u32 size = static_cast<u32>(cta.launch->view.shared_bytes);
  for (u32 r = first; r < first + rows; r++)
    for (u32 h = 0; h < 2; h++) {
      const u32 offset = o.chunk(r, h);
      if (offset > size || 16 > size - offset)
        fail(Kind::bounds, "%s reads shared address 0x%x, outside [0x%x, 0x%x)", what, offset + SHARED_BASE,
             SHARED_BASE, SHARED_BASE + size);
    }
}

// Rows [first, first + rows) of an operand, 16 elements each, checked and recorded.
void fetch(Cta& cta, const Operand& o, u32 first, u32 rows, const Accessor& by, u16 (*to)[16]) {
  Shadow::AsyncFaults faults;
  for (u32 r = 0; r < rows; r++)
    for (u32 h = 0; h < 2; h++) {
      const u32 offset = o.chunk(first + r, h);
      cta.shadow.read_async(offset / 2, 8, by, faults);
      std::memcpy(to[r] + 8 * h, cta.shared + offset, 16);
    }
  cta.shadow.report(faults, by);
}

typedef f64 Vector8 __attribute__((vector_size(64)));

// Sums of a[m][k] * b[k][n], k ascending, into the accumulator or instead of it. A product of bf16
// numbers is exact in double, so that contraction to a fused multiply-add changes no bit.
NOINLINE __attribute__((optimize("fp-contract=fast"))) void multiply(const f64 (*a)[16], const f64 (*b)[256],
                                                                     u32 n, f32* to, bool accumulate) {
  for (u32 r = 0; r < TM_LANES; r += 4)
    for (u32 c = 0; c < n; c += 16) {
      Vector8 left[4] = {}, right[4] = {};
#pragma GCC unroll 16
      for (int k = 0; k < 16; k++) {
        Vector8 x, y;
        std::memcpy(&x, &b[k][c], 64);
        std::memcpy(&y, &b[k][c + 8], 64);
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++) {
          left[q] += a[r + q][k] * x;
          right[q] += a[r + q][k] * y;
        }
      }
      for (int q = 0; q < 4; q++) {
        f32* place = to + (r + q) * TM_COLUMNS + c;
        f64 sums[16];
        std::memcpy(sums, &left[q], 64);
        std::memcpy(sums + 8, &right[q], 64);
        if (accumulate)
          for (int e = 0; e < 16; e++) sums[e] += place[e];
        for (int e = 0; e < 16; e++) place[e] = canonical(static_cast<f32>(sums[e]));
      }
    }
}

}  // namespace

void Cta::check_columns(u32 column, u32 n, const char* what) const {
  const bool owned = column < TM_COLUMNS && n <= TM_COLUMNS - column && column_owner[column] >= 0;
  for (u32 c = column; owned && c < column + n; c++)
    if (column_owner[c] != column_owner[column])
      fail(Kind::tensor_memory, "%s of columns [%u, %u), which are not allocated", what, column, column + n);
  if (!owned)
    fail(Kind::tensor_memory, "%s of columns [%u, %u), which are not allocated", what, column, column + n);
}

void Cta::tc_alloc(Warp& w, const Instruction& i) {
  const u32 n = static_cast<u32>(i.count), address = w.reg<u32>(i.a)[0] + static_cast<u32>(i.imm);
  if (n < 32 || n > TM_COLUMNS || (n & (n - 1))) fail(Kind::tensor_memory, "allocation of %u columns", n);
  if (address & 3) fail(Kind::misaligned, "tensor-memory address to be written to 0x%x", address);
  const u32 offset = shared_address(address, 4, "store");
  u32 best = TM_COLUMNS;
  const auto consider = [&](u32 at) {
    if (at + n > TM_COLUMNS || at >= best) return;
    for (u32 c = at; c < at + n; c++)
      if (column_owner[c] >= 0) return;
    best = at;
  };
  consider(0);
  for (const auto& a : tensor_allocations) consider(a.first + a.second);
  if (best == TM_COLUMNS) fail(Kind::tensor_memory, "no %u columns of tensor memory are free", n);
  if (!tensor) tensor = reinterpret_cast<u32*>(tensor_store.need(TM_LANES * TM_COLUMNS * 4));
  for (u32 c = poisoned; c < best + n; c++) {
    column_written[c] = base;
    std::fill_n(column_read.begin() + c * warp_count, warp_count, base);
  }
  if (best + n > poisoned) {
    for (u32 l = 0; l < TM_LANES; l++)
      std::fill(tensor + l * TM_COLUMNS + poisoned, tensor + l * TM_COLUMNS + best + n, TM_POISON);
    poisoned = best + n;
  }
  std::fill(column_owner + best, column_owner + best + n, static_cast<i32>(best));
  tensor_allocations.emplace_back(best, n);
  shadow.write(offset / 2, 2, 0, generic(w, i.line));
  std::memcpy(shared + offset, &best, 4);
}

void Cta::tc_dealloc(Warp& w, const Instruction& i) {
  const u32 address = w.reg<u32>(i.a)[0], n = static_cast<u32>(i.count);
  for (auto a = tensor_allocations.begin(); a != tensor_allocations.end(); ++a)
    if (a->first == address && a->second == n) {
      for (u32 c = address; c < address + n; c++) {
        bool used = column_written[c] > w.vt[entities.tensor_core];
        for (int x = 0; x < warp_count; x++)
          used |= w.vt[entities.tensor_loads(x)] < column_read[c * warp_count + x];
        if (used)
          fail(Kind::tensor_memory,
               "column %u is given back while a product or a tcgen05.ld may still use it: "
               "fence::before_thread_sync, a barrier and fence::after_thread_sync come first",
               c);
      }
      std::fill(column_owner + address, column_owner + address + n, -1);
      tensor_allocations.erase(a);
      return;
    }
  fail(Kind::tensor_memory, "no allocation of %u columns at 0x%x to give back", n, address);
}

void Cta::tc_load(Warp& w, const Instruction& i, u32 mask) {
  const i32* list = launch->program.operands + i.list;
  const u32* base_address = w.reg<u32>(i.a);
  const u32 address = base_address[__builtin_ctz(mask)] + static_cast<u32>(i.imm),
            n = static_cast<u32>(i.count);
  for (u32 m = mask; m; m &= m - 1)
    if (base_address[__builtin_ctz(m)] + static_cast<u32>(i.imm) != address)
      fail(Kind::tensor_memory, "tcgen05.ld from addresses that differ within the warp");
  const u32 lane = address >> 16, column = address & 0xFFFF, quarter = 32 * (w.index % 4);
  if (lane != quarter)
    fail(Kind::tensor_memory, "warp %d loads from lane %u; its lanes are %u to %u", w.index, lane, quarter,
         quarter + 31);
  check_columns(column, n, "tcgen05.ld");
  const u32 seen = w.vt[entities.tensor_core], now = clock[entities.tensor_loads(w.index)];
  for (u32 c = column; c < column + n; c++) {
    if (column_written[c] > seen)
      fail(Kind::tensor_memory,
           "column %u is loaded without waiting for the tcgen05.mma that writes it (mbarrier wait, then "
           "tcgen05.fence::after_thread_sync)",
           c);
    column_read[c * warp_count + w.index] = now;
  }
  for (u32 j = 0; j < n; j++) {
    if (list[j] == NONE) continue;
    w.loading.emplace_back(list[j], static_cast<u32>(w.loaded.size()));
    for (u32 l = 0; l < LANES; l++) w.loaded.push_back(tensor[(lane + l) * TM_COLUMNS + column + j]);
    u32* to = w.reg<u32>(list[j]);
    for (int l = 0; l < LANES; l++) to[l] = mask >> l & 1 ? FULL : to[l];
  }
}

void Cta::tc_wait_load(Warp& w, u32 mask) {
  for (const auto& [to, at] : w.loading)
    for (int l = 0; l < LANES; l++) w.reg<u32>(to)[l] = mask >> l & 1 ? w.loaded[at + l] : w.reg<u32>(to)[l];
  w.loading.clear();
  w.loaded.clear();
  u32& now = clock[entities.tensor_loads(w.index)];
  w.vt[entities.tensor_loads(w.index)] = now++;
}

void Cta::tc_mma(Warp& w, const Instruction& i, u32 mask) {
  const i32* list = launch->program.operands + i.list;
  for (u32 m = mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    const u32 d = w.reg<u32>(list[0])[l], idesc = w.reg<u32>(list[3])[l];
    const u64 a = w.reg<u64>(list[1])[l], b = w.reg<u64>(list[2])[l];
    const u32 n = (idesc >> 17 & 63) * 8, rows = (idesc >> 24 & 31) * 16;
    if ((idesc >> 4 & 3) != 1 || (idesc >> 7 & 7) != 1 || (idesc >> 10 & 7) != 1 || (idesc >> 13 & 15))
      fail(Kind::descriptor, "instruction descriptor 0x%x: only f32 += bf16 x bf16, both K-major, is known",
           idesc);
    if (rows != 128 || n % 16 || n < 16 || n > 256)
      fail(Kind::descriptor, "instruction descriptor 0x%x: M %u, N %u", idesc, rows, n);
    check_inside(*this, blackwell(a), 0, rows, "tcgen05.mma");
    check_inside(*this, blackwell(b), 0, n, "tcgen05.mma");
    if (d >> 16) fail(Kind::tensor_memory, "accumulator at lane %u", d >> 16);
    check_columns(d & 0xFFFF, n, "tcgen05.mma");
    AsyncOp* op = issue(w, AsyncOp::What::mma, i.line, entities.tensor_core);
    op->tensor_view.assign(w.vt, w.vt + entities.size);
    op->descriptors[0] = a;
    op->descriptors[1] = b;
    op->column = d & 0xFFFF;
    op->n = static_cast<i32>(n);
    op->accumulate = w.reg<u8>(list[4])[l];
    submit(TC, op);
  }
}

void Cta::run_mma(AsyncOp& op) {
  const Accessor by = async(op);
  const u32 n = static_cast<u32>(op.n);
  alignas(64) u16 raw[256][16];
  alignas(64) f64 a[TM_LANES][16], b[16][256];
  fetch(*this, blackwell(op.descriptors[0]), 0, TM_LANES, by, raw);
  for (u32 r = 0; r < TM_LANES; r++)
    for (int k = 0; k < 16; k++) a[r][k] = from_bf16(raw[r][k]);
  fetch(*this, blackwell(op.descriptors[1]), 0, n, by, raw);
  for (u32 r = 0; r < n; r++)
    for (int k = 0; k < 16; k++) b[k][r] = from_bf16(raw[r][k]);
  for (u32 c = op.column; c < op.column + n; c++) {
    for (int x = 0; x < warp_count; x++)
      if (op.tensor_view[entities.tensor_loads(x)] < column_read[c * warp_count + x])
        fail(Kind::tensor_memory,
             "column %u is overwritten though warp %d loads it, with no tcgen05.wait::ld, "
             "fence::before_thread_sync, barrier and fence::after_thread_sync in between",
             c, x);
    column_written[c] = op.clock;
  }
  multiply(a, b, n, reinterpret_cast<f32*>(tensor + op.column), op.accumulate);
}

void Cta::tc_commit(Warp& w, const Instruction& i, u32 mask) {
  for (u32 m = mask; m; m &= m - 1) {
    const u32 index = mbarrier_index(w.reg<u32>(i.a)[__builtin_ctz(m)] + static_cast<u32>(i.imm));
    AsyncOp* op = issue(w, AsyncOp::What::commit, i.line, entities.tensor_core);
    clock[entities.tensor_core]--;  // a commit is no access: it stands for the last one before it
    op->clock--;
    op->mbarrier = index;
    submit(TC, op);
  }
}

void Cta::run_commit(AsyncOp& op) {
  Mbarrier& b = mbarriers[op.mbarrier];
  if (!b.live) fail(Kind::barrier, "no mbarrier is initialised at 0x%x", b.address);
  join(b.released.data(), op.view.data(), entities.size);
  b.released[op.entity] = std::max(b.released[op.entity], op.clock);
  mbarrier_arrive(b, 1);
}

namespace {

// Mark the registers of a product that an earlier one, not executed yet, writes.
void chain(const AsyncOp& earlier, AsyncOp& op) {
  if (earlier.n == op.n && std::equal(op.registers, op.registers + op.n / 2, earlier.registers)) {
    std::fill(op.chained.begin(), op.chained.end(), 1);
    return;
  }
  for (i32 e = 0; e < op.n / 2; e++)
    for (i32 k = 0; k < earlier.n / 2; k++) op.chained[e] |= earlier.registers[k] == op.registers[e];
}

}  // namespace

void Cta::wg_mma(Warp& w, const Instruction& i, u32 mask) {
  const i32* list = launch->program.operands + i.list;
  const u64 *a = w.reg<u64>(list[0]), *b = w.reg<u64>(list[1]);
  const u32 n = static_cast<u32>(i.imm);
  if (mask != FULL) fail(Kind::divergence, "wgmma without all 32 lanes");
  if (!w.fenced)
    fail(Kind::wgmma,
         "wgmma.mma_async without a wgmma.fence since the warp's start or its last wgmma.wait_group");
  for (int l = 1; l < LANES; l++)
    if (a[l] != a[0] || b[l] != b[0]) fail(Kind::descriptor, "wgmma descriptors that differ within the warp");
  check_inside(*this, hopper(a[0]), 16 * (w.index % 4), 16, "wgmma");
  check_inside(*this, hopper(b[0]), 0, n, "wgmma");
  AsyncOp* op = issue(w, AsyncOp::What::wgmma, i.line, entities.warpgroup(w.index));
  op->descriptors[0] = a[0];
  op->descriptors[1] = b[0];
  op->n = static_cast<i32>(n);
  op->accumulate = w.reg<u8>(list[2])[0];
  op->registers = list + 3;
  op->saved.resize(n / 2 * LANES);
  op->chained.assign(n / 2, 0);
  for (u32 e = 0; e < n / 2; e++) std::memcpy(&op->saved[e * LANES], w.reg<u32>(op->registers[e]), 4 * LANES);
  for (const AsyncOp* earlier : queues[TC])
    if (earlier->what == AsyncOp::What::wgmma && earlier->warp == &w) chain(*earlier, *op);
  // Registers that an earlier product will still write carry its result to this one.
  for (u32 e = 0; e < n / 2; e++)
    if (!op->chained[e]) std::memset(w.reg<u32>(op->registers[e]), 0xFF, 4 * LANES);
  w.products.push_back({op->id, w.product_group, op->clock, 0});
  submit(TC, op);
}

namespace {

constexpr i32 NO_EXPONENT = -20000;  // of zero

// x = mantissa * 2^(exponent - 23), the magnitude's highest bit being bit 23.
ALWAYS_INLINE void take_apart(f32 x, i32& mantissa, i32& exponent) {
  const u32 u = bits_of<u32>(x) & 0x7FFFFFFF, field = u >> 23, fraction = u & 0x7FFFFF;
  // Of a subnormal: its highest bit, from its exact value as a number.
  const i32 up = field ? 0 : 23 - (static_cast<i32>(bits_of<u32>(static_cast<f32>(fraction)) >> 23) - 127);
  const i32 size = static_cast<i32>(field ? fraction | 0x800000 : fraction << (up & 31));
  exponent = u ? static_cast<i32>(field ? field : 1) - 127 - up : NO_EXPONENT;
  mantissa = bits_of<u32>(x) >> 31 ? -size : size;
}

// sum * 2^exponent, cut toward zero to fp32; zero is +0.
ALWAYS_INLINE f32 cut(i64 sum, i32 exponent) {
  const f64 v = static_cast<f64>(sum) * bits_of<f64>(static_cast<u64>(exponent + 1023) << 52);
  const f64 subnormal = std::trunc(v * 0x1p149) * 0x1p-149,
            normal = bits_of<f64>(bits_of<u64>(v) & ~0x1FFFFFFFull);
  return static_cast<f32>(std::fabs(v) < 0x1p-126 ? subnormal : normal) + 0.0f;
}

typedef i32 Vector16 __attribute__((vector_size(64)));
constexpr i32 FRACTION = 25;

ALWAYS_INLINE bool is_finite(f32 x) { return (bits_of<u32>(x) & 0x7F800000) != 0x7F800000; }

ALWAYS_INLINE bool all_finite(const f32* x, u32 n) {
  u32 largest = 0;
  for (u32 i = 0; i < n; i++) largest = std::max(largest, bits_of<u32>(x[i]) & 0x7F800000);
  return largest != 0x7F800000;
}

// bf16 = mantissa * 2^(exponent - 7); a subnormal keeps the smallest exponent, as an H200 aligns it.
ALWAYS_INLINE void take_apart_bf16(u32 u, i32& mantissa, i32& exponent) {
  const u32 field = u >> 7 & 255, fraction = u & 127;
  const i32 size = static_cast<i32>(field ? fraction | 128 : fraction);
  exponent = (u & 0x7FFF) == 0 ? NO_EXPONENT : static_cast<i32>(field ? field : 1) - 127;
  mantissa = u >> 15 & 1 ? -size : size;
}

// An operand's columns taken apart: [k][column].
struct Parts {
  alignas(64) i32 mantissa[16][256];
  alignas(64) i32 exponent[16][256];
};

// One row of 16 columns where everything is finite.
ALWAYS_INLINE void finite_row(const i32* am, const i32* ae, const Parts& b, u32 c, f32* sums) {
  alignas(64) i32 cm[16], ce[16], most[16], total[16];
  for (int e = 0; e < 16; e++) take_apart(sums[e], cm[e], ce[e]);
  Vector16 largest, sum = {};
  std::memcpy(&largest, ce, 64);
#pragma GCC unroll 16
  for (int k = 0; k < 16; k++) {
    const Vector16 exponent = ae[k] + *reinterpret_cast<const Vector16*>(&b.exponent[k][c]);
    largest = exponent > largest ? exponent : largest;
  }
#pragma GCC unroll 16
  for (int k = 0; k < 16; k++) {
    const Vector16 exponent = ae[k] + *reinterpret_cast<const Vector16*>(&b.exponent[k][c]);
    const Vector16 product = am[k] * *reinterpret_cast<const Vector16*>(&b.mantissa[k][c]);
    const Vector16 negative = product < 0, gap = largest - exponent, away = gap < 31 ? gap : 31;
    const Vector16 size = ((product ^ negative) - negative) << (FRACTION - 14) >> away;
    sum += (size ^ negative) - negative;  // 16 of at most 255 * 255 * 2^11: no overflow
  }
  std::memcpy(most, &largest, 64);
  std::memcpy(total, &sum, 64);
  for (int e = 0; e < 16; e++) {
    const i32 away = std::min(most[e] - ce[e], 31), size = std::abs(cm[e]) << (FRACTION - 23) >> (away & 31);
    const i64 all = static_cast<i64>(total[e]) + (cm[e] < 0 ? -size : size);
    sums[e] = most[e] < -2000 ? 0.0f : cut(all, std::max(most[e], -600) - FRACTION);
  }
}

// Products and accumulator aligned to the largest exponent, each cut toward zero at 25 fraction
// bits, summed exactly, cut toward zero: what an H200 does with one step of K 16.
void hopper_step(const u16 (*a)[16], const u16 (*b)[16], u32 n, f32 (*sums)[256]) {
  Parts parts;
  bool finite = true;
  const u32 padded = (n + 15) / 16 * 16;
  u16 turned[16][256];
  for (u32 c = 0; c < padded; c++)
    for (int k = 0; k < 16; k++) turned[k][c] = c < n ? b[c][k] : 0;
  for (int k = 0; k < 16; k++) {
    u32 largest = 0;
    for (u32 c = 0; c < padded; c++) {
      largest = std::max<u32>(largest, turned[k][c] & 0x7F80);
      take_apart_bf16(turned[k][c], parts.mantissa[k][c], parts.exponent[k][c]);
    }
    finite &= largest != 0x7F80;
  }
  for (int r = 0; r < 16; r++) {
    i32 am[16], ae[16];
    bool usual = finite;
    for (int k = 0; k < 16; k++) {
      usual &= (a[r][k] & 0x7F80) != 0x7F80;
      take_apart_bf16(a[r][k], am[k], ae[k]);
    }
    usual &= all_finite(sums[r], n);
    f32 before[256];
    if (!usual) std::copy(sums[r], sums[r] + n, before);
    for (u32 c = 0; c < n; c += 16) finite_row(am, ae, parts, c, sums[r] + c);
    if (usual) continue;
    // Where something is not finite, the sum in double is: infinite or NaN.
    for (u32 c = 0; c < n; c++) {
      f64 sum = 0;
      bool all = is_finite(before[c]);
      for (int k = 0; k < 16; k++) {
        const f32 x = from_bf16(a[r][k]), y = from_bf16(b[c][k]);
        all &= is_finite(x) && is_finite(y);
        sum += static_cast<f64>(x) * y;
      }
      if (!all) sums[r][c] = canonical(static_cast<f32>(sum + before[c]));
    }
  }
}

}  // namespace

void Cta::run_wgmma(AsyncOp& op) {
  const Accessor by = async(op);
  Warp& w = *op.warp;
  const u32 n = static_cast<u32>(op.n);
  alignas(64) u16 a[16][16], b[256][16];
  static_assert(LANES == 32, "fragments are laid out for 32 lanes");
  fetch(*this, hopper(op.descriptors[0]), 16 * (w.index % 4), 16, by, a);
  fetch(*this, hopper(op.descriptors[1]), 0, n, by, b);
  alignas(64) f32 sums[16][256];
  for (int r = 0; r < 16; r++) std::fill(sums[r] + n, sums[r] + (n + 15) / 16 * 16, 0.0f);
  const auto row = [](u32 e, u32 l) { return l / 4 + 8 * (e >> 1 & 1); };
  const auto column = [](u32 e, u32 l) { return 8 * (e >> 2) + 2 * (l % 4) + (e & 1); };
  for (u32 e = 0; e < n / 2; e++) {
    const f32* from =
        op.chained[e] ? w.reg<f32>(op.registers[e]) : reinterpret_cast<const f32*>(&op.saved[e * LANES]);
    for (u32 l = 0; l < LANES; l++) sums[row(e, l)][column(e, l)] = op.accumulate ? from[l] : 0.0f;
  }
  hopper_step(a, b, n, sums);
  for (u32 e = 0; e < n / 2; e++)
    for (u32 l = 0; l < LANES; l++) w.reg<f32>(op.registers[e])[l] = sums[row(e, l)][column(e, l)];
}

void Cta::wg_wait(Warp& w, const Instruction& i) {
  u32& seen = w.vc[entities.warpgroup(w.index)];
  size_t kept = 0;
  for (size_t k = 0; k < w.products.size(); k++) {
    const Issued product = w.products[k];
    if (static_cast<i64>(product.group) + i.imm < w.product_group) {
      run_issued(TC, product.id);
      seen = std::max(seen, product.clock);
    } else {
      w.products[kept++] = product;
    }
  }
  w.products.resize(kept);
  w.fenced = false;
}

}  // namespace emulator
