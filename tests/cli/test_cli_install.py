"""What an installed package is and says of itself: version, names, licence, examples, missing native kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import asyncrl
from asyncrl.cli.app import main

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def wheel(folder: Path, tree: Path, *names: str) -> Path:
    """The content of a wheel of these files of `tree`, built where there is no compiler."""
    source = folder / "source"
    source.mkdir()
    for name in names:
        (source / name).symlink_to(tree / name)
    pip = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", "-q", "-w", str(folder)]
    run(*pip, str(source), cwd=folder, CC="/bin/false", CXX="/bin/false")
    [built] = folder.glob("*.whl")
    with zipfile.ZipFile(built) as content:
        content.extractall(folder / "site")
    return folder / "site"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = ("asyncrl", "examples", "LICENSE", "README.md", "pyproject.toml", "setup.py")
    return wheel(tmp_path_factory.mktemp("wheel"), ROOT, *names)


def test_a_wheel_has_version_licence_and_examples(installed: Path) -> None:
    [about] = installed.glob("asyncrl-*.dist-info")
    assert about.name == f"asyncrl-{asyncrl.__version__}.dist-info"
    assert (about / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert "asyncrl = asyncrl.cli.app:main\n" in (about / "entry_points.txt").read_text()
    metadata = (about / "METADATA").read_text()
    assert "License-Expression: Apache-2.0\n" in metadata and f"\nVersion: {asyncrl.__version__}\n" in metadata
    theirs, ours = installed / "asyncrl" / "examples", ROOT / "examples"
    wanted = {path.relative_to(ours) for path in ours.rglob("*") if path.suffix in (".py", ".yaml")}
    assert {path.relative_to(theirs) for path in theirs.rglob("*.*")} == wanted
    assert Path("adapters/from_trl.py") in wanted
    assert not list(installed.rglob("*.so"))
    hint = "from asyncrl.builds import install_command; print(install_command('http'))"
    assert run("-c", hint, cwd=installed, PYTHONPATH=str(installed)) == "pip install 'asyncrl[http]'\n"


@pytest.mark.slow
def test_examples_of_an_installed_package_are_copied_and_run(installed: Path, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(installed)}
    app = ("-m", "asyncrl.cli.app")
    assert "next: asyncrl run mine/quickstart.yaml" in run(*app, "examples", "mine", cwd=tmp_path, **environment)
    lines = run(*app, "run", "mine/quickstart.yaml", "train.max_steps=1", cwd=tmp_path, **environment)
    assert "note: there are no native kernels for this machine" in lines and "done: version 1" in lines


def test_the_benchmarks_are_no_part_of_it_and_it_says_how_to_get_them(installed: Path, tmp_path: Path) -> None:
    bare = [sys.executable, "-S", "-m", "asyncrl.cli.app", "bench", "--help"]  # without what else this Python has
    done = subprocess.run(
        bare, cwd=tmp_path, env={"PYTHONPATH": str(installed)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and not done.stdout
    assert "not installed" in done.stderr and "pip install ./tools/bench" in done.stderr
    assert not list(installed.rglob("asyncrl_bench"))


@pytest.mark.slow
def test_the_benchmarks_are_found_where_they_are_installed(installed: Path, tmp_path: Path) -> None:
    benches = wheel(tmp_path, ROOT / "tools" / "bench", "pyproject.toml", "asyncrl_bench")
    [about] = benches.glob("asyncrl_bench-*.dist-info")
    metadata = (about / "METADATA").read_text()
    assert f"\nRequires-Dist: asyncrl=={asyncrl.__version__}\n" in metadata
    assert f"\nVersion: {asyncrl.__version__}\n" in metadata
    quick = ["transport", "--quick", "--sides", "memcpy", "--costs", "--cache", "c", "--out", "."]
    paths = f"{installed}{os.pathsep}{benches}"
    assert "| 16 x 256 | memcpy |" in run("-m", "asyncrl.cli.app", "bench", *quick, cwd=tmp_path, PYTHONPATH=paths)
    assert (benches / "asyncrl_bench" / "peers" / "trl_step.py").exists()


def test_the_benchmarks_of_the_checkout_are_found_from_anywhere(tmp_path: Path) -> None:
    seen = run("-m", "asyncrl.cli.app", "bench", "--help", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert "usage: asyncrl bench [step | generate" in seen


def test_native_kernels_that_are_there_or_were_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrl.models.native import library as native
    from asyncrl.runtime.plan import native_note, plan

    config = asyncrl.load_config([ROOT / "examples" / "quickstart.yaml"], ["model.device=cpu"])
    monkeypatch.setattr(native, "_library", object())
    assert native_note(config) == []
    monkeypatch.setattr(native, "_library", None)
    assert "no native kernels for this machine" in native_note(config)[0]
    assert "native kernels" not in plan(config), "a plan may be of another machine"
    monkeypatch.setenv("ASYNCRL_NATIVE", "0")
    assert "or ASYNCRL_NATIVE is 0" in native_note(config)[0]


def test_version_and_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"asyncrl {asyncrl.__version__}\n"
    names = dir(asyncrl)
    assert {*asyncrl.__all__, "__version__", "__doc__"} <= {*names} and len(names) == len({*names})
    assert [name for name in names if not name.startswith("_")] == sorted(asyncrl.__all__)
    assert all(getattr(asyncrl, name) is not None for name in names)


def test_examples_are_listed_and_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples"]) == 0
    listed = capsys.readouterr().out
    assert "quickstart.yaml " in listed
    for path in (ROOT / "examples").glob("*.py"):
        assert f"{path.name} " in listed
    (tmp_path / "tool_loop.py").write_text("mine")
    assert main(["examples", str(tmp_path)]) == 2
    assert "has tool_loop.py already; nothing was copied" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["tool_loop.py"]
    assert main(["examples", "--what"]) == 2
