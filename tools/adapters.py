"""Runs the test of each adapter (examples/adapters) against the real package, in an environment of its own.

    python tools/adapters.py                  # all
    python tools/adapters.py verifiers mcp    # some; further arguments after -- go to pytest

The packages do not install together: verifiers wants another mcp than the newest, for example. An environment is made at first use
in `.venv-adapters/NAME` (ASYNCRL_ADAPTERS names another folder). It adds the adapter's packages to those of this interpreter, so
torch is not installed again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(os.environ.get("ASYNCRL_ADAPTERS", ROOT / ".venv-adapters"))
# adapter -> arguments of pip, call by call
PACKAGES: dict[str, list[str]] = {
    "mcp": ["mcp==2.3.*"],
    "openenv": ["openenv==0.10.*"],
    "reasoning_gym": ["reasoning-gym==0.1.25"],
    "skyrl_gym": ["skyrl-gym==0.4.*"],
    "textarena": ["textarena==0.7.*"],
    # Without its dependencies: it wants a tml-renderers that is not published, and the form of an environment needs little of it.
    "tinker": ["tinker==0.38.*", "chz", "--no-deps tinker-cookbook==0.6.*"],
    "trl": ["trl==1.16.*"],
    "verifiers": ["verifiers==0.4.*"],
    # Without its dependencies: it wants another transformers, and the functions of rewards need little of it.
    "verl": ["ray", "tensordict<=0.10", "omegaconf", "codetiming", "--no-deps verl==0.9.*"],
}


def python_of(name: str) -> Path:
    """The interpreter of the environment, which is made if it is not there."""
    folder = FOLDER / name
    python = folder / "bin/python"
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        paths = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
        site = folder / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
        (site / "base.pth").write_text("\n".join(paths), encoding="utf-8")
        for packages in PACKAGES[name]:
            command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages.split()]
            subprocess.run(command, check=True)
        (folder / "ready").touch()
    return python


def main(arguments: list[str]) -> int:
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    names, options = arguments[:cut] or list(PACKAGES), arguments[cut + 1 :]
    if unknown := set(names) - set(PACKAGES):
        print(f"no adapter is named {', '.join(sorted(unknown))}; the adapters are {', '.join(PACKAGES)}")
        return 2
    failed = []
    for name in names:
        test = f"tests/adapters/test_adapters_{name}.py"
        command = [python_of(name), "-m", "pytest", "-q", "-p", "no:cacheprovider", test, *options]
        print(f"{name}: {' '.join(PACKAGES[name])}", flush=True)
        if subprocess.run(command, cwd=ROOT).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else f"passed: {', '.join(names)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
