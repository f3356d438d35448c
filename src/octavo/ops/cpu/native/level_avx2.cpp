// x86-64 with AVX2, FMA and F16C (x86-64-v3).
#define LEVEL octavo_avx2
#include "kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "level.h"
const Kernels* kernels_avx2() { return &octavo_avx2::TABLE; }
#else
const Kernels* kernels_avx2() { return nullptr; }
#endif
