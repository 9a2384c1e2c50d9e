// Barriers, mbarriers and the proxy fence.
#include "cta.h"

namespace emulator {

// The offset of a shared address whose bytes must lie in shared memory.
u32 Cta::shared_address(u32 address, u32 bytes, const char* what) const {
  const u32 offset = address - SHARED_BASE, size = static_cast<u32>(launch->view.shared_bytes);
  if (offset > size || bytes > size - offset)
    fail(Kind::bounds, "shared %s of %u bytes at 0x%x, outside [0x%x, 0x%x)", what, bytes, address,
         SHARED_BASE, SHARED_BASE + size);
  return offset;
}

u32 Cta::mbarrier_index(u32 address) {
  const u32 offset = address - SHARED_BASE;
  if (offset % 8 == 0 && offset / 8 < mbarrier_at.size()) {
    const u32 index = mbarrier_at[offset / 8];
    if (index && mbarriers[index - 1].live) return index - 1;
  }
  fail(Kind::barrier, "no mbarrier is initialised at 0x%x", address);
}

void Cta::mbarrier_init(const Warp& w, u32 address, i64 count) {
  if (address % 8) fail(Kind::misaligned, "mbarrier at 0x%x", address);
  const u32 offset = shared_address(address, 8, "mbarrier");
  if (count <= 0) fail(Kind::barrier, "mbarrier for %lld arrivals", static_cast<long long>(count));
  u16& at = mbarrier_at[offset / 8];
  if (!at) {
    if (mbarrier_count == mbarriers.size()) mbarriers.emplace_back();
    mbarriers[mbarrier_count].entity = -1;
    if (mbarrier_count >= 4096) fail(Kind::unsupported, "more than 4096 mbarriers");
    at = static_cast<u16>(++mbarrier_count);
  }
  Mbarrier& b = mbarriers[at - 1];
  b.address = address;
  b.live = true;
  b.shown = false;
  b.maker = w.index;
  b.made = clock[w.index];
  b.count = b.pending = count;
  b.tx = 0;
  b.phase = 0;
  b.released.resize(entities.size);
  b.done.resize(entities.size);
  clear_vector(b.released.data());
  clear_vector(b.done.data());
}

void Cta::mbarrier_inval(u32 address) { mbarriers[mbarrier_index(address)].live = false; }

// Show the mbarriers that a warp made to asynchronous copies.
void Cta::show_mbarriers(const Warp& w) {
  for (size_t k = 0; k < mbarrier_count; k++) mbarriers[k].shown |= mbarriers[k].maker == w.index;
}

// The mbarrier that a copy completes on; a fence must have followed its initialisation.
u32 Cta::mbarrier_of_copy(const Warp& w, u32 address) {
  const u32 index = mbarrier_index(address);
  const Mbarrier& b = mbarriers[index];
  if (!b.shown && w.vc[entities.visible(b.maker)] < b.made)
    fail(Kind::proxy,
         "a copy completes on the mbarrier at 0x%x, with no fence.mbarrier_init nor fence.proxy.async since "
         "it was initialised",
         address);
  return index;
}

void Cta::mbarrier_check(Mbarrier& b) {
  if (b.pending || b.tx) return;
  b.phase++;
  b.pending = b.count;
  b.done = b.released;
}

void Cta::mbarrier_arrive(Mbarrier& b, i64 arrivals) {
  b.pending -= arrivals;
  if (b.pending < 0)
    fail(Kind::barrier, "more arrivals at the mbarrier at 0x%x than its count of %lld", b.address,
         static_cast<long long>(b.count));
  mbarrier_check(b);
}

// The entity of copies that complete on an mbarrier.
u32 Cta::copy_entity(Mbarrier& b) {
  if (b.entity < 0) {
    if (copy_barriers == COPY_BARRIERS)
      fail(Kind::unsupported, "copies that complete on more than %d mbarriers", COPY_BARRIERS);
    b.entity = entities.barriers + copy_barriers++;
  }
  return b.entity;
}

// Arrive, once; returns whether the warp may go on.
bool Cta::barrier_arrive(Warp& w, i64 number, u32 count, bool wait) {
  if (w.barrier == AtBarrier::waiting) return false;
  if (w.barrier == AtBarrier::released) {
    w.barrier = AtBarrier::no;
    return true;
  }
  if (number < 0 || number >= 16) fail(Kind::barrier, "barrier number %lld", static_cast<long long>(number));
  Barrier& b = barriers[number];
  const u32 needed = count ? count : LANES * warp_count;
  if (b.arrived && b.needed != needed)
    fail(Kind::barrier, "barrier %lld for %u threads, but earlier arrivals were for %u",
         static_cast<long long>(number), needed, b.needed);
  if (!b.arrived) {
    b.released.resize(entities.size);
    clear_vector(b.released.data());
  }
  b.needed = needed;
  b.arrived += LANES;
  if (b.arrived > needed)
    fail(Kind::barrier, "barrier %lld: %u threads arrived where %u were expected",
         static_cast<long long>(number), b.arrived, needed);
  release(w, b.released.data());
  if (wait) {
    w.barrier = AtBarrier::waiting;
    b.waiting |= 1ull << w.index;
  }
  if (b.arrived < needed) return !wait;
  for (u64 m = b.waiting; m; m &= m - 1) {
    Warp& other = *warps[__builtin_ctzll(m)];
    join(other.vc, b.released.data(), entities.size);
    other.barrier = AtBarrier::released;
  }
  b.arrived = 0;
  b.waiting = 0;
  if (wait) w.barrier = AtBarrier::no;
  return true;
}

void Cta::fence_proxy(Warp& w) {
  for (int x = 0; x < warp_count; x++) {
    const u32 seen = x == w.index ? clock[x] : w.vc[x];
    u32& visible = w.vc[entities.visible(x)];
    visible = std::max(visible, seen);
  }
  bump(w);
}

}  // namespace emulator
