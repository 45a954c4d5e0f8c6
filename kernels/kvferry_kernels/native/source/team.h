// The threads that compute one call.
//
// They are those of the OpenMP library that torch uses, taken through its C entry point: two pools on the same cores would
// wait for each other. A call enters once; its loops are separated by barriers of our own that spin for a short while only
// and then sleep, so that on a machine with other work a waiting thread leaves its core to the one that it waits for.
#pragma once

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#include <atomic>

#include "vectors.h"

extern "C" {

// `parallel` is GOMP_parallel or null: then `count` must be 1.
struct kvf_threads {
  void (*parallel)(void (*body)(void*), void* data, unsigned count, unsigned flags);
  int (*thread_number)();
  int (*team_size)();
  int32_t count;
};
}

namespace kvf {

constexpr int SPINS = 2000;  // pauses before a waiting thread sleeps: some tens of microseconds

KVF_INLINE void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct alignas(64) Shared {
  alignas(64) std::atomic<int64_t> next{0};
  alignas(64) std::atomic<int32_t> arrived{0};
  alignas(64) std::atomic<int32_t> round{0};
  std::atomic<int32_t> sleeping{0};

  // Returns when the round is over, or for no reason.
  void sleep(int32_t current) {
#if defined(__linux__)
    // Whoever ends the round looks at `sleeping` after it, and the kernel at `round` before it sleeps: no wake is lost.
    sleeping.fetch_add(1);
    syscall(SYS_futex, reinterpret_cast<int32_t*>(&round), FUTEX_WAIT_PRIVATE, current, nullptr, nullptr, 0);
    sleeping.fetch_sub(1);
#else
    (void)current;
    sched_yield();
#endif
  }

  void end_round(int32_t current) {
    round.store(current + 1);
#if defined(__linux__)
    if (sleeping.load() > 0) {
      syscall(SYS_futex, reinterpret_cast<int32_t*>(&round), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
    }
#endif
  }
};

// One thread's view of the team.
class Member {
 public:
  Member(Shared& shared, int number, int size) : shared_(shared), number_(number), size_(size) {}

  int number() const { return number_; }

  // The next task of the loop in progress; two calls never give the same.
  KVF_INLINE int64_t claim() {
    if (size_ == 1) return own_++;
    return shared_.next.fetch_add(1, std::memory_order_relaxed);
  }

  // Ends a loop: returns when all threads are here, and the count of tasks begins at 0 again.
  KVF_INLINE void barrier() {
    if (size_ == 1) {
      own_ = 0;
      return;
    }
    const int32_t round = shared_.round.load(std::memory_order_relaxed);
    if (shared_.arrived.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      shared_.arrived.store(0, std::memory_order_relaxed);
      shared_.next.store(0, std::memory_order_relaxed);
      shared_.end_round(round);
      return;
    }
    for (int spins = 0; shared_.round.load(std::memory_order_acquire) == round; ++spins) {
      if (spins < SPINS) pause();
      else shared_.sleep(round);
    }
  }

  template <class Body>
  KVF_INLINE void loop(int64_t tasks, Body body) {
    for (int64_t task = claim(); task < tasks; task = claim()) body(task);
    barrier();
  }

 private:
  Shared& shared_;
  int number_;
  int size_;
  int64_t own_ = 0;
};

// Calls body(Member&) in each thread of a team.
template <class Body>
void run_team(const kvf_threads& threads, Body body) {
  Shared shared;
  if (threads.count <= 1 || threads.parallel == nullptr) {
    Member alone(shared, 0, 1);
    body(alone);
    return;
  }
  struct Call {
    Shared* shared;
    const kvf_threads* threads;
    Body* body;
  } call{&shared, &threads, &body};
  threads.parallel(
      [](void* data) {
        const Call& given = *static_cast<Call*>(data);
        // The library may give fewer threads than were asked for.
        Member member(*given.shared, given.threads->thread_number(), given.threads->team_size());
        (*given.body)(member);
      },
      &call, static_cast<unsigned>(threads.count), 0);
}

}  // namespace kvf
