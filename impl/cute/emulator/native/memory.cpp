// Loads, stores and atomics of global and shared memory.
#include "cta.h"

namespace emulator {

bool Launch::in_global(u64 address, u64 bytes) const {
  for (i64 k = 0; k < view.allocation_count; k++)
    if (contains(k, address, bytes)) return true;
  return false;
}

void Launch::out_of_bounds(u64 address, u64 bytes, const char* what) const {
  i64 nearest = -1;
  u64 distance = ~0ull;
  for (i64 k = 0; k < view.allocation_count; k++) {
    const u64 start = view.starts[k], end = start + view.sizes[k];
    const u64 away = address + bytes > end ? (address > end ? address - end : 0)
                     : start > address     ? start - address
                                           : 0;
    if (away < distance) distance = away, nearest = k;
  }
  if (nearest < 0)
    fail(Kind::bounds, "%s of %llu bytes at 0x%llx: the launch has no memory", what,
         static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(address));
  const u64 start = view.starts[nearest], end = start + view.sizes[nearest];
  // The allocation's number between bars: Python puts its name there.
  if (address < start)
    fail(Kind::bounds, "%s of %llu bytes at 0x%llx: %llu bytes below |%lld|", what,
         static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(address),
         static_cast<unsigned long long>(start - address), static_cast<long long>(nearest));
  fail(Kind::bounds, "%s of %llu bytes at 0x%llx: ends %llu bytes past |%lld|", what,
       static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(address),
       static_cast<unsigned long long>(address + bytes - end), static_cast<long long>(nearest));
}

void Launch::check_global(u64 address, u64 bytes, bool write, bool early) {
  bool inside = false;
  for (i64 k = 0; k < view.allocation_count; k++) {
    if (!contains(k, address, bytes)) continue;
    inside = true;
    if (write && !view.writable[k]) continue;
    if (early) view.early[2 * k + write]++;
    return;
  }
  if (!inside) out_of_bounds(address, bytes, write ? "store" : "load");
  for (i64 k = 0; k < view.allocation_count; k++)
    if (contains(k, address, bytes))
      fail(Kind::read_only, "store of %llu bytes at 0x%llx, in |%lld|",
           static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(address),
           static_cast<long long>(k));
}

namespace {

template <class T>
ALWAYS_INLINE void load_lanes(T* to, u8* const* from, u32 element, u32 mask) {
  if (mask == FULL) {
    for (int l = 0; l < LANES; l++) std::memcpy(to + l, from[l] + element * sizeof(T), sizeof(T));
  } else {
    for (u32 m = mask; m; m &= m - 1) {
      const int l = __builtin_ctz(m);
      std::memcpy(to + l, from[l] + element * sizeof(T), sizeof(T));
    }
  }
}

template <class T>
ALWAYS_INLINE void store_lanes(const T* from, u8* const* to, u32 element, u32 mask) {
  if (mask == FULL) {
    for (int l = 0; l < LANES; l++) std::memcpy(to[l] + element * sizeof(T), from + l, sizeof(T));
  } else {
    for (u32 m = mask; m; m &= m - 1) {
      const int l = __builtin_ctz(m);
      std::memcpy(to[l] + element * sizeof(T), from + l, sizeof(T));
    }
  }
}

template <class T>
void move_as(Warp& w, const Instruction& i, const i32* list, u8* const* places, u32 mask, bool write) {
  if (write) {
    // Lane by lane: where lanes write the same bytes the highest lane wins whatever the element.
    for (int j = 0; j < i.count; j++) store_lanes(w.reg<T>(list[j]), places, j, mask);
  } else {
    for (int j = 0; j < i.count; j++)
      if (list[j] != NONE) load_lanes(w.reg<T>(list[j]), places, j, mask);
  }
}

void move(Warp& w, const Instruction& i, u8* const* places, u32 mask, bool write) {
  const i32* list = w.cta->launch->program.operands + i.list;
  switch (i.size) {
    case 1: return move_as<u8>(w, i, list, places, mask, write);
    case 2: return move_as<u16>(w, i, list, places, mask, write);
    case 4: return move_as<u32>(w, i, list, places, mask, write);
    default: return move_as<u64>(w, i, list, places, mask, write);
  }
}

// Whether the lanes take 4-byte words in order from their lowest address on.
ALWAYS_INLINE bool consecutive(const u32* address) {
  u32 different = 0;
  for (u32 l = 0; l < LANES; l++) different |= address[l] ^ (address[0] + 4 * l);
  return !different;
}

[[noreturn]] void misaligned(u64 address, u32 bytes) {
  fail(Kind::misaligned, "access of %u bytes at 0x%llx", bytes, static_cast<unsigned long long>(address));
}

// Lane by lane, for an access that is not plainly inside one allocation.
NOINLINE void resolve_global(Warp& w, const u64* address, u32 mask, u32 bytes, bool write, bool early,
                             u8** places) {
  Launch& launch = *w.cta->launch;
  for (u32 m = mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    if (address[l] & (bytes - 1)) misaligned(address[l], bytes);
    if (launch.is_parameter(address[l], bytes)) {
      if (write) fail(Kind::read_only, "store to the kernel's parameters");
      places[l] = const_cast<u8*>(launch.view.params) + (address[l] - PARAM_BASE);
      continue;
    }
    launch.check_global(address[l], bytes, write, early);
    places[l] = reinterpret_cast<u8*>(address[l]);
  }
}

}  // namespace

void access_global(Warp& w, const Instruction& i, u32 mask, bool write) {
  Launch& launch = *w.cta->launch;
  const u32 bytes = static_cast<u32>(i.size) * i.count;
  const u64* base = w.reg<u64>(i.a);
  u64 address[LANES], low = ~0ull, high = 0, odd = 0;
  const u64 spare = base[__builtin_ctz(mask)] + i.imm;
  for (int l = 0; l < LANES; l++) {
    const u64 a = mask >> l & 1 ? base[l] + i.imm : spare;
    address[l] = a;
    low = a < low ? a : low;
    high = a > high ? a : high;
    odd |= a;
  }
  u8* places[LANES];
  const bool early = !w.vc[w.cta->entities.dependency];
  bool plain = !(odd & (bytes - 1));
  if (plain) {
    const u64 span = high - low + bytes;
    const auto good = [&](size_t n) {
      return launch.contains(n, low, span) && (!write || launch.view.writable[n]);
    };
    const size_t end = launch.view.allocation_count;
    if (early) {
      // Counted to the first allocation with the access: none before may hold a part of it.
      size_t k = 0;
      while (k < end && !good(k) && ((write && !launch.view.writable[k]) || !launch.touches(k, low, span)))
        k++;
      plain = k < end && good(k);
      if (plain) launch.view.early[2 * k + write] += __builtin_popcount(mask);
    } else if (launch.last_allocation >= end || !good(launch.last_allocation)) {
      size_t k = 0;
      while (k < end && !good(k)) k++;
      plain = k < end;
      if (plain) launch.last_allocation = k;
    }
  }
  if (plain) {
    for (int l = 0; l < LANES; l++) places[l] = reinterpret_cast<u8*>(address[l]);
  } else {
    resolve_global(w, address, mask, bytes, write, early, places);
  }
  move(w, i, places, mask, write);
}

namespace {

template <u32 UNITS>
ALWAYS_INLINE void shadow_lanes(Shadow& shadow, const u32* offset, u32 mask, const Accessor& by, bool write,
                                u32 units) {
  const u32 n = UNITS ? UNITS : units;
  if (write) {
    bool apart = true;  // each lane's units above those of the lane before
    if (mask == FULL) {
      for (int l = 1; l < LANES; l++) apart &= offset[l] / 2 >= offset[l - 1] / 2 + n;
    } else {
      u32 next = 0;
      for (u32 m = mask; m; m &= m - 1) {
        const u32 unit = offset[__builtin_ctz(m)] / 2;
        apart &= unit >= next;
        next = unit + n;
      }
    }
    for (u32 m = apart ? 0 : mask; m; m &= m - 1) {
      const u32 l = __builtin_ctz(m);
      shadow.check_writes(offset[l] / 2, n, l, by);
    }
    for (u32 m = mask; m; m &= m - 1) {
      const u32 l = __builtin_ctz(m);
      shadow.write(offset[l] / 2, n, l, by);
    }
  } else {
    for (u32 m = mask; m; m &= m - 1) {
      const u32 l = __builtin_ctz(m);
      shadow.read(offset[l] / 2, n, l, by);
    }
  }
}

void check_shadow(Warp& w, const u32* offset, u32 mask, u32 bytes, bool write, i32 line) {
  Shadow& shadow = w.cta->shadow;
  const Accessor by = w.cta->generic(w, line);
  switch (bytes) {
    case 1:
    case 2: return shadow_lanes<1>(shadow, offset, mask, by, write, 1);
    case 4: return shadow_lanes<2>(shadow, offset, mask, by, write, 2);
    case 8: return shadow_lanes<4>(shadow, offset, mask, by, write, 4);
    case 16: return shadow_lanes<8>(shadow, offset, mask, by, write, 8);
    default: return shadow_lanes<0>(shadow, offset, mask, by, write, bytes / 2);
  }
}

NOINLINE void bad_shared(const Warp& w, const u32* address, u32 mask, u32 bytes) {
  const u32 size = static_cast<u32>(w.cta->launch->view.shared_bytes);
  for (u32 m = mask; m; m &= m - 1) {
    const u32 a = address[__builtin_ctz(m)];
    if (a & (bytes - 1)) misaligned(a, bytes);
    w.cta->shared_address(a, bytes, "access");
  }
  fail(Kind::bounds, "shared access beyond %u bytes", size);
}

}  // namespace

void access_shared(Warp& w, const Instruction& i, u32 mask, bool write) {
  Cta& cta = *w.cta;
  const u32 bytes = static_cast<u32>(i.size) * i.count,
            size = static_cast<u32>(cta.launch->view.shared_bytes);
  const u32* base = w.reg<u32>(i.a);
  u32 address[LANES], offset[LANES], odd = 0, beyond = 0;
  const u32 spare = base[__builtin_ctz(mask)] + static_cast<u32>(i.imm);
  for (int l = 0; l < LANES; l++) {
    const u32 a = mask >> l & 1 ? base[l] + static_cast<u32>(i.imm) : spare;
    address[l] = a;
    offset[l] = a - SHARED_BASE;
    odd |= a;
    beyond |= offset[l] > size || bytes > size - offset[l];
  }
  if ((odd & (bytes - 1)) || beyond) bad_shared(w, address, mask, bytes);
  bool one_place = mask & (mask - 1);  // several lanes read the same bytes
  for (int l = 1; l < LANES; l++) one_place &= offset[l] == offset[0];
  if (one_place && !write) {
    cta.shadow.read(offset[0] / 2, (bytes + 1) / 2, SEVERAL_LANES, cta.generic(w, i.line));
  } else {
    check_shadow(w, offset, mask, bytes, write, i.line);
  }
  if (bytes == 4 && mask == FULL && i.count == 1 && consecutive(offset)) {
    const i32 to = cta.launch->program.operands[i.list];
    if (write) {
      std::memcpy(cta.shared + offset[0], w.reg<u32>(to), 4 * LANES);
    } else if (to != NONE) {
      std::memcpy(w.reg<u32>(to), cta.shared + offset[0], 4 * LANES);
    }
    return;
  }
  u8* places[LANES];
  for (int l = 0; l < LANES; l++) places[l] = cta.shared + offset[l];
  move(w, i, places, mask, write);
}

void atomic(Warp& w, const Instruction& i, u32 mask) {
  Launch& launch = *w.cta->launch;
  const u64* base = w.reg<u64>(i.a);
  const bool early = !w.vc[w.cta->entities.dependency];
  u64 address[LANES];
  u8* places[LANES];
  for (u32 m = mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    address[l] = base[l] + i.imm;
  }
  resolve_global(w, address, mask, 4, true, early, places);
  u32 old[LANES];
  for (u32 m = mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    if (early) launch.check_global(address[l], 4, false, true);
    u32 value;
    std::memcpy(&value, places[l], 4);
    old[l] = value;
    const u32 operand = w.reg<u32>(i.b)[l];
    if (i.op == static_cast<i32>(Op::ATOM_ADD)) {
      value += operand;
    } else if (i.op == static_cast<i32>(Op::ATOM_EXCH)) {
      value = operand;
    } else if (value == operand) {
      value = w.reg<u32>(i.c)[l];
    }
    std::memcpy(places[l], &value, 4);
  }
  if (i.dst == NONE) return;
  for (u32 m = mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    w.reg<u32>(i.dst)[l] = old[l];
  }
}

// Matrices of 8 x 8 elements of 2 bytes: lane 8 j + r has the address of row r of matrix j.
void matrix(Warp& w, const Instruction& i, u32 mask, bool write) {
  (void)mask;
  Cta& cta = *w.cta;
  const i32* list = cta.launch->program.operands + i.list;
  const u32 rows = 8 * i.count, size = static_cast<u32>(cta.launch->view.shared_bytes);
  u32 address[LANES], offset[LANES];
  bool good = true;
  for (u32 l = 0; l < rows; l++) {
    address[l] = w.reg<u32>(i.a)[l] + static_cast<u32>(i.imm);
    offset[l] = address[l] - SHARED_BASE;
    good &= !(address[l] & 15) && offset[l] <= size && 16 <= size - offset[l];
  }
  const u32 lanes = rows == LANES ? FULL : (1u << rows) - 1;
  if (!good) bad_shared(w, address, lanes, 16);
  check_shadow(w, offset, lanes, 16, write, i.line);
  for (int j = 0; j < i.count; j++) {
    u16* fragment = w.reg<u16>(list[j]);  // lane l: elements 2 l and 2 l + 1 of the matrix by rows
    if (list[j] == NONE) continue;
    for (int row = 0; row < 8; row++) {
      u16 line[8];
      u8* place = cta.shared + offset[8 * j + row];
      if (!write) std::memcpy(line, place, 16);
      for (int column = 0; column < 8; column++) {
        const int at = i.size ? 8 * column + row : 8 * row + column;
        if (write) {
          line[column] = fragment[at];
        } else {
          fragment[at] = line[column];
        }
      }
      if (write) std::memcpy(place, line, 16);
    }
  }
}

}  // namespace emulator
