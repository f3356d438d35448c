// GGUF's blocks that are packed by way of simpler ones, or as numbers of 16 bits.
#pragma once

#include <cstdint>

#include "abi.h"

struct Conversion {
    int32_t to;        // SOURCE_*: what a block becomes blocks or numbers of
    int32_t values;    // of a block
    int32_t bytes;     // of a block as it is stored
    int32_t to_bytes;  // of what it becomes
    void (*convert)(const uint8_t* block, uint8_t* to);
};

const Conversion* conversion_of(int32_t source);  // null: packed as it is
