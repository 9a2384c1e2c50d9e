// Operations that run beside the warps: queues, bulk copies, tensor copies, cp.async.
#include "cta.h"

namespace emulator {

// A new operation with the warp's clocks as they are now.
AsyncOp* Cta::issue(Warp& w, AsyncOp::What what, i32 line, u32 entity) {
  if (free_ops.empty()) {
    all_ops.push_back(std::make_unique<AsyncOp>());
    free_ops.push_back(all_ops.back().get());
  }
  AsyncOp* op = free_ops.back();
  free_ops.pop_back();
  op->what = what;
  op->warp = &w;
  op->line = line;
  op->entity = entity;
  op->clock = clock[entity]++;
  op->id = next_id++;
  op->view.assign(w.vc, w.vc + entities.size);
  op->view[w.index] = clock[w.index];
  bump(w);
  return op;
}

void Cta::submit(Queue q, AsyncOp* op) {
  queues[q].push_back(op);
  if (launch->mode == Mode::eager) run_at(q, queues[q].size() - 1);
}

void Cta::run_at(Queue q, size_t index) {
  AsyncOp* op = queues[q][index];
  queues[q].erase(queues[q].begin() + static_cast<std::ptrdiff_t>(index));
  try {
    execute(*op);
  } catch (Fault& fault) {
    if (!fault.placed) {
      fault.placed = true;
      fault.line = op->line;
      fault.warp = op->warp->index;
      std::copy(id, id + 3, fault.cta);
    }
    throw;
  }
  free_ops.push_back(op);
}

bool Cta::run_oldest() {
  for (int q = 0; q < QUEUES; q++)
    if (!queues[q].empty()) {
      run_at(static_cast<Queue>(q), 0);
      return true;
    }
  return false;
}

// Run the operation of that id if it is still queued.
void Cta::run_issued(Queue q, u64 id_of_op) {
  for (size_t k = 0; k < queues[q].size(); k++)
    if (queues[q][k]->id == id_of_op) {
      run_at(q, k);
      return;
    }
}

void Cta::execute(AsyncOp& op) {
  switch (op.what) {
    case AsyncOp::What::bulk_load: return run_bulk_load(op);
    case AsyncOp::What::bulk_store: return run_bulk_store(op);
    case AsyncOp::What::tma_load: return run_tma_load(op);
    case AsyncOp::What::cp_async: return run_cp_async(op);
    case AsyncOp::What::mma: return run_mma(op);
    case AsyncOp::What::commit: return run_commit(op);
    case AsyncOp::What::wgmma: return run_wgmma(op);
  }
}

// A copy's bytes have arrived.
void Cta::complete(AsyncOp& op, i64 bytes) {
  Mbarrier& b = mbarriers[op.mbarrier];
  if (!b.live) fail(Kind::barrier, "no mbarrier is initialised at 0x%x", b.address);
  b.released[op.entity] = std::max(b.released[op.entity], op.clock);
  b.tx -= bytes;
  mbarrier_check(b);
}

namespace {

// Async accesses of contiguous shared memory, 16 bytes at a time.
void write_span(Shadow& shadow, u32 offset, u32 bytes, const Accessor& by) {
  u32 u = offset / 2;
  const u32 end = (offset + bytes + 1) / 2;
  for (; u + 8 <= end; u += 8) shadow.write_async(u, 8, by);
  if (u < end) shadow.write_async(u, end - u, by);
}

void read_span(Shadow& shadow, u32 offset, u32 bytes, const Accessor& by) {
  Shadow::AsyncFaults faults;
  const u32 end = (offset + bytes) / 2;
  for (u32 u = offset / 2; u < end; u += 8) shadow.read_async(u, std::min(8u, end - u), by, faults);
  shadow.report(faults, by);
}

[[noreturn]] void not_16(const char* what, u64 to, u64 from, u32 bytes) {
  fail(Kind::misaligned, "bulk %s of %u bytes from 0x%llx to 0x%llx: all three must be multiples of 16", what,
       bytes, static_cast<unsigned long long>(from), static_cast<unsigned long long>(to));
}

}  // namespace

void Cta::bulk_load(Warp& w, const Instruction& i, u32 mask) {
  const i32* list = launch->program.operands + i.list;
  const bool early = !w.vc[entities.dependency];
  for (u32 m = mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    const u32 to = w.reg<u32>(list[0])[l], bytes = w.reg<u32>(list[2])[l];
    const u64 from = w.reg<u64>(list[1])[l];
    if ((to | from | bytes) & 15) not_16("load", to, from, bytes);
    const u32 offset = shared_address(to, bytes, "bulk load");
    launch->check_global(from, bytes, false, early);
    const u32 index = mbarrier_of_copy(w, w.reg<u32>(list[3])[l]);
    AsyncOp* op = issue(w, AsyncOp::What::bulk_load, i.line, copy_entity(mbarriers[index]));
    op->mbarrier = index;
    op->global = from;
    op->shared = offset;
    op->bytes = bytes;
    submit(COPY, op);
  }
}

void Cta::run_bulk_load(AsyncOp& op) {
  write_span(shadow, op.shared, op.bytes, async(op));
  std::memcpy(shared + op.shared, reinterpret_cast<const void*>(op.global), op.bytes);
  complete(op, op.bytes);
}

void Cta::bulk_store(Warp& w, const Instruction& i, u32 mask) {
  const i32* list = launch->program.operands + i.list;
  const bool early = !w.vc[entities.dependency];
  for (u32 m = mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    const u64 to = w.reg<u64>(list[0])[l];
    const u32 from = w.reg<u32>(list[1])[l], bytes = w.reg<u32>(list[2])[l];
    if ((to | from | bytes) & 15) not_16("store", to, from, bytes);
    const u32 offset = shared_address(from, bytes, "bulk store");
    launch->check_global(to, bytes, true, early);
    AsyncOp* op = issue(w, AsyncOp::What::bulk_store, i.line, entities.bulk_stores(w.index));
    op->global = to;
    op->shared = offset;
    op->bytes = bytes;
    w.bulk.push_back({op->id, w.bulk_group[l], op->clock, l});
    submit(STORE, op);
  }
}

void Cta::run_bulk_store(AsyncOp& op) {
  read_span(shadow, op.shared, op.bytes, async(op));
  std::memcpy(reinterpret_cast<void*>(op.global), shared + op.shared, op.bytes);
}

void Cta::bulk_wait(Warp& w, const Instruction& i, u32 mask) {
  u32& seen = w.vc[entities.bulk_stores(w.index)];
  size_t kept = 0;
  for (size_t k = 0; k < w.bulk.size(); k++) {
    const Issued store = w.bulk[k];
    if (mask >> store.lane & 1 && static_cast<i64>(store.group) + i.imm < w.bulk_group[store.lane]) {
      run_issued(STORE, store.id);
      seen = std::max(seen, store.clock);
    } else {
      w.bulk[kept++] = store;
    }
  }
  w.bulk.resize(kept);
}

void Cta::cp_async(Warp& w, const Instruction& i, u32 mask) {
  const i32* list = launch->program.operands + i.list;
  const bool early = !w.vc[entities.dependency];
  const u32 size = static_cast<u32>(i.size);
  u32 to[LANES], bytes[LANES];
  u64 from[LANES];
  for (u32 m = mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    const u32 address = w.reg<u32>(list[0])[l];
    from[l] = w.reg<u64>(list[1])[l];
    bytes[l] = list[2] == NONE ? size : std::min(size, w.reg<u32>(list[2])[l]);
    if ((address | from[l]) & (size - 1))
      fail(Kind::misaligned, "cp.async of %u bytes from 0x%llx to 0x%x", size,
           static_cast<unsigned long long>(from[l]), address);
    to[l] = shared_address(address, size, "cp.async");
    if (bytes[l]) launch->check_global(from[l], bytes[l], false, early);
  }
  AsyncOp* op = issue(w, AsyncOp::What::cp_async, i.line, entities.copies(w.index));
  op->lanes = mask;
  op->bytes = size;
  std::copy(to, to + LANES, op->lane_shared);
  std::copy(from, from + LANES, op->lane_global);
  std::copy(bytes, bytes + LANES, op->lane_bytes);
  w.copies.push_back({op->id, w.copy_group, op->clock, 0});
  submit(COPY, op);
}

void Cta::run_cp_async(AsyncOp& op) {
  for (u32 m = op.lanes; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    write_span(shadow, op.lane_shared[l], op.bytes, async(op));
    u8 data[16] = {};
    if (op.lane_bytes[l])
      std::memcpy(data, reinterpret_cast<const void*>(op.lane_global[l]), op.lane_bytes[l]);
    std::memcpy(shared + op.lane_shared[l], data, op.bytes);
  }
}

void Cta::cp_async_wait(Warp& w, const Instruction& i) {
  u32& seen = w.vc[entities.copies(w.index)];
  size_t kept = 0;
  for (size_t k = 0; k < w.copies.size(); k++) {
    const Issued copy = w.copies[k];
    if (static_cast<i64>(copy.group) + i.imm < w.copy_group) {
      run_issued(COPY, copy.id);
      seen = std::max(seen, copy.clock);
    } else {
      w.copies[kept++] = copy;
    }
  }
  w.copies.resize(kept);
}

namespace {

constexpr u32 SPAN[4] = {0, 32, 64, 128};  // bytes of a row by swizzle

// The outer positions of a box, one row of its fastest dimension at a time.
struct Rows {
  const TensorMap& map;
  const i32* first;
  i64 position[5] = {0, 0, 0, 0, 0};

