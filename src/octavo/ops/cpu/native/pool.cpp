#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
static inline void pause() { _mm_pause(); }
#elif defined(__aarch64__)
static inline void pause() { asm volatile("yield"); }
#else
static inline void pause() {}
#endif

// Long enough for the serial stretches inside a step, short enough that an idle engine costs nothing: some 50 microseconds.
static constexpr int SPINS = 2000;

static constexpr uint64_t LOW = 0xffffffff;

Pool::Pool(int threads) {
    try {
        for (int i = 1; i < threads; i++) workers_.emplace_back([this] { work(); });
    } catch (...) {  // the system starts no more
        end();
        throw;
    }
}

Pool::~Pool() { end(); }

void Pool::end() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void Pool::share(int64_t count, int64_t chunk, Call call, const void* body) {
    const int64_t pieces = (count + chunk - 1) / chunk;
    call_ = call;
    body_ = body;
    count_ = count;
    chunk_ = chunk;
    done_.store(0, std::memory_order_relaxed);
    ticket_.store((uint64_t)pieces << 32, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst)) {
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    while (take()) {}
    for (int spins = 0; done_.load(std::memory_order_acquire) != pieces; spins++) {
        if (spins < SPINS) pause();
        else std::this_thread::yield();
    }
}

bool Pool::open() const {
    const uint64_t ticket = ticket_.load(std::memory_order_seq_cst);
    return (ticket & LOW) < ticket >> 32;
}

bool Pool::take() {
    const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
    if ((ticket & LOW) >= ticket >> 32) return false;
    const int64_t begin = (int64_t)(ticket & LOW) * chunk_, end = begin + chunk_ < count_ ? begin + chunk_ : count_;
    for (int64_t i = begin; i < end; i++) call_(body_, i);
    done_.fetch_add(1, std::memory_order_release);
    return true;
}

void Pool::work() {
    while (!stop_.load(std::memory_order_relaxed)) {
        for (int spins = 0; spins < SPINS; spins++) {
            if (open() && take()) spins = 0;
            else pause();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] { return stop_ || open(); });
        asleep_.fetch_sub(1, std::memory_order_relaxed);
    }
}
