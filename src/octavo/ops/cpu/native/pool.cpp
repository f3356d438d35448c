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
// Where there are more threads than free cores, the one waited for needs the core of the one that waits.
static constexpr int SPINS_BEFORE_YIELD = 4000;

Pool::Pool(int threads) {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this] { work(); });
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
        generation_++;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void Pool::share(int64_t count, int64_t chunk, Call call, const void* body) {
    call_ = call;
    body_ = body;
    count_ = count;
    chunk_ = chunk;
    next_.store(0, std::memory_order_relaxed);
    busy_.store((int)workers_.size(), std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst)) {
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    take();
    for (int spins = 0; busy_.load(std::memory_order_acquire); spins++) {
        if (spins < SPINS_BEFORE_YIELD) pause();
        else std::this_thread::yield();
    }
}

void Pool::take() {
    const int64_t count = count_, chunk = chunk_;
    for (;;) {
        int64_t i = next_.fetch_add(chunk, std::memory_order_relaxed);
        if (i >= count) return;
        for (int64_t end = i + chunk < count ? i + chunk : count; i < end; i++) call_(body_, i);
    }
}

void Pool::work() {
    uint64_t seen = 0;
    for (;;) {
        for (int spins = 0; spins < SPINS && generation_.load(std::memory_order_acquire) == seen; spins++) pause();
        if (generation_.load(std::memory_order_acquire) == seen) {
            std::unique_lock<std::mutex> lock(mutex_);
            asleep_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(lock, [&] { return generation_.load(std::memory_order_seq_cst) != seen; });
            asleep_.fetch_sub(1, std::memory_order_relaxed);
        }
        seen = generation_.load(std::memory_order_acquire);
        if (stop_) return;
        take();
        busy_.fetch_sub(1, std::memory_order_release);
    }
}
