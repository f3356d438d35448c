#!/bin/sh
# The kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer: `scripts/sanitize_kernels.sh [python]`.
# Builds into a copy of the package, so that the tree's own library stays as it is. Needs g++ with its sanitizer libraries.
set -eu
python=${1:-python3}
case $python in */*) python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") ;; esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r src setup.py pyproject.toml README.md LICENSE tests "$work"
cd "$work"
rm -f src/octavo/ops/cpu/_native*.so
sed -i 's/"-O3"/"-O1"/' setup.py  # with the sanitizers' checks in it, -O3 compiles for minutes
flags="-g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
CXXFLAGS="$flags" CFLAGS="$flags" LDFLAGS="-fsanitize=address,undefined" "$python" setup.py -q build_ext --inplace
library=$(ls "$PWD"/src/octavo/ops/cpu/_native*.so)
# Without Python first: there leaks are seen too.
g++ -O1 -std=c++17 $flags -I src/octavo/ops/cpu/native tests/ops/cpu/native/levels.cpp "$library" -Wl,-rpath,"$(dirname "$library")" -o levels
./levels
# Left out: 100,000 threads, where the sanitizers' own runtime ends the process, and memory that is given back, which they keep for a while.
LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
    PYTHONPATH=src "$python" -m pytest -q -p no:cacheprovider -k "not more_threads_than_the_system_starts and not trimming_gives" \
    tests/ops/cpu tests/unit/attention/test_native_cpu.py tests/models/test_native_batches.py tests/models/test_damaged_gguf.py \
    tests/unit/worker/test_native_steps.py
