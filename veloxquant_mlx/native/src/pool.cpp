#include "pool.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvtool {
namespace {

constexpr int SPINS = 4000;  // some 50 us

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int threads) {
  for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(sleep_);
    stop_ = true;
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::take(int thread) {
  for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) (*item_)(i, thread);
}

void Pool::run(int count, const Item& item) {
  std::unique_lock<std::mutex> only(busy_, std::try_to_lock);
  if (!only || workers_.empty() || count < 2) {
    // Any thread number serves a caller that runs alone, for its scratch is its own.
    for (int i = 0; i < count; i++) item(i, 0);
    return;
  }
  item_ = &item, count_ = count;
  next_.store(0, std::memory_order_relaxed);
  {
    std::lock_guard<std::mutex> lock(sleep_);
    open_ = job_.load() + 1;
    job_ = open_.load();
  }
  wake_.notify_all();
  take(0);
  // Whoever entered before it closed may still be at an item; whoever comes later finds it closed, and touches nothing of it.
  open_ = 0;
  for (int i = 0; active_ > 0; i++) i < SPINS ? relax() : std::this_thread::yield();
}

void Pool::work(int thread) {
  uint64_t done = 0;
  while (true) {
    for (int i = 0; i < SPINS && job_.load(std::memory_order_acquire) == done && !stop_; i++) relax();
    if (job_.load(std::memory_order_acquire) == done) {
      std::unique_lock<std::mutex> lock(sleep_);
      wake_.wait(lock, [&] { return stop_ || job_.load(std::memory_order_acquire) != done; });
    }
    if (stop_) return;
    done = job_.load(std::memory_order_acquire);
    active_++;
    if (open_ == done) take(thread);
    active_--;
  }
}

}  // namespace kvtool
