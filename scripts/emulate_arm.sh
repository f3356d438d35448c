#!/bin/sh
# The compiled CPU kernels on emulated ARM processors, with the dot product instructions and without: the right level is chosen, and
# every level is right. Needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user).
set -eu
native=src/octavo/ops/cpu/native
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags="-O2 -std=c++17 -Wall -Wextra -Werror -Wno-psabi -fno-math-errno -fno-trapping-math -ffp-contract=off -I $native"
for source in "$native"/*.cpp tests/ops/cpu/native/levels.cpp; do
    level=""
    [ "$(basename "$source")" = level_neon.cpp ] && level="-march=armv8.2-a+dotprod"
    aarch64-linux-gnu-g++ $flags $level -c "$source" -o "$work/$(basename "$source" .cpp).o"
done
aarch64-linux-gnu-g++ -static -pthread "$work"/*.o -o "$work/levels"
echo "with dot products:"
qemu-aarch64 -cpu neoverse-n1 "$work/levels" neon
echo "without:"
qemu-aarch64 -cpu cortex-a53 "$work/levels" portable
