// The scheduler, the life of a CTA, and the interface to Python.
#include "cta.h"

namespace emulator {

void Cta::start(Launch& l, i64 number) {
  launch = &l;
  linear = number;
  const i32* grid = l.view.grid;
  id[0] = static_cast<i32>(number % grid[0]);
  id[1] = static_cast<i32>(number / grid[0] % grid[1]);
  id[2] = static_cast<i32>(number / grid[0] / grid[1]);
  const bool same = warp_count == l.warp_count;
  warp_count = unfinished = l.warp_count;
  entities = Entities(warp_count);
  for (const u32 c : clock) base = std::max(base, c);
  const bool clear = base > 0x40000000u;
  if (clear) base = 0;
  const size_t bytes = static_cast<size_t>(l.view.shared_bytes);
  shadow.prepare(bytes, warp_count, clear || !same);
  shared = shared_store.need(bytes + 64);
  std::memset(shared, 0xFF, bytes);
  clock.assign(entities.size, base + 1);
  for (Barrier& b : barriers) b.arrived = b.needed = 0, b.waiting = 0;
  for (size_t k = 0; k < mbarrier_count; k++) mbarriers[k].live = false;
  mbarrier_count = 0;
  mbarrier_at.assign(bytes / 8 + 1, 0);
  copy_barriers = 0;
  for (auto& q : queues) q.clear();
  free_ops.clear();
  for (const auto& op : all_ops) free_ops.push_back(op.get());
  poisoned = 0;
  std::fill_n(column_owner, TM_COLUMNS, -1);
  column_read.resize(TM_COLUMNS * warp_count);
  tensor_allocations.clear();

  const ProgramView& program = l.program;
  u32* vectors = reinterpret_cast<u32*>(clocks_store.need(sizeof(u32) * 2 * entities.size * warp_count));
  while (warps.size() < static_cast<size_t>(warp_count)) warps.push_back(std::make_unique<Warp>());
  for (int k = 0; k < warp_count; k++) {
    Warp& w = *warps[k];
    w.cta = this;
    w.index = k;
    w.live = l.threads - LANES * k >= LANES ? FULL : (1u << (l.threads - LANES * k)) - 1;
    w.groups.assign(1, Group{0, w.live});
    w.vc = vectors + 2 * entities.size * k;
    w.vt = w.vc + entities.size;
    clear_vector(w.vc);
    clear_vector(w.vt);
    w.executed = 0;
    w.barrier = AtBarrier::no;
    w.yielded = w.unready = w.fenced = false;
    w.timed_out.clear();
    w.loading.clear();
    w.loaded.clear();
    w.bulk.clear();
    w.copies.clear();
    w.products.clear();
    std::fill_n(w.bulk_group, LANES, 0);
    w.copy_group = w.product_group = 0;
    w.file = w.file_store.need(static_cast<size_t>(program.image_bytes) + 512);
    std::memcpy(w.file, program.image, static_cast<size_t>(program.image_bytes));
    for (i64 p = 0; p < program.parameter_count; p++) {
      const i32* entry = program.parameters + 3 * p;
      for (int lane = 0; lane < LANES; lane++)
        std::memcpy(w.file + entry[2] + lane * entry[1], l.view.params + entry[0], entry[1]);
    }
    for (u32 lane = 0; lane < LANES; lane++) {
      const i32* block = l.view.block;
      const u32 thread = 32 * k + lane;
      const u32 values[] = {thread % block[0],
                            thread / block[0] % block[1],
                            thread / block[0] / block[1],
                            static_cast<u32>(id[0]),
                            static_cast<u32>(id[1]),
                            static_cast<u32>(id[2]),
                            static_cast<u32>(grid[0]),
                            static_cast<u32>(grid[1]),
                            static_cast<u32>(grid[2]),
                            static_cast<u32>(block[0]),
                            static_cast<u32>(block[1]),
                            static_cast<u32>(block[2]),
                            lane,
                            static_cast<u32>(k)};
      static_assert(sizeof values / sizeof *values == SPECIAL_COUNT, "one value a special register");
      for (int s = 0; s < SPECIAL_COUNT; s++)
        if (program.specials[s] != NONE) w.reg<u32>(program.specials[s])[lane] = values[s];
    }
  }
}

// After the last warp's exit.
void Cta::finish() {
  while (run_oldest()) {
  }
  for (int k = 0; k < warp_count; k++)
    if (!warps[k]->bulk.empty()) {
      Fault fault;
      fault.kind = Kind::bulk;
      fault.text = "the CTA ends with a bulk store that nothing waited for";
      fault.warp = k;
      std::copy(id, id + 3, fault.cta);
      fault.placed = true;
      throw fault;
    }
  if (!tensor_allocations.empty()) {
    Fault fault;
    fault.kind = Kind::tensor_memory;
    fault.text = "the CTA ends with tensor memory allocated";
    std::copy(id, id + 3, fault.cta);
    fault.placed = true;
    throw fault;
  }
}

namespace {

// Buffers of CTAs, kept from launch to launch by each thread.
struct Pool {
  std::vector<std::unique_ptr<Cta>> free;

