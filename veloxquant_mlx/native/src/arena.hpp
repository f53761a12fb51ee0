// Memory for the numbers of a call, which the thread that makes it keeps for its next one: fresh pages cost more than writing to them.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace kvtool {

class Arena {
 public:
  // So many values, aligned to a cache line; whatever is in them.
  template <class T>
  T* take(size_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    while (at_ < pages_.size() && used_ + bytes > pages_[at_].size) at_++, used_ = 0;
    if (at_ == pages_.size()) pages_.push_back(Page(std::max(bytes, PAGE)));
    T* found = reinterpret_cast<T*>(pages_[at_].data.get() + used_);
    used_ += bytes;
    return found;
  }

  // Nothing that was taken is in use any more.
  void reset() { at_ = used_ = 0; }

  // Keep no more than a small call needs.
  void shrink() {
    reset();
    size_t kept = 0, pages = 0;
    while (pages < pages_.size() && kept + pages_[pages].size <= KEPT) kept += pages_[pages++].size;
    pages_.resize(pages);
  }

 private:
  static constexpr size_t PAGE = 1 << 20, KEPT = 8 << 20;
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  struct Page {
    size_t size;
    std::unique_ptr<char, Free> data;
    explicit Page(size_t bytes) : size(bytes), data(static_cast<char*>(std::aligned_alloc(64, bytes))) {
      if (!data) throw std::bad_alloc();
    }
    Page() : size(0) {}  // for resize
  };

  std::vector<Page> pages_;
  size_t at_ = 0, used_ = 0;
};

}  // namespace kvtool
