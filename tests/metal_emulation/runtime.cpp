// Scheduler and checks of the Metal emulation: each thread of a threadgroup is a fiber on one OS thread.
//
// Every load and store of a kernel arrives in `access` (the compiler's address-sanitizer callbacks). A barrier advances `now`; two accesses
// of which one is a write, by different threads, with no barrier between, are a race whatever order the fibers happened to run in.
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "../emulation_switch.hpp"
#include "thread.h"

namespace {

constexpr uint MAX_THREADS = 1024, LANES = 32, MAX_SIMDS = MAX_THREADS / LANES;
constexpr size_t STACK = 128 << 10;
constexpr uint GROUP_MEMORY = 32 << 10;               // what Apple GPUs have per threadgroup
constexpr uint GROUP_ARENA = 256 << 10, GAP = 1024;   // gaps between the arrays, so that running over one is seen
constexpr uintptr_t SLOT = 1ull << 32;                // address space per buffer: an index off by up to 2 GiB still names its buffer
constexpr uint MAX_BUFFERS = 31;                      // Metal's limit
constexpr uint32_t NEVER = 0;
constexpr unsigned FLUSH_DENORMALS = 0x8040;          // Apple GPUs flush float32 denormals, in and out; half keeps them

enum State { READY, AT_SIMD, AT_GROUP, RETURNED };

struct Fiber {
  void* stack_pointer;
  uintptr_t stack;
  State state;
  uint index, lane, simd;
  uint32_t generation;
  const char* where;
  int line;
  EmuThread position;
};

struct Simd {
  uint live, arrived, active;
  uint32_t generation, synced, synced_device;
  int operation, line;
  uint first, flags;
  uint took_part[2];
  alignas(16) uint8_t slots[2][LANES * 32];  // of the lanes, one after the other, as many bytes each as the operation takes
};

struct Access {  // of one byte
  uint32_t written, read, read_elsewhere;      // when; `read_elsewhere`: by another SIMD-group than the last
  uint32_t writer, reader, reader_elsewhere;   // who: thread in the dispatch; reader | MANY: several lanes of that SIMD-group
};
constexpr uint32_t MANY = 1u << 31;

struct Buffer {
  const char* name;
  uint8_t* data;
  size_t bytes;
  uint element;
  bool output;
  std::vector<Access> record;
};

struct Array {
  uint index, offset, bytes;
};

Fiber fibers[MAX_THREADS];
Simd simds[MAX_SIMDS];
Fiber* current;
void* scheduler_stack_pointer;
uint8_t* stacks;
uint8_t* arena;
size_t committed[MAX_BUFFERS];
alignas(64) uint8_t group_memory[GROUP_ARENA];
Access group_record[GROUP_ARENA];
std::vector<Array> group_arrays;
uint group_used, group_next;
std::vector<Buffer> buffers;
uint group_threads, group_simds, group_base;
uint group_arrived;
uint32_t group_generation, group_synced, group_synced_device, group_start;
int group_line;
uint group_first;
uint32_t now = 1;
uint64_t accesses, access_limit;
uintptr_t image_low, image_high;
void* entry_point;
void** entry_buffers;
char error[2048];
void* error_pc;
int error_line;

const char* const OPERATIONS[] = {"", "simd_sum", "simd_product", "simd_max", "simd_min", "simd_and", "simd_or", "simd_xor",
    "simd_prefix_inclusive", "simd_prefix_exclusive", "simd_shuffle", "simd_shuffle_xor", "simd_shuffle_down", "simd_shuffle_up",
    "simd_shuffle_rotate_down", "simd_shuffle_rotate_up", "simd_broadcast", "simd_broadcast_first", "simd_ballot", "simd_all", "simd_any",
    "simdgroup_multiply_accumulate", "simdgroup_barrier"};

void to_scheduler() { emulated_switch(&current->stack_pointer, scheduler_stack_pointer); }

[[noreturn]] void fail(void* pc, int line, const char* format, ...) {
  char text[1024];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  const uint3 g = current->position.threadgroup_position_in_grid, t = current->position.thread_position_in_threadgroup;
  snprintf(error, sizeof error, "%s [threadgroup (%u, %u, %u), thread (%u, %u, %u)]", text, g.x, g.y, g.z, t.x, t.y, t.z);
  error_pc = pc;
  error_line = line;
  to_scheduler();
  abort();
}

// ---- Memory

uint32_t self() { return group_base + current->index; }
bool in_group(uint32_t who) { return who - group_base < group_threads; }
uint simd_of(uint32_t who) { return (who - group_base) / LANES; }

// Did what `who` did at `when` come before what the current thread does now?
bool before(uint32_t when, uint32_t who, uint32_t group_sync, uint32_t simd_sync) {
  if (who == self()) return true;
  if (!in_group(who)) return false;
  return when < group_sync || (simd_of(who) == current->simd && when < simd_sync);
}

std::string thread_name(uint32_t who) {
  if (!in_group(who)) return "a thread of another threadgroup";
  return "thread " + std::to_string(who - group_base);
}

// `place` makes the text of a message: a string for every byte that is read would take most of the time.
template <typename Place> void ordered(Access& a, bool write, const Place& place, void* pc, uint32_t group_sync, uint32_t simd_sync) {
  const uint32_t me = self();
  if (a.written != NEVER && !before(a.written, a.writer, group_sync, simd_sync))
    fail(pc, 0, "race: %s %s, which %s wrote with no barrier between", write ? "writes" : "reads", place().c_str(),
         thread_name(a.writer).c_str());
  if (!write) {
    const uint32_t last = a.reader & ~MANY;
    if (a.read == NEVER || before(a.read, last, group_sync, simd_sync) || (in_group(last) && simd_of(last) == current->simd)) {
      const bool joins = a.read != NEVER && last != me && in_group(last) && simd_of(last) == current->simd && a.read >= simd_sync;
      a.reader = me | (joins ? MANY : (last == me ? a.reader & MANY : 0));
      a.read = now;
    } else {
      a.reader_elsewhere = me;
      a.read_elsewhere = now;
    }
    return;
  }
  for (int i = 0; i < 2; i++) {
    const uint32_t when = i ? a.read_elsewhere : a.read, who = i ? a.reader_elsewhere : a.reader;
    if (when == NEVER) continue;
    const uint32_t one = who & ~MANY;
    const bool fine = (who & MANY) ? when < group_sync || (in_group(one) && simd_of(one) == current->simd && when < simd_sync)
                                   : before(when, one, group_sync, simd_sync);
    if (!fine) fail(pc, 0, "race: writes %s, which %s read with no barrier between", place().c_str(), thread_name(one).c_str());
  }
  a.written = now;
  a.writer = me;
}

void group_access(uintptr_t address, size_t size, bool write, void* pc, bool atomic) {
  const uint offset = uint(address - uintptr_t(group_memory));
  const Array* array = nullptr;
  for (const Array& a : group_arrays)
    if (offset >= a.offset && offset + size <= a.offset + a.bytes) array = &a;
  if (!array) fail(pc, 0, "out of bounds: %s threadgroup memory outside every array", write ? "writes" : "reads");
  const Simd& simd = simds[current->simd];
  for (size_t i = 0; i < size; i++) {
    Access& a = group_record[offset + i];
    if (a.written < group_start) a = Access{};
    const auto place = [&] {
      return "byte " + std::to_string(offset + i - array->offset) + " of threadgroup array " + std::to_string(array->index);
    };
    if (!write && a.written == NEVER) fail(pc, 0, "uninitialised: reads %s, which no thread of this threadgroup wrote", place().c_str());
    if (atomic) {
      a.written = now;
      a.writer = self();
      continue;
    }
    const uint32_t me = self();
    if (a.writer == me && a.read_elsewhere == NEVER && (a.read == NEVER || a.reader == me)) {
      if (write) {
        a.written = now;
      } else {
        a.reader = me;
        a.read = now;
      }
      continue;
    }
    ordered(a, write, place, pc, group_synced, simd.synced);
  }
}

std::string element_name(const Buffer& b, intptr_t offset) {
  const intptr_t index = offset >= 0 ? offset / intptr_t(b.element) : -((-offset + intptr_t(b.element) - 1) / intptr_t(b.element));
  return std::string(b.name) + "[" + std::to_string(index) + "]";
}

void buffer_access(uintptr_t address, size_t size, bool write, void* pc, bool atomic) {
  const uint slot = uint((address - uintptr_t(arena)) / SLOT);
  if (slot >= buffers.size()) fail(pc, 0, "out of bounds: %s an address of no buffer", write ? "writes" : "reads");
  Buffer& b = buffers[slot];
  const intptr_t offset = intptr_t(address - uintptr_t(b.data));
  if (offset < 0 || size_t(offset) + size > b.bytes)
    fail(pc, 0, "out of bounds: %s %s (%zu bytes), but %s has %zu elements", write ? "writes" : "reads", element_name(b, offset).c_str(),
         size, b.name, b.bytes / b.element);
  if (!b.output) {
    if (write) fail(pc, 0, "writes %s, an input", element_name(b, offset).c_str());
    return;
  }
  const Simd& simd = simds[current->simd];
  for (size_t i = 0; i < size; i++) {
    Access& a = b.record[offset + i];
    if (!write && a.written == NEVER) fail(pc, 0, "uninitialised: reads %s before it is written", element_name(b, offset).c_str());
    if (atomic) {
      a.written = now;
      a.writer = self();
      continue;
    }
    if (write && a.written == NEVER) {
      a.written = now;
      a.writer = self();
      continue;
    }
    ordered(a, write, [&] { return element_name(b, offset); }, pc, group_synced_device, simd.synced_device);
  }
}

inline void access(uintptr_t address, size_t size, bool write, void* pc, bool atomic = false) {
  if (address - current->stack < STACK) return;
  if (++accesses > access_limit) fail(pc, 0, "runs away: more than %llu memory accesses", (unsigned long long)access_limit);
  if (address - uintptr_t(group_memory) < GROUP_ARENA) return group_access(address, size, write, pc, atomic);
  if (address - uintptr_t(arena) < MAX_BUFFERS * SLOT) return buffer_access(address, size, write, pc, atomic);
  if (address >= image_low && address < image_high) {
    if (write) fail(pc, 0, "writes a constant of the program");
    return;
  }
  fail(pc, 0, "out of bounds: %s %zu bytes at an address of no buffer, array or variable", write ? "writes" : "reads", size);
}

// ---- Fibers

// All lanes of a SIMD-group have come to its operation.
void complete(Simd& simd) {
  simd.took_part[simd.generation & 1] = simd.active;
  simd.arrived = 0;
  simd.generation++;
  if (simd.operation != OP_BARRIER) return;
  now++;
  if (simd.flags & MEMORY_THREADGROUP) simd.synced = now;
  if (simd.flags & MEMORY_DEVICE) simd.synced_device = now;
}

extern "C" void emu_start() {
  reinterpret_cast<void (*)(void**, const EmuThread*)>(entry_point)(entry_buffers, &current->position);
  current->state = RETURNED;
  current->where = "returned";
  Simd& simd = simds[current->simd];
  simd.live--;
  simd.active &= ~(1u << current->lane);
  if (simd.live && simd.arrived == simd.live) complete(simd);
  to_scheduler();
  abort();
}

bool runnable(const Fiber& f) {
  if (f.state == AT_SIMD) return simds[f.simd].generation != f.generation;
  if (f.state == AT_GROUP) return group_generation != f.generation;
  return f.state == READY;
}

bool run(Fiber& f) {
  f.state = READY;
  current = &f;
  emulated_switch(&scheduler_stack_pointer, f.stack_pointer);
  return !error[0];
}

// Who waits where, for a deadlock.
void describe_deadlock() {
  std::string text = "divergent: ";
  for (uint i = 0; i < group_threads;) {
    uint j = i;
    while (j + 1 < group_threads && fibers[j + 1].where == fibers[i].where && fibers[j + 1].line == fibers[i].line) j++;
    if (i) text += ", ";
    text += i == j ? "thread " + std::to_string(i) : "threads " + std::to_string(i) + "-" + std::to_string(j);
    text += std::string(fibers[i].state == RETURNED ? " " : " at ") + fibers[i].where;
    if (fibers[i].state != RETURNED) text += " (line " + std::to_string(fibers[i].line) + ")";
    i = j + 1;
    if (text.size() > 600) {
      text += ", ...";
      break;
    }
  }
  snprintf(error, sizeof error, "%s", text.c_str());
}

bool run_group(uint3 group, uint3 grid, uint3 size, std::mt19937& random) {
  const uint3 origin = group * size;
  const uint3 actual = {std::min(size.x, grid.x - origin.x), std::min(size.y, grid.y - origin.y), std::min(size.z, grid.z - origin.z)};
  group_threads = actual.x * actual.y * actual.z;
  group_simds = (group_threads + LANES - 1) / LANES;
  group_arrived = 0;
  group_generation = 0;
  group_start = group_synced = group_synced_device = ++now;
  const uint3 groups = (grid + size - 1) / size;
  for (uint s = 0; s < group_simds; s++) {
    Simd& simd = simds[s];
    simd.live = std::min(LANES, group_threads - s * LANES);
    simd.active = simd.live == 32 ? ~0u : (1u << simd.live) - 1;
    simd.arrived = 0;
    simd.generation = 0;
    simd.synced = simd.synced_device = now;
  }
  for (uint i = 0; i < group_threads; i++) {
    Fiber& f = fibers[i];
    f.state = READY;
    f.where = "start";
    f.line = 0;
    f.index = i;
    f.lane = i % LANES;
    f.simd = i / LANES;
    f.stack = uintptr_t(stacks) + i * STACK;
    const uint3 place = {i % actual.x, i / actual.x % actual.y, i / (actual.x * actual.y)};
    EmuThread& p = f.position;
    p.thread_position_in_threadgroup = place;
    p.thread_position_in_grid = origin + place;
    p.threadgroup_position_in_grid = group;
    p.threads_per_grid = p.grid_size = grid;
    p.grid_origin = 0;
    p.threads_per_threadgroup = actual;
    p.dispatch_threads_per_threadgroup = size;
    p.threadgroups_per_grid = groups;
    p.thread_index_in_threadgroup = i;
    p.thread_index_in_simdgroup = f.lane;
    p.simdgroup_index_in_threadgroup = f.simd;
    p.simdgroups_per_threadgroup = group_simds;
    p.dispatch_simdgroups_per_threadgroup = (size.x * size.y * size.z + LANES - 1) / LANES;
    p.threads_per_simdgroup = p.thread_execution_width = LANES;
    void** top = reinterpret_cast<void**>(f.stack + STACK - 64);
    *--top = nullptr;  // alignment: emu_start begins as if called
    *--top = reinterpret_cast<void*>(emu_start);
    for (int k = 0; k < 6; k++) *--top = nullptr;
    f.stack_pointer = top;
  }
  std::vector<uint> simd_order(group_simds), lane_order(LANES);
  for (uint i = 0; i < group_simds; i++) simd_order[i] = i;
  for (uint i = 0; i < LANES; i++) lane_order[i] = i;
  std::shuffle(simd_order.begin(), simd_order.end(), random);
  std::shuffle(lane_order.begin(), lane_order.end(), random);
  for (;;) {
    bool progress = false, done = true;
    for (uint s : simd_order) {
      for (bool again = true; again;) {
        again = false;
        for (uint lane : lane_order) {
          const uint i = s * LANES + lane;
          if (i >= group_threads || !runnable(fibers[i])) continue;
          if (!run(fibers[i])) return false;
          again = progress = true;
        }
      }
    }
    for (uint i = 0; i < group_threads; i++) done &= fibers[i].state == RETURNED;
    if (done) return true;
    if (!progress) {
      describe_deadlock();
      return false;
    }
  }
}

}  // namespace