  std::unique_ptr<Cta> take() {
    if (free.empty()) return std::make_unique<Cta>();
    auto cta = std::move(free.back());
    free.pop_back();
    return cta;
  }
};
thread_local Pool pool;

// A resident CTA and its entities' priorities: warps, then queues.
struct Slot {
  std::unique_ptr<Cta> cta;
  std::vector<u64> priority;
  std::vector<u8> seen;
};

class Scheduler {
 public:
  explicit Scheduler(Launch& launch) : launch_(launch) {
    total_ = static_cast<i64>(launch.view.grid[0]) * launch.view.grid[1] * launch.view.grid[2];
  }
  ~Scheduler() {
    for (auto it = slots_.rbegin(); it != slots_.rend(); ++it) pool.free.push_back(std::move(it->cta));
  }

  void run() {
    while (static_cast<i64>(slots_.size()) < launch_.view.resident && next_ < total_) {
      slots_.emplace_back();
      start(slots_.back());
    }
    if (launch_.mode == Mode::priority) {
      while (!slots_.empty()) turn();
    } else {
      while (!slots_.empty()) round();
    }
  }

 private:
  void start(Slot& slot) {
    if (!slot.cta) slot.cta = pool.take();
    slot.priority.assign(launch_.warp_count + QUEUES, 0);
    slot.seen.assign(launch_.warp_count + QUEUES, 0);
    slot.cta->start(launch_, next_++);
  }

  // A slot's CTA has ended: the next one takes its place, or the slot goes. Whether the slot stays.
  bool replace(size_t s) {
    slots_[s].cta->finish();
    if (next_ < total_) {
      start(slots_[s]);
      return true;
    }
    pool.free.push_back(std::move(slots_[s].cta));
    slots_.erase(slots_.begin() + static_cast<std::ptrdiff_t>(s));
    return false;
  }

  // eager, lazy: every warp of every CTA as far as it gets.
  void round() {
    bool moved = false, yielded = false;
    for (size_t s = 0; s < slots_.size();) {
      Cta& cta = *slots_[s].cta;
      for (int k = 0; k < cta.warp_count; k++) {
        Warp& w = *cta.warps[k];
        bool any = false;
        while (!w.finished() && step(w, INT64_MAX)) {
          any = true;
          if (w.yielded) break;
        }
        if (any && w.unready) {
          yielded = true;
        } else {
          moved |= any;
        }
      }
      if (cta.unfinished || replace(s)) s++;
    }
    if (moved || slots_.empty()) return;
    for (const Slot& slot : slots_)
      if (slot.cta->run_oldest()) return;
    if (!yielded) deadlock();
  }

  struct Entity {
    u64 priority;
    size_t slot;
    int index;  // a warp, or warp_count + queue
  };

