// Vector clocks and the shadow of shared memory, which together find accesses that nothing orders.
//
// Clocks only ever grow, also from one CTA to the next in the same buffers: a CTA starts with
// every clock at `base`, which no older record exceeds, so nothing has to be cleared.
#pragma once
#include "types.h"

namespace emulator {

constexpr int COPY_BARRIERS = 64;
constexpr u32 SEVERAL_LANES = 254, ASYNC_LANE = 255;

// Places of entities in a clock vector, for a CTA of `warps` warps.
struct Entities {
  int warps = 0;
  int size = 0;
  int tensor_core = 0;
  int dependency = 0;
  int barriers = 0;

  explicit Entities(int w = 0) : warps(w), tensor_core(6 * w), dependency(6 * w + 1), barriers(6 * w + 2) {
    size = (barriers + COPY_BARRIERS + 15) / 16 * 16;
  }
  int visible(int w) const { return warps + w; }
  int tensor_loads(int w) const { return 2 * warps + w; }
  int bulk_stores(int w) const { return 3 * warps + w; }
  int warpgroup(int w) const { return 4 * warps + w; }
  int copies(int w) const { return 5 * warps + w; }
};

ALWAYS_INLINE void join(u32* to, const u32* from, int n) {
  for (int i = 0; i < n; i++) to[i] = std::max(to[i], from[i]);
}

// One access: clock, entity, lane.
struct Record {
  static u64 make(u32 clock, u32 entity, u32 lane) {
    return static_cast<u64>(clock) << 32 | entity << 16 | lane << 8;
  }
  static u32 clock(u64 r) { return static_cast<u32>(r >> 32); }
  static u32 entity(u64 r) { return r >> 16 & 0xFFFF; }
  static u32 lane(u64 r) { return r >> 8 & 255; }
};

// What an access is checked against: its clocks, who makes it, and its own clock.
struct Accessor {
  const u32* view;  // generic: own entry one below the warp's clock; async: the warp's clock at issue
  u32 entity;
  u32 clock;
  u32 base;
  i32 line;
};

class Shadow {
 public:
  // Make room for `bytes` of shared memory; records of another number of warps are dropped.
  void prepare(size_t bytes, int warps, bool clear) {
    const size_t units = (bytes + 1) / 2 + 8;
    if (clear || units > units_ || warps != warps_) {
      units_ = std::max(units, units_);
      warps_ = warps;
      writer_ = reinterpret_cast<u64*>(store_[0].need(units_ * 8));
      reader_ = reinterpret_cast<u64*>(store_[1].need(units_ * 8));
      more_ = reinterpret_cast<u32*>(store_[2].need(units_ * 4));
      line_ = reinterpret_cast<i32*>(store_[3].need(units_ * 4));
      std::memset(writer_, 0, units_ * 8);
      std::memset(reader_, 0, units_ * 8);
      std::memset(more_, 0, units_ * 4);
      std::memset(line_, 0, units_ * 4);
      nodes_.assign(1, Node{0, 0});
      free_ = 0;
    }
  }

  // Units [u, u + n) are read or written by one lane of a warp; throws a race.
  ALWAYS_INLINE void read(u32 u, u32 n, u32 lane, const Accessor& by) {
    const u64 w = writer_[u], r = reader_[u];
    if (uniform(u, n, w, r)) {
      if (!ordered(w, lane, by)) race_read(u, w, lane, by);
      const u64 mine = Record::make(by.clock, by.entity, lane);
      if (r == mine) return;
      const u32 entity = Record::entity(r), clock = Record::clock(r);
      u64 now = mine;
      if (entity == by.entity) {
        if (clock == by.clock) {
          now = Record::make(by.clock, by.entity, SEVERAL_LANES);
          if (now == r) return;
        }
      } else if (by.view[entity] < clock) {
        read_slowly(u, n, lane, by);
        return;
      }
      for (u32 i = 0; i < n; i++) reader_[u + i] = now;
    } else {
      read_slowly(u, n, lane, by);
    }
  }

  ALWAYS_INLINE void write(u32 u, u32 n, u32 lane, const Accessor& by) {
    const u64 w = writer_[u], r = reader_[u];
    const u64 mine = Record::make(by.clock, by.entity, lane);
    if (uniform(u, n, w, r)) {
      if (Record::entity(w) != by.entity && by.view[Record::entity(w)] < Record::clock(w)) race_write(u, w, lane, by);
      if (!ordered(r, lane, by)) race_after_read(u, r, lane, by);
      if (w != mine)
        for (u32 i = 0; i < n; i++) writer_[u + i] = mine;
      if (r)
        for (u32 i = 0; i < n; i++) reader_[u + i] = 0;
      for (u32 i = 0; i < n; i++) line_[u + i] = by.line;
    } else {
      write_slowly(u, n, lane, by);
    }
  }