extern "C" {

uint emu_lane() { return current->lane; }

void emu_fail(const char* text, int line) { fail(nullptr, line, "%s", text); }

uint emu_exchange(int operation, int line, const void* mine, void* all, uint bytes) {
  Simd& simd = simds[current->simd];
  if (bytes > sizeof simd.slots[0] / LANES) fail(nullptr, line, "a SIMD-group operation on more than 32 bytes");
  if (simd.arrived == 0) {
    simd.operation = operation;
    simd.line = line;
    simd.first = current->index;
  } else if (simd.operation != operation || simd.line != line) {
    fail(nullptr, line, "divergent: at %s (line %d) while thread %u of the SIMD-group is at %s (line %d)", OPERATIONS[operation], line,
         simd.first, OPERATIONS[simd.operation], simd.line);
  }
  const uint32_t generation = simd.generation;
  const uint half_of = generation & 1;
  memcpy(simd.slots[half_of] + current->lane * bytes, mine, bytes);
  if (operation == OP_BARRIER) memcpy(&simd.flags, mine, sizeof simd.flags);
  if (++simd.arrived == simd.live) {
    complete(simd);
  } else {
    current->state = AT_SIMD;
    current->generation = generation;
    current->where = OPERATIONS[operation];
    current->line = line;
    to_scheduler();
  }
  memcpy(all, simd.slots[half_of], LANES * bytes);
  return simd.took_part[half_of];
}

void emu_simd_barrier(uint flags, int line) {
  uint all[LANES];
  emu_exchange(OP_BARRIER, line, &flags, all, sizeof flags);
}

void emu_group_barrier(uint flags, int line) {
  if (group_arrived == 0) {
    group_line = line;
    group_first = current->index;
  } else if (group_line != line) {
    fail(nullptr, line, "divergent: at threadgroup_barrier (line %d) while thread %u is at threadgroup_barrier (line %d)", line, group_first,
         group_line);
  }
  const uint32_t generation = group_generation;
  if (++group_arrived == group_threads) {
    group_arrived = 0;
    group_generation++;
    now++;
    if (flags & MEMORY_THREADGROUP) group_synced = now;
    if (flags & MEMORY_DEVICE) group_synced_device = now;
    return;
  }
  current->state = AT_GROUP;
  current->generation = generation;
  current->where = "threadgroup_barrier";
  current->line = line;
  to_scheduler();
}

void* emu_threadgroup(uint index, uint bytes, uint alignment) {
  for (const Array& a : group_arrays)
    if (a.index == index) return group_memory + a.offset;
  group_used += (bytes + 15) / 16 * 16;
  if (group_used > GROUP_MEMORY) fail(nullptr, 0, "threadgroup memory: %u bytes, more than %u", group_used, GROUP_MEMORY);
  group_arrays.push_back({index, group_next + alignment, bytes});  // aligned to its element, to no more
  group_next += (bytes + 15) / 16 * 16 + GAP;
  return group_memory + group_arrays.back().offset;
}

void emu_atomic(const volatile void* address, uint bytes, int) { access(uintptr_t(address), bytes, true, __builtin_return_address(0), true); }

#define CALLBACKS(N)                                                                                         \
  void __asan_load##N##_noabort(uintptr_t a) { access(a, N, false, __builtin_return_address(0)); }           \
  void __asan_store##N##_noabort(uintptr_t a) { access(a, N, true, __builtin_return_address(0)); }
CALLBACKS(1)
CALLBACKS(2)
CALLBACKS(4)
CALLBACKS(8)
CALLBACKS(16)
void __asan_loadN_noabort(uintptr_t a, size_t n) { access(a, n, false, __builtin_return_address(0)); }
void __asan_storeN_noabort(uintptr_t a, size_t n) { access(a, n, true, __builtin_return_address(0)); }
void __asan_handle_no_return() {}
void* __asan_memcpy(void* to, const void* from, size_t n) {
  if (n) access(uintptr_t(from), n, false, __builtin_return_address(0));
  if (n) access(uintptr_t(to), n, true, __builtin_return_address(0));
  return memcpy(to, from, n);
}
void* __asan_memmove(void* to, const void* from, size_t n) {
  if (n) access(uintptr_t(from), n, false, __builtin_return_address(0));
  if (n) access(uintptr_t(to), n, true, __builtin_return_address(0));
  return memmove(to, from, n);
}
void* __asan_memset(void* to, int value, size_t n) {
  if (n) access(uintptr_t(to), n, true, __builtin_return_address(0));
  return memset(to, value, n);
}
#define UNDEFINED(NAME, TEXT)                                                                       \
  void __ubsan_handle_##NAME##_minimal() { fail(__builtin_return_address(0), 0, TEXT); }            \
  void __ubsan_handle_##NAME##_minimal_abort() { fail(__builtin_return_address(0), 0, TEXT); }
UNDEFINED(out_of_bounds, "out of bounds: an index outside its array")
UNDEFINED(shift_out_of_bounds, "undefined: shift by the width of the type or more, or by a negative count")
UNDEFINED(divrem_overflow, "undefined: integer division by zero")
UNDEFINED(float_cast_overflow, "undefined: NaN, infinity or a value out of range becomes an integer")
UNDEFINED(type_mismatch, "misaligned: memory is only aligned to its element (an array may be a slice)")
UNDEFINED(builtin_unreachable, "undefined: unreachable code is reached")
UNDEFINED(missing_return, "undefined: a function ends without returning a value")

// Conversions that the compiler calls and that older libgcc lacks: to nearest even.
__bf16 __truncsfbf2(float x) {
  uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  bits = nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
  return __builtin_bit_cast(__bf16, uint16_t(bits >> 16));
}
__bf16 __truncdfbf2(double x) {
  float near = float(x);  // then to odd, so that the next rounding is the only one
  uint32_t bits = __builtin_bit_cast(uint32_t, near);
  if (double(near) != x && __builtin_isfinite(x)) {
    if ((double(near) > x) == (x > 0)) bits--;
    bits |= 1;
  }
  return __truncsfbf2(__builtin_bit_cast(float, bits));
}

struct EmuBuffer {
  const char* name;
  void* data;
  size_t bytes;
  uint element, output;
};

// Run one dispatch. Returns 0, or 1 with a text, and the address (relative to the kernel's image) or the line of the fault.
int emu_run(void* entry, const EmuBuffer* given, uint count, const uint* grid, const uint* size, uint seed, uint64_t limit, char* text,
            uint text_bytes, uint64_t* fault_address, int* fault_line) {
  if (!stacks) {
    stacks = static_cast<uint8_t*>(mmap(nullptr, MAX_THREADS * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    arena = static_cast<uint8_t*>(mmap(nullptr, MAX_BUFFERS * SLOT, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks == MAP_FAILED || arena == MAP_FAILED) {
      snprintf(text, text_bytes, "no address space for the emulation");
      return 1;
    }
  }
  if (count > MAX_BUFFERS) {
    snprintf(text, text_bytes, "%u buffers, but Metal has %u", count, MAX_BUFFERS);
    return 1;
  }
  Dl_info info;
  dladdr(entry, &info);
  image_low = uintptr_t(info.dli_fbase);
  image_high = image_low + (64 << 20);
  error[0] = 0;
  error_pc = nullptr;
  error_line = 0;
  accesses = 0;
  access_limit = limit;
  entry_point = entry;
  group_arrays.clear();
  group_used = group_next = 0;
  buffers.clear();
  std::vector<void*> pointers;
  for (uint i = 0; i < count; i++) {
    uint8_t* const start = arena + i * SLOT + SLOT / 2;
    uint8_t* const at = start + given[i].element;  // as a slice of an array may lie: aligned to its element, to no more
    const size_t need = (given[i].bytes + given[i].element + 4095) & ~size_t(4095);
    if (need > committed[i]) {
      if (need > SLOT / 4 || mmap(start, need, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) {
        snprintf(text, text_bytes, "a buffer of %zu bytes is too large for the emulation", given[i].bytes);
        return 1;
      }
      committed[i] = need;
    }
    if (given[i].output) memset(at, 0xA5, given[i].bytes);
    else memcpy(at, given[i].data, given[i].bytes);
    buffers.push_back({given[i].name, at, given[i].bytes, given[i].element, given[i].output != 0, {}});
    if (given[i].output) buffers.back().record.assign(given[i].bytes, Access{});
    pointers.push_back(at);
  }
  entry_buffers = pointers.data();
  std::mt19937 random(seed);
  const uint3 all = {grid[0], grid[1], grid[2]};
  const uint3 each = {std::min(size[0], grid[0]), std::min(size[1], grid[1]), std::min(size[2], grid[2])};
  const uint3 groups = (all + each - 1) / each;
  std::vector<uint> order(groups.x * groups.y * groups.z);
  for (uint i = 0; i < order.size(); i++) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  group_base = 0;
  group_threads = 0;
  bool fine = true;
  const unsigned control = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(control | FLUSH_DENORMALS);
  for (uint i : order) {
    group_base += group_threads;
    fine = run_group(uint3{i % groups.x, i / groups.x % groups.y, i / (groups.x * groups.y)}, all, each, random);
    if (!fine) break;
  }
  __builtin_ia32_ldmxcsr(control);
  if (fine) {
    for (uint i = 0; i < count && fine; i++) {
      Buffer& b = buffers[i];
      if (!b.output) continue;
      for (size_t k = 0; k < b.bytes && fine; k++) {
        if (b.record[k].written != NEVER) continue;
        snprintf(error, sizeof error, "unwritten: no thread writes %s, of %zu elements", element_name(b, intptr_t(k)).c_str(), b.bytes / b.element);
        fine = false;
      }
      if (fine) memcpy(given[i].data, b.data, b.bytes);
    }
  }
  if (fine) return 0;
  snprintf(text, text_bytes, "%s", error);
  *fault_address = error_pc ? uint64_t(uintptr_t(error_pc) - image_low) : 0;
  *fault_line = error_line;
  return 1;
}

}  // extern "C"
