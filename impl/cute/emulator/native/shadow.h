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
  // Called with every older record at or below the base of the CTA that starts, or `clear`.
  void prepare(size_t bytes, int warps, bool clear);

  // Units [u, u + n) are read or written by one lane of a warp; throws a race.
  ALWAYS_INLINE void read(u32 u, u32 n, u32 lane, const Accessor& by) {
    const u64 w = writer_[u], r = reader_[u];
    const u32 more = more_[u];
    if (n > 1 && !uniform(u, n, w, r, more)) {
      read_one_by_one(u, n, lane, by);
      return;
    }
    if (!ordered(w, lane, by)) race_read(u, w, lane, by);
    const u64 mine = Record::make(by.clock, by.entity, lane);
    if (r == mine) return;
    const u32 entity = Record::entity(r), clock = Record::clock(r);
    u64 now = mine;
    if (entity == by.entity && clock == by.clock) {
      now = Record::make(by.clock, by.entity, SEVERAL_LANES);
      if (now == r) return;
    } else if (entity != by.entity && (by.view[entity] < clock || (more && clock > by.base))) {
      // A reader that nothing orders before this one stays. (One that comes before it need not:
      // whoever comes after this read comes after that one too.)
      add(u, n, r, more, mine, by.base);
      return;
    }
    for (u32 i = 0; i < n; i++) reader_[u + i] = now;
    if (more && clock <= by.base)
      for (u32 i = 0; i < n; i++) more_[u + i] = 0;
  }

  ALWAYS_INLINE void write(u32 u, u32 n, u32 lane, const Accessor& by) {
    const u64 w = writer_[u], r = reader_[u];
    const u32 more = more_[u];
    if (n > 1 && !uniform(u, n, w, r, more)) {
      write_one_by_one(u, n, lane, by);
      return;
    }
    check_write(u, w, r, more, lane, by);
    written(u, n, r, more, Record::make(by.clock, by.entity, lane), by.line);
  }

  // The checks of a write alone, for stores whose lanes share units: none may hide what another
  // one overwrites.
  void check_writes(u32 u, u32 n, u32 lane, const Accessor& by) const {
    for (u32 i = u; i < u + n; i++) check_write(i, writer_[i], reader_[i], more_[i], lane, by);
  }

  // The first faults of an async read; a race counts before a missing proxy fence.
  struct AsyncFaults {
    i64 race = -1;
    i64 proxy = -1;
  };

  ALWAYS_INLINE void read_async(u32 u, u32 n, const Accessor& by, AsyncFaults& faults) {
    const u64 w = writer_[u], r = reader_[u];
    const u32 more = more_[u];
    if (n > 1 && !uniform(u, n, w, r, more)) {
      for (u32 i = 0; i < n; i++) read_async_one(u + i, by, faults);
      return;
    }
    check_async_read(u, w, by, faults);
    const u64 mine = Record::make(by.clock, by.entity, ASYNC_LANE);
    if (r != mine) add(u, n, r, more, mine, by.base);
  }

  void report(const AsyncFaults& faults, const Accessor& by) {
    if (faults.race >= 0) race_read(static_cast<u32>(faults.race), writer_[faults.race], ASYNC_LANE, by);
    if (faults.proxy >= 0) missing_fence(static_cast<u32>(faults.proxy), by);
  }

  // An operation may write a place twice (lanes of one cp.async).
  ALWAYS_INLINE void write_async(u32 u, u32 n, const Accessor& by) {
    const u64 w = writer_[u], r = reader_[u];
    const u32 more = more_[u];
    if (n > 1 && !uniform(u, n, w, r, more)) {
      for (u32 i = 0; i < n; i++) write_async_one(u + i, by);
      return;
    }
    const u64 mine = Record::make(by.clock, by.entity, ASYNC_LANE);
    const auto before = [&](u64 x) { return by.view[Record::entity(x)] >= Record::clock(x); };
    if (w != mine && !before(w)) race_write(u, w, ASYNC_LANE, by);
    if (!before(r)) race_after_read(u, r, ASYNC_LANE, by);
    if (more && Record::clock(r) > by.base)
      for (u32 at = more; at; at = nodes_[at].next)
        if (!before(nodes_[at].record)) race_after_read(u, nodes_[at].record, ASYNC_LANE, by);
    written(u, n, r, more, mine, by.line);
  }

 private:
  // Further readers of a unit: a list that is never changed, so that units share it; 0 ends it.
  // It counts only while the first reader's record is above the base. `next` is a smaller index.
  struct Node {
    u64 record;
    u32 next;
  };
  struct Readers {
    u64 first;
    u32 more;
  };

  ALWAYS_INLINE bool uniform(u32 u, u32 n, u64 w, u64 r, u32 more) const {
    u64 different = 0;
    for (u32 i = 1; i < n; i++)
      different |= (writer_[u + i] ^ w) | (reader_[u + i] ^ r) | (more_[u + i] ^ more);
    return !different;
  }

  // Whether what `r` did comes before a generic access, or was done by the same lane.
  ALWAYS_INLINE static bool ordered(u64 r, u32 lane, const Accessor& by) {
    const u32 entity = Record::entity(r);
    return by.view[entity] >= Record::clock(r) || (entity == by.entity && Record::lane(r) == lane);
  }

  ALWAYS_INLINE void check_write(u32 u, u64 w, u64 r, u32 more, u32 lane, const Accessor& by) const {
    if (Record::entity(w) != by.entity && by.view[Record::entity(w)] < Record::clock(w))
      race_write(u, w, lane, by);
    if (!ordered(r, lane, by)) race_after_read(u, r, lane, by);
    if (more && Record::clock(r) > by.base)
      for (u32 at = more; at; at = nodes_[at].next)
        if (!ordered(nodes_[at].record, lane, by)) race_after_read(u, nodes_[at].record, lane, by);
  }

  ALWAYS_INLINE void check_async_read(u32 u, u64 w, const Accessor& by, AsyncFaults& faults) const {
    const u32 entity = Record::entity(w), clock = Record::clock(w);
    if (by.view[entity] < clock) {
      if (faults.race < 0) faults.race = u;
    } else if (entity < static_cast<u32>(warps_) && by.view[warps_ + entity] < clock) {
      if (faults.proxy < 0) faults.proxy = u;
    }
  }

  ALWAYS_INLINE void written(u32 u, u32 n, u64 r, u32 more, u64 mine, i32 line) {
    for (u32 i = 0; i < n; i++) writer_[u + i] = mine;
    for (u32 i = 0; i < n; i++) line_[u + i] = line;
    if (r)
      for (u32 i = 0; i < n; i++) reader_[u + i] = 0;
    if (more)
      for (u32 i = 0; i < n; i++) more_[u + i] = 0;
  }

  // Add a reader to units that agree. The same change often comes for many units in a row.
  ALWAYS_INLINE void add(u32 u, u32 n, u64 r, u32 more, u64 mine, u32 base) {
    if (r != last_.first || more != last_.more || mine != last_mine_) {
      last_ = {r, more};
      last_mine_ = mine;
      last_result_ = with_reader(r, more, mine, base);
    }
    const Readers result = last_result_;
    for (u32 i = 0; i < n; i++) reader_[u + i] = result.first;
    if (result.more != more)
      for (u32 i = 0; i < n; i++) more_[u + i] = result.more;
  }

  Readers with_reader(u64 r, u32 more, u64 mine, u32 base);
  void compact(u32 base);
  void read_one_by_one(u32 u, u32 n, u32 lane, const Accessor& by);
  void write_one_by_one(u32 u, u32 n, u32 lane, const Accessor& by);
  void read_async_one(u32 u, const Accessor& by, AsyncFaults& faults);
  void write_async_one(u32 u, const Accessor& by);
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
  size_t most_nodes_ = 1 << 20;
  Readers last_ = {0, 0}, last_result_ = {0, 0};
  u64 last_mine_ = 0;
  size_t units_ = 0;
  int warps_ = 0;
};

}  // namespace emulator
