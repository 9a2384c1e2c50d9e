// The uncommon paths of the shadow of shared memory, and its messages.
#include "shadow.h"

namespace emulator {

// Add a reader to a unit: one record per entity, the newest clock.
void Shadow::record(u32 u, u64 mine, const Accessor& by) {
  const u32 entity = Record::entity(mine), clock = Record::clock(mine);
  const auto merge = [&](u64& slot) {
    if (Record::clock(slot) < clock) {
      slot = mine;
    } else if (Record::clock(slot) == clock && Record::lane(slot) != Record::lane(mine)) {
      slot = Record::make(clock, entity, SEVERAL_LANES);
    }
  };
  u64& first = reader_[u];
  if (Record::clock(first) <= by.base || Record::entity(first) == entity) {
    merge(first);
    return;
  }
  u32 stale = 0;
  for (u32 at = more_[u]; at; at = nodes_[at].next) {
    if (Record::entity(nodes_[at].record) == entity) {
      merge(nodes_[at].record);
      return;
    }
    if (Record::clock(nodes_[at].record) <= by.base) stale = at;
  }
  if (stale) {
    nodes_[stale].record = mine;
    return;
  }
  u32 at = free_;
  if (at) {
    free_ = nodes_[at].next;
  } else {
    at = static_cast<u32>(nodes_.size());
    nodes_.push_back(Node{0, 0});
  }
  nodes_[at] = Node{mine, more_[u]};
  more_[u] = at;
}

void Shadow::forget_more(u32 u) {
  while (const u32 at = more_[u]) {
    more_[u] = nodes_[at].next;
    nodes_[at].next = free_;
    free_ = at;
  }
}

NOINLINE void Shadow::read_slowly(u32 u, u32 n, u32 lane, const Accessor& by) {
  const u64 mine = Record::make(by.clock, by.entity, lane);
  for (u32 i = u; i < u + n; i++) {
    if (!ordered(writer_[i], lane, by)) race_read(i, writer_[i], lane, by);
    record(i, mine, by);
  }
}

NOINLINE void Shadow::write_slowly(u32 u, u32 n, u32 lane, const Accessor& by) {
  for (u32 i = u; i < u + n; i++) {
    const u64 w = writer_[i];
    if (Record::entity(w) != by.entity && by.view[Record::entity(w)] < Record::clock(w)) race_write(i, w, lane, by);
    if (!ordered(reader_[i], lane, by)) race_after_read(i, reader_[i], lane, by);
    for (u32 at = more_[i]; at; at = nodes_[at].next)
      if (!ordered(nodes_[at].record, lane, by)) race_after_read(i, nodes_[at].record, lane, by);
    writer_[i] = Record::make(by.clock, by.entity, lane);
    reader_[i] = 0;
    line_[i] = by.line;
    forget_more(i);
  }
}

NOINLINE void Shadow::write_async_slowly(u32 u, u32 n, const Accessor& by) {
  const auto before = [&](u64 r) { return by.view[Record::entity(r)] >= Record::clock(r); };
  for (u32 i = u; i < u + n; i++) {
    if (!before(writer_[i])) race_write(i, writer_[i], ASYNC_LANE, by);
    if (!before(reader_[i])) race_after_read(i, reader_[i], ASYNC_LANE, by);
    for (u32 at = more_[i]; at; at = nodes_[at].next)
      if (!before(nodes_[at].record)) race_after_read(i, nodes_[at].record, ASYNC_LANE, by);
    writer_[i] = Record::make(by.clock, by.entity, ASYNC_LANE);
    reader_[i] = 0;
    line_[i] = by.line;
    forget_more(i);
  }
}

std::string Shadow::who(u64 record) const {
  const int entity = static_cast<int>(Record::entity(record)), lane = static_cast<int>(Record::lane(record));
  const Entities e(warps_);
  char text[96];
  const int warp = entity % warps_;
  if (entity >= e.barriers) {
    snprintf(text, sizeof text, "a copy to shared memory");
  } else if (entity == e.tensor_core) {
    snprintf(text, sizeof text, "a tcgen05.mma");
  } else if (entity >= e.copies(0)) {
    snprintf(text, sizeof text, "a cp.async of warp %d", warp);
  } else if (entity >= e.warpgroup(0)) {
    snprintf(text, sizeof text, "a wgmma of warp %d", warp);
  } else if (entity >= e.bulk_stores(0)) {
    snprintf(text, sizeof text, "a bulk store of warp %d", warp);
  } else if (lane == static_cast<int>(SEVERAL_LANES)) {
    snprintf(text, sizeof text, "several lanes of warp %d", warp);
  } else {
    snprintf(text, sizeof text, "warp %d lane %d", warp, lane);
  }
  return text;
}

void Shadow::race_read(u32 u, u64 writer, u32 lane, const Accessor& by) const {
  fail(Kind::race, "shared address 0x%x (+%u): read by %s of what %s wrote at PTX line %d, with nothing in between that orders them",
       SHARED_BASE + 2 * u, 2 * u, who(Record::make(by.clock, by.entity, lane)).c_str(), who(writer).c_str(), line_[u]);
}

void Shadow::race_write(u32 u, u64 writer, u32 lane, const Accessor& by) const {
  fail(Kind::race, "shared address 0x%x (+%u): written by %s over what %s wrote at PTX line %d, with nothing in between that orders them",
       SHARED_BASE + 2 * u, 2 * u, who(Record::make(by.clock, by.entity, lane)).c_str(), who(writer).c_str(), line_[u]);
}

void Shadow::race_after_read(u32 u, u64 reader, u32 lane, const Accessor& by) const {
  fail(Kind::race, "shared address 0x%x (+%u): written by %s though %s reads it, with nothing in between that orders them",
       SHARED_BASE + 2 * u, 2 * u, who(Record::make(by.clock, by.entity, lane)).c_str(), who(reader).c_str());
}

void Shadow::missing_fence(u32 u, const Accessor& by) const {
  fail(Kind::proxy, "shared address 0x%x (+%u): %s reads what %s wrote at PTX line %d, with no fence.proxy.async in between",
       SHARED_BASE + 2 * u, 2 * u, who(Record::make(by.clock, by.entity, ASYNC_LANE)).c_str(), who(writer_[u]).c_str(), line_[u]);
}

}  // namespace emulator