  i64 count() const {
    i64 n = 1;
    for (int d = 1; d < map.rank; d++) n *= map.box[d];
    return n;
  }
  void next() {
    for (int d = 1; d < map.rank; d++) {
      if (++position[d] < map.box[d]) return;
      position[d] = 0;
    }
  }
  // Address of element 0 of the row; whether the row is inside in its outer dimensions.
  bool outer(u64& address) const {
    bool inside = true;
    address = map.base;
    for (int d = 1; d < map.rank; d++) {
      const i64 x = first[d] + position[d];
      inside &= x >= 0 && x < map.dims[d];
      address += static_cast<u64>(x * map.strides[d]);
    }
    return inside;
  }
  // The elements of a row that are inside.
  void inner(i64& from, i64& to) const {
    from = std::max<i64>(0, -static_cast<i64>(first[0]));
    to = std::min<i64>(map.box[0], map.dims[0] - first[0]);
  }
};

}  // namespace

void Cta::tma_load(Warp& w, const Instruction& i, u32 mask) {
  const i32* list = launch->program.operands + i.list;
  const bool early = !w.vc[entities.dependency];
  for (u32 m = mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    const u32 to = w.reg<u32>(list[0])[l];
    const u64 name = w.reg<u64>(list[1])[l];
    const TensorMap* map = nullptr;
    for (i64 k = 0; k < launch->view.map_count; k++)
      if (name == PARAM_BASE + static_cast<u64>(launch->view.maps[k].parameter)) map = launch->view.maps + k;
    if (!map)
      fail(Kind::tensor_map, "0x%llx is not the address of a tensor map among the kernel's parameters",
           static_cast<unsigned long long>(name));
    if (!map->valid)
      fail(Kind::tensor_map,
           "the tensor map at parameter offset %d has a data type or rank that is not known", map->parameter);
    if (map->rank != i.count - 3)
      fail(Kind::tensor_map, "%d coordinates for a tensor map of rank %d", i.count - 3, map->rank);
    i32 first[5] = {0, 0, 0, 0, 0};
    for (int d = 0; d < map->rank; d++) first[d] = w.reg<i32>(list[3 + d])[l];
    const i64 row = map->box[0] * map->element_bytes;
    if (static_cast<i64>(first[0]) * map->element_bytes % 16)
      fail(Kind::tensor_map, "first coordinate %d is %lld bytes, not a multiple of 16", first[0],
           static_cast<long long>(static_cast<i64>(first[0]) * map->element_bytes));
    if (map->swizzle && row > SPAN[map->swizzle])
      fail(Kind::tensor_map, "box rows of %lld bytes are wider than the swizzle's %u",
           static_cast<long long>(row), SPAN[map->swizzle]);
    if (to % 128) fail(Kind::misaligned, "destination 0x%x of a tensor copy is not a multiple of 128", to);
    Rows rows{*map, first};
    const i64 pitch = std::max<i64>(row, SPAN[map->swizzle]), count = rows.count();
    // A box may be larger than 32 bits can say; it is out of bounds then.
    const u32 bytes = static_cast<u32>(std::min<i64>(count * pitch, 0x7FFFFFFF));
    const u32 offset = shared_address(to, bytes, "tensor copy");
    i64 from, end;
    rows.inner(from, end);
    for (i64 r = 0; r < count; r++, rows.next()) {
      u64 address;
      if (!rows.outer(address) || from >= end) continue;
      const u64 start = address + static_cast<u64>((first[0] + from) * map->element_bytes);
      if (launch->in_global(start, static_cast<u64>((end - from) * map->element_bytes))) continue;
      for (i64 x = 0; x < end - from; x++)
        launch->check_global(start + static_cast<u64>(x * map->element_bytes), map->element_bytes, false,
                             false);
    }
    const u32 index = mbarrier_of_copy(w, w.reg<u32>(list[2])[l]);
    if (early)
      for (i64 k = 0; k < launch->view.allocation_count; k++)
        if (launch->contains(k, map->base, 1)) {
          launch->view.early[2 * k]++;
          break;
        }
    AsyncOp* op = issue(w, AsyncOp::What::tma_load, i.line, copy_entity(mbarriers[index]));
    op->mbarrier = index;
    op->shared = offset;
    op->map = map;
    std::copy(first, first + 5, op->coordinates);
    submit(COPY, op);
  }
}

void Cta::run_tma_load(AsyncOp& op) {
  const TensorMap& map = *op.map;
  const Accessor by = async(op);
  Rows rows{map, op.coordinates};
  const u32 width = static_cast<u32>(map.element_bytes), row = static_cast<u32>(map.box[0]) * width;
  const u32 pitch = std::max(row, SPAN[map.swizzle]);
  const u32 swizzle_mask = map.swizzle == 3 ? 7 : map.swizzle == 2 ? 3 : map.swizzle == 1 ? 1 : 0;
  const i64 count = rows.count();
  i64 from, end;
  rows.inner(from, end);
  alignas(64) u8 line[256 * 8];
  for (i64 r = 0; r < count; r++, rows.next()) {
    u64 address;
    const bool inside = rows.outer(address) && from < end;
    const u8* data = line;
    if (inside && from == 0 && end == map.box[0]) {
      data = reinterpret_cast<const u8*>(address +
                                         static_cast<u64>(static_cast<i64>(op.coordinates[0]) * width));
    } else {
      const u8 fill[2] = {static_cast<u8>(map.fill), static_cast<u8>(map.fill >> 8)};
      for (u32 k = 0; k < row; k++) line[k] = fill[k & 1];
      if (inside)
        std::memcpy(
            line + from * width,
            reinterpret_cast<const u8*>(address + static_cast<u64>((op.coordinates[0] + from) * width)),
            static_cast<size_t>((end - from) * width));
    }
    const u32 start = op.shared + static_cast<u32>(r) * pitch;
    if (!swizzle_mask) {
      write_span(shadow, start, row, by);
      std::memcpy(shared + start, data, row);
      continue;
    }
    for (u32 k = 0; k < row; k += 16) {
      const u32 plain = start + k + SHARED_BASE, n = std::min(16u, row - k);
      const u32 to = (plain ^ ((plain >> 7 & swizzle_mask) << 4)) - SHARED_BASE;
      write_span(shadow, to, n, by);
      std::memcpy(shared + to, data + k, n);
    }
  }
  complete(op, count * row);
}

}  // namespace emulator
