"""The optional native kernels (asyncrl/models/native.cpp and vectors.h). Everything else of the package is in pyproject.toml.

Where there is no compiler, or none for x86-64, the build goes on without them: `optional` turns its errors into a warning,
and the torch code of their callers runs.
"""

import zlib
from pathlib import Path

from setuptools import Extension, setup

FLAGS = ["-O3", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions", "-fno-rtti"]
QUIET = ["-g0", "-Wno-psabi"]
SOURCE, HEADER = "asyncrl/models/native.cpp", "asyncrl/models/vectors.h"
TEXT = Path(SOURCE).read_bytes() + Path(HEADER).read_bytes()
STAMP = f"-DASYNCRL_SOURCE={zlib.crc32(TEXT)}u"  # native.py refuses what was built of another text


def kernels(name: str, *machine: str) -> Extension:
    return Extension(
        f"asyncrl.models.{name}",
        [SOURCE],
        depends=[HEADER],
        extra_compile_args=[*FLAGS, *QUIET, STAMP, *machine],
        extra_link_args=["-fopenmp"],
        language="c++",
        optional=True,
    )


setup(
    ext_modules=[
        kernels("_native_avx2", "-march=x86-64-v3"),
        kernels("_native_avx512", "-march=x86-64-v4", "-mprefer-vector-width=512"),
    ]
)
