// Threads that share loops. Between the many short loops of a step they spin for a while; between steps they sleep.
//
// The caller waits for no thread that has not taken a piece of the loop: one that the system has put aside (the machine is
// busy) costs its share of the work, and no more.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

class Pool {
  public:
    explicit Pool(int threads);  // throws where the system does not start so many
    ~Pool();
    Pool(const Pool&) = delete;

    int threads() const { return (int)workers_.size() + 1; }

    // body(i) for every i in [0, count), in any order, on any thread; returns when all are done. A thread takes `chunk`
    // consecutive numbers at a time. Not to be called from two threads at once, nor from a body.
    template <class Body>
    void run(int64_t count, int64_t chunk, const Body& body) {
        if (count <= 0) return;
        if (workers_.empty() || count <= chunk) {
            for (int64_t i = 0; i < count; i++) body(i);
            return;
        }
        share(count, chunk, [](const void* b, int64_t i) { (*static_cast<const Body*>(b))(i); }, &body);
    }

  private:
    using Call = void (*)(const void*, int64_t);

    void share(int64_t count, int64_t chunk, Call call, const void* body);
    bool take();
    bool open() const;
    void work();
    void end();

    std::vector<std::thread> workers_;
    // The loop being shared. Written before the ticket is, and read only by who holds a piece: the loop cannot end before.
    Call call_ = nullptr;
    const void* body_ = nullptr;
    int64_t count_ = 0, chunk_ = 1;
    // Pieces of the loop in the high half, the next one to take in the low half.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<int> asleep_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
};
