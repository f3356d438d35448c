// GGUF's blocks that are packed by way of simpler ones, or as numbers of 16 bits.
#pragma once

#include <cstdint>

#include "abi.h"

enum : int32_t {        // blocks of 36 bytes that no file has: two float16, then 32 numbers of 8 bits
    BLOCK_MINIMUM = 100,  // a scale and a minimum
    BLOCK_HALVES = 101,   // a scale for 16 numbers each
};

struct Conversion {
    int32_t to;        // SOURCE_* or BLOCK_*: what a block becomes blocks or numbers of
    int32_t values;    // of a block
    int32_t bytes;     // of a block as it is stored
    int32_t to_bytes;  // of what it becomes
    void (*convert)(const uint8_t* block, uint8_t* to);
};

const Conversion* conversion_of(int32_t source);  // null: packed as it is
