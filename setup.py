"""Builds the CPU kernels. Everything else about the package is in pyproject.toml.

The extension is optional: where there is no C++ compiler, the package installs without it and runs on torch's kernels.
"""

import hashlib
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("src/octavo/ops/cpu/native")
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni")), "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
DOT_PRODUCT = {"level_neon": ["-march=armv8.2-a+dotprod"]}
LEVELS = {
    "x86_64": {"level_avx2": AVX2, "level_avx512": AVX512},
    "aarch64": DOT_PRODUCT,
    "arm64": DOT_PRODUCT,  # as macOS calls it
}
"""Machine -> source file -> flags. Each level is chosen at run time by what the CPU can do; the rest is compiled for any CPU."""
FLAGS = ["-O3", "-g0", "-std=c++17", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-Wno-psabi"]


class BuildKernels(build_ext):
    """Compiles each source with the flags of its level."""

    def build_extension(self, ext: Extension) -> None:
        levels = LEVELS.get(platform.machine(), {})
        compile_one = self.compiler._compile

        def with_level(obj, src, suffix, cc_args, extra, pp_opts):  # type: ignore[no-untyped-def]
            return compile_one(obj, src, suffix, cc_args, [*extra, *levels.get(Path(src).stem, [])], pp_opts)

        self.compiler._compile = with_level
        super().build_extension(ext)
        write_checksum(Path(self.get_ext_fullpath(ext.name)))

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        build_py = self.get_finalized_command("build_py")
        for ext in self.extensions:
            package = build_py.get_package_dir(ext.name.rpartition(".")[0])
            write_checksum(Path(package) / Path(self.get_ext_filename(ext.name)).name)


def write_checksum(library: Path) -> None:
    """Beside a library that was built: who loads one that was damaged since would crash somewhere in it."""
    if library.is_file():
        library.with_name(library.name + ".sha256").write_text(hashlib.sha256(library.read_bytes()).hexdigest() + "\n")


setup(
    ext_modules=[
        Extension(
            "octavo.ops.cpu._native",
            sources=sorted(str(path) for path in NATIVE.glob("*.cpp")),
            depends=sorted(str(path) for path in NATIVE.glob("*.h")),
            include_dirs=[str(NATIVE)],
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