  // The first faults of an async read; a race counts before a missing proxy fence.
  struct AsyncFaults {
    i64 race = -1;
    i64 proxy = -1;
  };

  // Async accesses in runs whose units mostly agree (16 bytes).
  ALWAYS_INLINE void read_async(u32 u, u32 n, const Accessor& by, AsyncFaults& faults) {
    const u64 w = writer_[u], r = reader_[u];
    const u64 mine = Record::make(by.clock, by.entity, ASYNC_LANE);
    if (uniform(u, n, w, r)) {
      check_async_read(u, w, by, faults);
      if (r == mine) return;
      if (Record::clock(r) <= by.base || (Record::entity(r) == by.entity && Record::clock(r) < by.clock)) {
        for (u32 i = 0; i < n; i++) reader_[u + i] = mine;
        return;
      }
    } else {
      for (u32 i = 0; i < n; i++) check_async_read(u + i, writer_[u + i], by, faults);
    }
    for (u32 i = 0; i < n; i++) record(u + i, mine, by);
  }

  void report(const AsyncFaults& faults, const Accessor& by) {
    if (faults.race >= 0) race_read(static_cast<u32>(faults.race), writer_[faults.race], ASYNC_LANE, by);
    if (faults.proxy >= 0) missing_fence(static_cast<u32>(faults.proxy), by);
  }

  ALWAYS_INLINE void write_async(u32 u, u32 n, const Accessor& by) {
    const u64 w = writer_[u], r = reader_[u];
    const u64 mine = Record::make(by.clock, by.entity, ASYNC_LANE);
    if (uniform(u, n, w, r)) {
      if (by.view[Record::entity(w)] < Record::clock(w)) race_write(u, w, ASYNC_LANE, by);
      if (by.view[Record::entity(r)] < Record::clock(r)) race_after_read(u, r, ASYNC_LANE, by);
      for (u32 i = 0; i < n; i++) writer_[u + i] = mine;
      for (u32 i = 0; i < n; i++) reader_[u + i] = 0;
      for (u32 i = 0; i < n; i++) line_[u + i] = by.line;
    } else {
      write_async_slowly(u, n, by);
    }
  }

 private:
  // Further readers of a unit, a list by index; 0 ends it.
  struct Node {
    u64 record;
    u32 next;
  };

  ALWAYS_INLINE bool uniform(u32 u, u32 n, u64 w, u64 r) const {
    u64 different = more_[u];
    for (u32 i = 1; i < n; i++) different |= (writer_[u + i] ^ w) | (reader_[u + i] ^ r) | more_[u + i];
    return !different;
  }

  // Whether what `r` did comes before a generic access, or was done by the same lane.
  ALWAYS_INLINE static bool ordered(u64 r, u32 lane, const Accessor& by) {
    const u32 entity = Record::entity(r);
    return by.view[entity] >= Record::clock(r) || (entity == by.entity && Record::lane(r) == lane);
  }

  ALWAYS_INLINE void check_async_read(u32 u, u64 w, const Accessor& by, AsyncFaults& faults) const {
    const u32 entity = Record::entity(w), clock = Record::clock(w);
    if (by.view[entity] < clock) {
      if (faults.race < 0) faults.race = u;
    } else if (entity < static_cast<u32>(warps_) && by.view[warps_ + entity] < clock) {
      if (faults.proxy < 0) faults.proxy = u;
    }
  }

  void read_slowly(u32 u, u32 n, u32 lane, const Accessor& by);
  void write_slowly(u32 u, u32 n, u32 lane, const Accessor& by);
  void write_async_slowly(u32 u, u32 n, const Accessor& by);
  void record(u32 u, u64 mine, const Accessor& by);
  void forget_more(u32 u);
  std::string who(u64 record) const;
  [[noreturn]] void race_read(u32 u, u64 writer, u32 lane, const Accessor& by) const;
  [[noreturn]] void race_write(u32 u, u64 writer, u32 lane, const Accessor& by) const;
  [[noreturn]] void race_after_read(u32 u, u64 reader, u32 lane, const Accessor& by) const;
  [[noreturn]] void missing_fence(u32 u, const Accessor& by) const;

  u64* writer_ = nullptr;  // last writer of each unit
  u64* reader_ = nullptr;  // a reader since then
  u32* more_ = nullptr;    // list of further readers
  i32* line_ = nullptr;    // PTX line of the last writer
  Buffer store_[4];
  std::vector<Node> nodes_;
  u32 free_ = 0;
  size_t units_ = 0;
  int warps_ = 0;
};

}  // namespace emulator
