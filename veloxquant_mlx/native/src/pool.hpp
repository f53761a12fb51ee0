// Threads that stay: a job of numbered items, which the caller and they take one by one.
//
// They spin for a moment before they sleep, for the next layer's job comes soon. One job runs at a time; a caller that finds another's
// running does its own alone. A job ends when its items are done, whether or not the system ever ran a thread meanwhile.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace kvtool {

class Pool {
 public:
  using Item = std::function<void(int item, int thread)>;

  explicit Pool(int threads);  // with the caller
  ~Pool();
  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls item(i, thread) for each i below count; thread is below threads(). Items must not throw.
  void run(int count, const Item& item);

 private:
  void work(int thread);
  void take(int thread);

  std::vector<std::thread> workers_;
  std::mutex busy_, sleep_;
  std::condition_variable wake_;
  std::atomic<uint64_t> job_{0};   // number of the newest
  std::atomic<uint64_t> open_{0};  // number of the one that still takes threads, or 0
  std::atomic<int> next_{0}, active_{0};
  std::atomic<bool> stop_{false};
  const Item* item_ = nullptr;
  int count_ = 0;
};

}  // namespace kvtool
