// The state of a launch: CTAs, their warps, barriers, queues and memories.
#pragma once
#include "arith.h"
#include "shadow.h"

namespace emulator {

struct Cta;
struct Warp;

// What Python hands over: a program, prepared once. Layouts are mirrored in engine.py.
struct ProgramView {
  const Instruction* code;
  const i32* operands;
  const u8* image;        // a warp's register file at its start
  const i32* parameters;  // triples: offset in the parameter block, size, offset in the register file
  const i32* specials;    // offsets in the register file in the order of SPECIALS, or NONE
  i64 code_count;
  i64 image_bytes;
  i64 parameter_count;
  i64 param_bytes;
};

// A launch and, after it, what came of it.
struct LaunchView {
  const u8* params;
  const TensorMap* maps;
  const u64* starts;  // allocations: address, size, writable
  const u64* sizes;
  const u8* writable;
  i64* early;  // per allocation: reads, writes
  Tables tables;
  i64 map_count;
  i64 allocation_count;
  u64 schedule_seed;
  u64 function_seed;
  i64 shared_bytes;
  i64 resident;
  i64 max_instructions;
  i64 instructions;  // result
  i32 grid[3];
  i32 block[3];
  i32 mode;
  i32 functions;
  i32 error_kind;  // result: -1 none
  i32 error_line;
  i32 error_cta[3];  // -1: not known
  i32 error_warp;
  char error_text[4096];
};

enum class Mode : i32 { eager = 0, lazy = 1, priority = 2 };

struct Mbarrier {
  u32 address = 0;
  bool live = false;
  bool shown = false;  // by fence.mbarrier_init
  int maker = 0;       // the warp that initialised it, at its clock
  u32 made = 0;
  i32 entity = -1;  // of the copies that complete on it
  i64 count = 0;
  i64 pending = 0;
  i64 tx = 0;
  u64 phase = 0;
  std::vector<u32> released;  // by arrivals and copies
  std::vector<u32> done;      // a copy of that at the last completion
};

struct Barrier {
  u32 arrived = 0;
  u32 needed = 0;
  u64 waiting = 0;  // warps
  std::vector<u32> released;
};

// An operation of a queue.
struct AsyncOp {
  enum class What { bulk_load, bulk_store, tma_load, cp_async, mma, commit, wgmma };
  What what;
  Warp* warp;
  i32 line;
  u32 entity;
  u32 clock;
  u64 id;
  u32 mbarrier;  // index
  u64 global;
  u32 shared;
  u32 bytes;
  const TensorMap* map;
  i32 coordinates[5];
  u64 descriptors[2];
  u32 column;
  i32 n;
  bool accumulate;
  const i32* registers;  // wgmma
  u32 lanes;             // cp_async
  u64 lane_global[LANES];
  u32 lane_shared[LANES];
  u32 lane_bytes[LANES];
  std::vector<u32> view;  // clocks at issue
  std::vector<u32> tensor_view;
  std::vector<u32> saved;   // wgmma: input registers
  std::vector<u8> chained;  // those that earlier operations still write
};

// Something issued that a wait of its warp counts on.
struct Issued {
  u64 id;
  u32 group;
  u32 clock;
  i32 lane;
};

struct Group {
  i32 pc;
  u32 mask;
};

enum class AtBarrier { no, waiting, released };

struct Warp {
  Cta* cta = nullptr;
  int index = 0;
  u32 live = 0;
  std::vector<Group> groups;  // ascending pc
  u8* file = nullptr;
  u32* vc = nullptr;  // clocks; the own entry is one below the warp's clock
  u32* vt = nullptr;  // the view for tensor memory
  i64 executed = 0;
  AtBarrier barrier = AtBarrier::no;
  bool yielded = false;                           // the last step ended in a test_wait
  bool unready = false;                           // which was not ready in some lane
  bool fenced = false;                            // wgmma.fence
  std::set<std::tuple<i32, u32, u64>> timed_out;  // waits by pc, mbarrier and phase
  std::vector<std::pair<i32, u32>> loading;       // tcgen05.ld: register, place in loaded
  std::vector<u32> loaded;
  std::vector<Issued> bulk, copies, products;
  u32 bulk_group[LANES] = {};
  u32 copy_group = 0;
  u32 product_group = 0;
  Buffer file_store;

  bool finished() const { return groups.empty(); }
  template <class T>
  ALWAYS_INLINE T* reg(i32 offset) const {
    return reinterpret_cast<T*>(file + offset);
  }
};

enum Queue { COPY = 0, TC = 1, STORE = 2, QUEUES = 3 };

struct Launch;

constexpr u32 TM_LANES = 128, TM_COLUMNS = 512, TM_POISON = 0x7FC00000u;

struct Cta {
  Launch* launch = nullptr;
  i64 linear = 0;
  i32 id[3] = {0, 0, 0};
  Entities entities;
  u32 base = 0;
  std::vector<u32> clock;  // per entity, its next
  std::vector<std::unique_ptr<Warp>> warps;
  int warp_count = 0;
  int unfinished = 0;
  u8* shared = nullptr;
  Shadow shadow;
  Barrier barriers[16];
  std::vector<Mbarrier> mbarriers;  // used so far, by first use
  size_t mbarrier_count = 0;
  std::vector<u16> mbarrier_at;  // by 8-byte word: index + 1
  int copy_barriers = 0;
  std::vector<AsyncOp*> queues[QUEUES];
  u32* tensor = nullptr;         // [lane][column]
  u32 poisoned = 0;              // columns of this CTA that have had their poison
  i32 column_owner[TM_COLUMNS];  // first column of the allocation, -1: free
  u32 column_written[TM_COLUMNS];
  std::vector<u32> column_read;  // [column][warp]
  std::vector<std::pair<u32, u32>> tensor_allocations;
  u64 next_id = 1;
  Buffer shared_store, tensor_store, clocks_store;
  std::vector<std::unique_ptr<AsyncOp>> all_ops;
  std::vector<AsyncOp*> free_ops;

