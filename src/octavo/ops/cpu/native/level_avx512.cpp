// x86-64 with AVX-512 F, BW, DQ, VL and VNNI.
#define LEVEL octavo_avx512
#include "kernels.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include "level.h"
const Kernels* kernels_avx512() { return &octavo_avx512::TABLE; }
#else
const Kernels* kernels_avx512() { return nullptr; }
#endif
