// The uncommon paths of the shadow of shared memory, and its messages.
#include "shadow.h"

namespace emulator {

void Shadow::prepare(size_t bytes, int warps, bool clear) {
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
  }
  nodes_.assign(1, Node{0, 0});
  last_mine_ = 0;
}

// Readers with one more record: one an entity, the newest clock.
NOINLINE Shadow::Readers Shadow::with_reader(u64 r, u32 more, u64 mine, u32 base) {
  const u32 entity = Record::entity(mine), clock = Record::clock(mine);
  const auto merged = [&](u64 old) {
    if (Record::clock(old) < clock) return mine;
    const bool other = Record::clock(old) == clock && Record::lane(old) != Record::lane(mine);
    return other ? Record::make(clock, entity, SEVERAL_LANES) : old;
  };
  if (Record::clock(r) <= base) return {mine, 0};
  if (Record::entity(r) == entity) return {merged(r), more};
  u64 before[6 * 64 + 2 + COPY_BARRIERS];
  u32 count = 0, at = more;
  while (at && Record::entity(nodes_[at].record) != entity) {
    before[count++] = nodes_[at].record;
    at = nodes_[at].next;
  }
  if (!at) {
    nodes_.push_back(Node{mine, more});
  } else {
    const u64 now = merged(nodes_[at].record);
    if (now == nodes_[at].record) return {r, more};
    nodes_.push_back(Node{now, nodes_[at].next});
    while (count) nodes_.push_back(Node{before[--count], static_cast<u32>(nodes_.size() - 1)});
  }
  const u32 result = static_cast<u32>(nodes_.size() - 1);
  if (nodes_.size() < most_nodes_) return {r, result};
  // Keep the new list through the clean-up by lending it to a spare unit.
  more_[units_ - 1] = result;
  reader_[units_ - 1] = r;
  compact(base);
  return {r, more_[units_ - 1]};
}

// Drop lists that no unit has.
void Shadow::compact(u32 base) {
  std::vector<u32> to(nodes_.size(), 0);
  const auto counts = [&](size_t u) { return more_[u] && Record::clock(reader_[u]) > base; };
  for (size_t u = 0; u < units_; u++)
    if (counts(u))
      for (u32 at = more_[u]; at && !to[at]; at = nodes_[at].next) to[at] = 1;
  u32 kept = 1;
  for (u32 at = 1; at < to.size(); at++)
    if (to[at]) {
      nodes_[kept] = Node{nodes_[at].record, to[nodes_[at].next]};
      to[at] = kept++;
    }
  nodes_.resize(kept);
  for (size_t u = 0; u < units_; u++) more_[u] = counts(u) ? to[more_[u]] : 0;
  most_nodes_ = std::max<size_t>(1 << 20, 2 * nodes_.size());
}

NOINLINE void Shadow::read_one_by_one(u32 u, u32 n, u32 lane, const Accessor& by) {
  for (u32 i = u; i < u + n; i++) read(i, 1, lane, by);
}

NOINLINE void Shadow::write_one_by_one(u32 u, u32 n, u32 lane, const Accessor& by) {
  for (u32 i = u; i < u + n; i++) write(i, 1, lane, by);
}

NOINLINE void Shadow::read_async_one(u32 u, const Accessor& by, AsyncFaults& faults) {
  read_async(u, 1, by, faults);
}

NOINLINE void Shadow::write_async_one(u32 u, const Accessor& by) { write_async(u, 1, by); }

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
  fail(Kind::race,
       "shared address 0x%x (+%u): read by %s of what %s wrote at PTX line %d, with nothing in between that "
       "orders them",
       SHARED_BASE + 2 * u, 2 * u, who(Record::make(by.clock, by.entity, lane)).c_str(), who(writer).c_str(),
       line_[u]);
}

void Shadow::race_write(u32 u, u64 writer, u32 lane, const Accessor& by) const {
  fail(Kind::race,
       "shared address 0x%x (+%u): written by %s over what %s wrote at PTX line %d, with nothing in between "
       "that orders them",
       SHARED_BASE + 2 * u, 2 * u, who(Record::make(by.clock, by.entity, lane)).c_str(), who(writer).c_str(),
       line_[u]);
}

void Shadow::race_after_read(u32 u, u64 reader, u32 lane, const Accessor& by) const {
  fail(
      Kind::race,
      "shared address 0x%x (+%u): written by %s though %s reads it, with nothing in between that orders them",
      SHARED_BASE + 2 * u, 2 * u, who(Record::make(by.clock, by.entity, lane)).c_str(), who(reader).c_str());
}

void Shadow::missing_fence(u32 u, const Accessor& by) const {
  fail(Kind::proxy,
       "shared address 0x%x (+%u): %s reads what %s wrote at PTX line %d, with no fence.proxy.async in "
       "between",
       SHARED_BASE + 2 * u, 2 * u, who(Record::make(by.clock, by.entity, ASYNC_LANE)).c_str(),
       who(writer_[u]).c_str(), line_[u]);
}

}  // namespace emulator
