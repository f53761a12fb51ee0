// The module: the SIMD level and the threads in use, and what the other files bind.
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "bindings.hpp"

namespace kvtool {
namespace {

std::vector<const Level*> levels() {
  std::vector<const Level*> found;
#ifdef KVTOOL_X86
  __builtin_cpu_init();
  const bool two = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512dq");
  if (two && wide) found.push_back(&avx512);
  if (two) found.push_back(&avx2);
#endif
#ifdef KVTOOL_ARM64
  found.push_back(&neon);  // every such machine has it
#endif
  found.push_back(&baseline);
  return found;
}

const Level* current = levels().front();
int wanted_threads = 1;
std::mutex pool_made;
pid_t pool_owner = 0;
// Never destroyed: at exit its threads just end, and a forked child has none of them to join.
std::shared_ptr<Pool>& pool = *new std::shared_ptr<Pool>;

void forget_parents_pool() {
  if (pool && pool_owner != getpid()) new std::shared_ptr<Pool>(std::move(pool));
}

std::atomic<int> within{0};  // changed by who holds the GIL
std::atomic<bool> ending{false};
std::thread::id last;  // who ends the interpreter may still call, from what else is registered for its end

void wait_for_those_within() {
  last = std::this_thread::get_id(), ending = true;
  nb::gil_scoped_release release;
  while (within > 0) std::this_thread::yield();
}

void set_level(const std::string& name) {
  std::string known;
  for (const Level* one : levels()) {
    if (name == one->name) {
      current = one;
      return;
    }
    known += (known.empty() ? "" : ", ") + std::string(one->name);
  }
  refuse("KVTOOL_SIMD", "one of " + known, name);
}

void set_threads(int threads) {
  if (threads < 1 || threads > 1024) refuse("KVTOOL_THREADS", "1 to 1024", std::to_string(threads));
  std::lock_guard<std::mutex> lock(pool_made);
  wanted_threads = threads;
  forget_parents_pool();
  pool.reset();
}

}  // namespace

void expect_writes(void* data, size_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t large = 1 << 21;
  const uintptr_t begin = (uintptr_t(data) + large - 1) / large * large, end = (uintptr_t(data) + bytes) / large * large;
  // A hint: where the system has no large pages, or none left, nothing changes.
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

WithoutGil::WithoutGil() {
  const bool late = ending && std::this_thread::get_id() != last;
  if (!late) within++;
  state_ = PyEval_SaveThread();
  while (late) pause();
}

WithoutGil::~WithoutGil() {
  PyEval_RestoreThread(state_);
  within--;
}

const Level& level() { return *current; }

std::shared_ptr<Pool> the_pool() {
  std::lock_guard<std::mutex> lock(pool_made);
  forget_parents_pool();
  if (!pool) pool = std::make_shared<Pool>(wanted_threads), pool_owner = getpid();
  return pool;
}

}  // namespace kvtool

NB_MODULE(_native, m) {
  using namespace kvtool;
  m.attr("MAX_DIM") = MAX_DIM;
  // A forked child has none of its parent's other threads.
  pthread_atfork(nullptr, nullptr, [] { within = 0; });
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&wait_for_those_within));
  bind_attend(m);
  bind_encode(m);
  bind_convert(m);
  bind_search(m);
  bind_streams(m);
  bind_calibrated(m);
  bind_kernels(m);
  m.attr("SOURCES") = KVTOOL_SOURCES;
  m.def("levels", [] {
    std::vector<std::string> names;
    for (const Level* one : levels()) names.emplace_back(one->name);
    return names;
  });
  m.def("level", [] { return std::string(level().name); });
  m.def("set_level", &set_level);
  m.def("set_threads", &set_threads);
  m.def("threads", [] { return the_pool()->threads(); });
}
