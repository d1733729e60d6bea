"""The optional native part: the kernels (asyncrl/models/native/native.cpp). Everything else of the package is in pyproject.toml,
but the examples in a wheel.

Where there is no compiler, or none for x86-64, the build goes on without them: `optional` turns its errors into a warning,
and the torch code of their callers runs.
"""

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))
from asyncrl.builds import checksum  # a build in isolation does not search this folder

FLAGS = ["-O3", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions", "-fno-rtti"]
QUIET = ["-g0", "-Wno-psabi"]
KERNELS = ["asyncrl/models/native/native.cpp", "asyncrl/models/native/vectors.h"]
# builds.py refuses what was built of another text.
SOURCE = f"-DASYNCRL_SOURCE={checksum([Path(text) for text in KERNELS])}u"


def kernels(name: str, *machine: str) -> Extension:
    return Extension(
        f"asyncrl.models.native.{name}",
        KERNELS[:1],
        depends=KERNELS[1:],
        extra_compile_args=[*FLAGS, *QUIET, SOURCE, *machine],
        extra_link_args=["-fopenmp"],
        language="c++",
        optional=True,
    )


class WithExamples(build_py):
    """A wheel has the examples too, for `asyncrl examples`. An editable installation finds them where they are."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "asyncrl", "examples")
            shutil.copytree("examples", target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


if __name__ == "__main__":
    setup(
        cmdclass={"build_py": WithExamples},
        options={"build_ext": {"parallel": 2}},
        ext_modules=[
            kernels("_native_avx2", "-march=x86-64-v3"),
            kernels("_native_avx512", "-march=x86-64-v4", "-mprefer-vector-width=512"),
        ],
    )