  void start(Launch& l, i64 number);
  void finish();

  // sync.cpp
  void bump(Warp& w) {
    clock[w.index]++;
    w.vc[w.index] = clock[w.index] - 1;
  }
  void release(Warp& w, u32* target) {
    join(target, w.vc, entities.size);
    target[w.index] = std::max(target[w.index], clock[w.index]);
    bump(w);
  }
  void clear_vector(u32* v) const {
    std::fill(v, v + entities.size, base);
    v[entities.dependency] = 0;
  }
  u32 shared_address(u32 address, u32 bytes, const char* what) const;
  u32 mbarrier_index(u32 address);
  void mbarrier_init(const Warp& w, u32 address, i64 count);
  void show_mbarriers(const Warp& w);
  u32 mbarrier_of_copy(const Warp& w, u32 address);
  void mbarrier_inval(u32 address);
  void mbarrier_check(Mbarrier& b);
  void mbarrier_arrive(Mbarrier& b, i64 arrivals);
  u32 copy_entity(Mbarrier& b);
  bool barrier_arrive(Warp& w, i64 number, u32 count, bool wait);
  void fence_proxy(Warp& w);

  // async.cpp
  AsyncOp* issue(Warp& w, AsyncOp::What what, i32 line, u32 entity);
  void submit(Queue q, AsyncOp* op);
  void run_at(Queue q, size_t index);
  bool run_oldest();
  void run_issued(Queue q, u64 id);
  void execute(AsyncOp& op);
  void bulk_load(Warp& w, const Instruction& i, u32 mask);
  void bulk_store(Warp& w, const Instruction& i, u32 mask);
  void bulk_wait(Warp& w, const Instruction& i, u32 mask);
  void tma_load(Warp& w, const Instruction& i, u32 mask);
  void cp_async(Warp& w, const Instruction& i, u32 mask);
  void cp_async_wait(Warp& w, const Instruction& i);
  void run_bulk_load(AsyncOp& op);
  void run_bulk_store(AsyncOp& op);
  void run_tma_load(AsyncOp& op);
  void run_cp_async(AsyncOp& op);
  void complete(AsyncOp& op, i64 bytes);

  // tensor.cpp
  void tc_alloc(Warp& w, const Instruction& i);
  void tc_dealloc(Warp& w, const Instruction& i);
  void tc_load(Warp& w, const Instruction& i, u32 mask);
  void tc_wait_load(Warp& w, u32 mask);
  void tc_mma(Warp& w, const Instruction& i, u32 mask);
  void tc_commit(Warp& w, const Instruction& i, u32 mask);
  void run_mma(AsyncOp& op);
  void run_commit(AsyncOp& op);
  void wg_mma(Warp& w, const Instruction& i, u32 mask);
  void wg_wait(Warp& w, const Instruction& i);
  void run_wgmma(AsyncOp& op);
  void check_columns(u32 column, u32 n, const char* what) const;

  Accessor generic(const Warp& w, i32 line) const {
    return {w.vc, static_cast<u32>(w.index), clock[w.index], base, line};
  }
  Accessor async(const AsyncOp& op) const { return {op.view.data(), op.entity, op.clock, base, op.line}; }
};

struct Launch {
  const ProgramView& program;
  LaunchView& view;
  Mode mode;
  SplitMix rng;
  int warp_count;
  i64 threads;
  i64 executed = 0;
  size_t last_allocation = 0;

  Launch(const ProgramView& p, LaunchView& v)
      : program(p), view(v), mode(static_cast<Mode>(v.mode)), rng{v.schedule_seed} {
    threads = static_cast<i64>(v.block[0]) * v.block[1] * v.block[2];
    warp_count = static_cast<int>((threads + LANES - 1) / LANES);
  }

  void run();

  // memory.cpp
  bool contains(size_t k, u64 address, u64 bytes) const {
    const u64 offset = address - view.starts[k];
    return offset <= view.sizes[k] && bytes <= view.sizes[k] - offset;
  }
  bool touches(size_t k, u64 address, u64 bytes) const {
    return address < view.starts[k] + view.sizes[k] && view.starts[k] < address + bytes;
  }
  // Check an access of `bytes`; count it if it is early.
  void check_global(u64 address, u64 bytes, bool write, bool early);
  bool in_global(u64 address, u64 bytes) const;
  bool is_parameter(u64 address, u64 bytes) const {
    const u64 offset = address - PARAM_BASE;
    return offset < static_cast<u64>(program.param_bytes) && bytes <= program.param_bytes - offset;
  }
  [[noreturn]] void out_of_bounds(u64 address, u64 bytes, const char* what) const;
};

// memory.cpp
void access_global(Warp& w, const Instruction& i, u32 mask, bool write);
void access_shared(Warp& w, const Instruction& i, u32 mask, bool write);
void atomic(Warp& w, const Instruction& i, u32 mask);
void matrix(Warp& w, const Instruction& i, u32 mask, bool write);

// warp.cpp
bool step(Warp& w, i64 budget);  // whether it moved

}  // namespace emulator
