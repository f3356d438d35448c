// The table of one level. Included by each level_*.cpp after it has defined LEVEL; compiled with that level's flags.
//
// Nothing with external linkage but the table's getter may come from here: a shared inline function compiled for AVX-512 would
// be the one that the linker keeps for everybody.
#pragma once

#include "attention.h"
#include "matmul.h"
#include "rows.h"

namespace LEVEL {

static const Kernels TABLE = {panel,     embed_row,       round_row, rms_norm,     add,      rope,
                              gated_mul, store_key_value, attend,      scale_logits, exp_sums, finish_logits};

}  // namespace LEVEL
