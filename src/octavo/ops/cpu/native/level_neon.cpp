// AArch64 with the dot product instructions (ARMv8.2).
#define LEVEL octavo_neon
#include "kernels.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include "level.h"
const Kernels* kernels_neon() { return &octavo_neon::TABLE; }
#else
const Kernels* kernels_neon() { return nullptr; }
#endif
