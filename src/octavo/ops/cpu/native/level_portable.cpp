// Any CPU that the compiler targets by default.
#define LEVEL octavo_portable
#include "kernels.h"

#if 1
#include "level.h"
const Kernels* kernels_portable() { return &octavo_portable::TABLE; }
#else
const Kernels* kernels_portable() { return nullptr; }
#endif