  // priority: the first entity by priority that can move.
  void turn() {
    entities_.clear();
    for (size_t s = 0; s < slots_.size(); s++) {
      Slot& slot = slots_[s];
      for (int k = 0; k < launch_.warp_count + QUEUES; k++) {
        const bool there = k < launch_.warp_count ? !slot.cta->warps[k]->finished()
                                                  : !slot.cta->queues[k - launch_.warp_count].empty();
        if (!there) continue;
        if (!slot.seen[k]) {
          slot.seen[k] = 1;
          slot.priority[k] = launch_.rng.next();
        }
        entities_.push_back({slot.priority[k], s, k});
      }
    }
    std::stable_sort(entities_.begin(), entities_.end(),
                     [](const Entity& a, const Entity& b) { return a.priority > b.priority; });
    for (const Entity& e : entities_) {
      Cta& cta = *slots_[e.slot].cta;
      if (e.index < launch_.warp_count) {
        if (!step(*cta.warps[e.index], 1 + static_cast<i64>(launch_.rng.below(64)))) continue;
      } else {
        const Queue q = static_cast<Queue>(e.index - launch_.warp_count);
        cta.run_at(q, q == TC ? 0 : launch_.rng.below(cta.queues[q].size()));
      }
      if (!cta.unfinished) replace(e.slot);
      if (launch_.rng.below(64) == 0)
        for (Slot& slot : slots_) std::fill(slot.seen.begin(), slot.seen.end(), 0);
      return;
    }
    deadlock();
  }

  // Unfinished warps by "warp at |line|"; Python adds the statements.
  [[noreturn]] void deadlock() const {
    std::string text = "nothing can move any more";
    char line[256];
    for (const Slot& slot : slots_)
      for (int k = 0; k < slot.cta->warp_count; k++) {
        const Warp& w = *slot.cta->warps[k];
        for (const Group& g : w.groups) {
          snprintf(line, sizeof line, "\n  CTA (%d, %d, %d) warp %d lanes 0x%x waits at PTX line #%d#",
                   slot.cta->id[0], slot.cta->id[1], slot.cta->id[2], k, g.mask,
                   launch_.program.code[g.pc].line);
          text += line;
        }
      }
    const Cta& first = *slots_.front().cta;
    for (size_t k = 0; k < first.mbarrier_count; k++) {
      const Mbarrier& b = first.mbarriers[k];
      if (!b.live) continue;
      snprintf(line, sizeof line,
               "\n  mbarrier at +%u: phase %llu, %lld of %lld arrivals outstanding, %lld bytes outstanding",
               b.address - SHARED_BASE, static_cast<unsigned long long>(b.phase),
               static_cast<long long>(b.pending), static_cast<long long>(b.count),
               static_cast<long long>(b.tx));
      text += line;
    }
    Fault fault;
    fault.kind = Kind::deadlock;
    fault.text = text;
    throw fault;
  }

  Launch& launch_;
  i64 total_ = 0, next_ = 0;
  std::vector<Slot> slots_;
  std::vector<Entity> entities_;
};

}  // namespace

void Launch::run() { Scheduler(*this).run(); }

}  // namespace emulator

// Execute a launch; 0 if it went well, else the view's error fields say what did not.
extern "C" __attribute__((visibility("default"))) int kdafuzz_emulate(const emulator::ProgramView* program,
                                                                      emulator::LaunchView* view) {
  using namespace emulator;
  view->error_kind = -1;
  view->error_line = 0;
  view->error_warp = -1;
  view->error_cta[0] = -1;
  view->error_text[0] = 0;
  try {
    Launch launch(*program, *view);
    try {
      launch.run();
    } catch (...) {
      view->instructions = launch.executed;
      throw;
    }
    view->instructions = launch.executed;
    return 0;
  } catch (const Fault& fault) {
    view->error_kind = static_cast<i32>(fault.kind);
    view->error_line = fault.line;
    view->error_warp = fault.warp;
    if (fault.placed) std::copy(fault.cta, fault.cta + 3, view->error_cta);
    snprintf(view->error_text, sizeof view->error_text, "%s", fault.text.c_str());
    return 1;
  } catch (const std::bad_alloc&) {
    view->error_kind = -2;
    return 1;
  }
}

// Sizes of the structures, for Python to compare with its own.
extern "C" __attribute__((visibility("default"))) long kdafuzz_emulator_size(int which) {
  return static_cast<long>(which ? sizeof(emulator::LaunchView) : sizeof(emulator::ProgramView));
}
