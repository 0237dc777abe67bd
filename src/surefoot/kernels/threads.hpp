// How the threads share a piece of work, and when one of them works alone.

#pragma once

#include <ATen/Parallel.h>
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <vector>

#ifndef SUREFOOT_NAMESPACE
#define SUREFOOT_NAMESPACE surefoot
#endif

namespace SUREFOOT_NAMESPACE {  // one instance per library: a process may hold these kernels for several instruction sets

// Notices that the cores are taken. All threads leave a piece of work together, so that one whose core is busy with another
// job keeps all the others waiting for its turn, several milliseconds at every piece: two threads then give a tenth of one.
// Where more is lost by waiting than the additional threads can bring, the calling thread works alone for a while, and after
// every failed attempt twice as long. The results do not depend on it: no sum is split between threads.
//
// Times in nanoseconds. Several threads may call; what they lose to one another is a measurement.
class Competition {
 public:
  static constexpr int64_t MILLISECOND = 1000000;
  static constexpr int64_t NOTICED = MILLISECOND / 3;  // shorter waits are uneven parts, not somebody else's turn
  static constexpr int64_t BURST = 10 * MILLISECOND;   // lost before anything is done: a hiccup is not a competitor
  static constexpr int64_t SHORTEST = 50 * MILLISECOND, LONGEST = 1000 * MILLISECOND;  // pauses of the other threads
  static constexpr int64_t CALM = 200 * MILLISECOND;   // after a pause, without another: the competitor has gone

  // Whether all threads take part in what starts now.
  bool together(int64_t now) const { return now >= until_.load(std::memory_order_relaxed); }

  // A piece of work by `threads` threads ended now after `elapsed`, the first of them having waited `waited` for the last.
  void account(int threads, int64_t now, int64_t elapsed, int64_t waited) {
    if (waited < NOTICED || 2 * waited < elapsed) waited = 0;
    const int64_t last = last_.exchange(now, std::memory_order_relaxed);
    // T threads lose nothing against one while they wait for less than 1 - 1/T of the time; half a thread more is margin.
    const int64_t tolerated = std::min(now - last, BURST) * (2 * threads - 3) / (2 * threads);
    const int64_t lost = std::max<int64_t>(0, lost_.load(std::memory_order_relaxed) + waited - std::max<int64_t>(0, tolerated));
    lost_.store(lost, std::memory_order_relaxed);
    const int64_t until = until_.load(std::memory_order_relaxed);
    if (lost <= BURST) return;
    const int64_t pause = now - until < CALM && until ? std::min(LONGEST, 2 * pause_.load(std::memory_order_relaxed)) : SHORTEST;
    pause_.store(pause, std::memory_order_relaxed);
    until_.store(now + pause, std::memory_order_relaxed);
    lost_.store(0, std::memory_order_relaxed);
    pauses_.fetch_add(1, std::memory_order_relaxed);
  }

  int64_t pauses() const { return pauses_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> until_ = 0, pause_ = SHORTEST, last_ = 0, lost_ = 0, pauses_ = 0;
};

inline Competition competition;
inline std::atomic<bool> adaptive = true;  // whether `competition` is asked

inline int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The threads of one piece of work of `parts` pieces: all of them, or the calling one alone where there is little to do or the
// cores are taken. Never some of them: libgomp ends those that a smaller team has no place for, and the next team of all has to
// start them again.
class Team {
 public:
  Team(int64_t parts, int64_t work) : size_(parts < 2 || work < 32768 ? 1 : at::get_num_threads()) {
    if (size_ == 1 || !adaptive.load(std::memory_order_relaxed)) return;
    start_ = nanoseconds();
    if (!competition.together(start_)) size_ = 1;
  }
  ~Team() {  // after the threads have met
    if (size_ == 1 || start_ == 0) return;
    const int64_t end = nanoseconds();
    competition.account(size_, end, end - start_, end - first_.load(std::memory_order_relaxed));
  }
  Team(const Team&) = delete;

  int size() const { return size_; }
  void done() {  // called by every thread before it waits for the others
    if (!arrived_.exchange(true, std::memory_order_relaxed)) first_.store(nanoseconds(), std::memory_order_relaxed);
  }

 private:
  int size_;
  int64_t start_ = 0;
  std::atomic<int64_t> first_ = std::numeric_limits<int64_t>::max();
  std::atomic<bool> arrived_ = false;
};

}  // namespace SUREFOOT_NAMESPACE

namespace {

using SUREFOOT_NAMESPACE::Team;

// f(begin, end) over [0, n) in contiguous parts, of which some may be empty.
template <class F>
void split(int64_t n, int64_t work, F f) {
  Team team(n, work);
  if (team.size() == 1) return f((int64_t)0, n);
#pragma omp parallel num_threads(team.size())
  {
    int64_t t = omp_get_thread_num(), count = omp_get_num_threads();
    f(n * t / count, n * (t + 1) / count);
    team.done();
  }
}

// The same for work that takes long: every thread goes through its part in pieces of an even size and then helps the others,
// so that a core that is slower, or busy with something else, is not waited for longer than one piece takes.
template <class F>
void share(int64_t n, int64_t work, F f) {
  Team team(n, work);
  const int64_t threads = team.size(), piece = std::max<int64_t>(2, n / threads / 16 * 2);
  if (threads == 1) return f((int64_t)0, n);
  struct alignas(64) Part {
    std::atomic<int64_t> next;
    int64_t end;
  };
  std::vector<Part> parts(threads);
  for (int64_t t = 0; t < threads; ++t) {
    parts[t].next = n * t / threads;
    parts[t].end = n * (t + 1) / threads;
  }
#pragma omp parallel num_threads((int)threads)
  {
    const int64_t mine = omp_get_thread_num();
    for (int64_t t = 0; t < threads; ++t) {
      Part& part = parts[(mine + t) % threads];
      for (int64_t begin; (begin = part.next.fetch_add(piece)) < part.end;) f(begin, std::min(part.end, begin + piece));
    }
    team.done();
  }
}

}  // namespace
