"""Loads user code by its address: `path/to/file.py:name` or `package.module:name`.

Guarantees. A file is loaded as one module, even if another file imports it by name. No caller gets a module that is still loading,
and a module whose load fails is not in `sys.modules`. Every failure is one `ConfigError` with the address and the file or module
that was searched; an error of the user's code is its `__cause__`. This module does not import torch.

Loading **runs** the user's module, so reward functions are loaded in worker processes. The process of the run loads environments,
hooks, models and rows of data. Losses and advantages are loaded with the configuration, because they declare settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import os
import signal
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from asyncrl.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]


def split_address(address: str) -> tuple[str, str]:
    """`"dir/file.py:name"` -> `("dir/file.py", "name")`, also for a module. Errors: `ConfigError` for any other text."""
    place, separator, name = address.rpartition(":")
    if not separator or not place or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{address!r} is not an address of user code; write `file.py:name` or `package.module:name`")
    return place, name


def load_object(address: str) -> Any:
    """The object at `address`. A file path is relative to the working directory. The name may be `Class.attribute`.

    Errors: `ConfigError` for a malformed address, a missing file, module or name, and for an import that raises.
    """
    place, name = split_address(address)
    module = _load_file(address, place) if place.endswith(".py") else _load_module(address, place)
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            raise _missing_name(address, part, vars(module))
        target = getattr(target, part)
    return target


def check_address(address: str) -> None:
    """Checks an address without running user code. Errors: `ConfigError` for a malformed address, a missing file, invalid Python,
    or a file whose code outside of functions lacks the name. Of a module only the form of the address is checked."""
    place, name = split_address(address)
    if not place.endswith(".py"):
        return
    path, outer_name = Path(os.path.expanduser(place)), name.partition(".")[0]
    # For a name that is too long, `os.path.isfile` is False, but `Path.is_file` may raise.
    if not os.path.isfile(path):
        raise ConfigError(f"there is no file {place} (of {address!r}; looked from {Path.cwd()})")
    with warnings.catch_warnings(), user_code(lambda error: ConfigError(f"cannot load {address!r}: {raised(error)}")):
        # `load_object` will show the warnings.
        warnings.simplefilter("ignore")
        text = path.read_bytes()
        used_names = compile(text, place, "exec", dont_inherit=True).co_names
    # True: the code may define names that do not appear in it.
    dynamic = b"import *" in text or {"exec", "globals", "locals", "vars", "setattr", "__getattr__"} & {*used_names}
    if outer_name not in used_names and not dynamic:
        raise _missing_name(address, outer_name, used_names)


def _missing_name(address: str, name: str, known: Iterable[str]) -> ConfigError:
    matches = difflib.get_close_matches(name, [public for public in known if not public.startswith("_")], n=1)
    hint = f"; did you mean {matches[0]!r}?" if matches else ""
    return ConfigError(f"cannot load {address!r}: {split_address(address)[0]} has no {name!r}{hint}")


def installed(package: str) -> bool:
    """Whether an optional package can be imported. A folder without `__init__.py` is not a package. Errors: ConfigError if
    a folder in the working directory hides the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return False
    folder = Path.cwd() / package
    if str(folder) in (spec.submodule_search_locations or ()):
        raise ConfigError(f"the folder {folder} hides the package {package}; rename it, or start in another directory")
    return True


def raised(error: BaseException) -> str:
    """The error of user code and its place, in one line: `ValueError: no such row (/home/me/rows.py:12 in rows)`."""
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    kind = type(error).__name__
    return (f"{kind}: {text}" if text else kind) + place_of(error)


def place_of(error: BaseException) -> str:
    """The last line that ran in a file of the user: ` (/home/me/rows.py:12 in rows)`. If the error has passed through no such file:
    the last line that ran in an installed package or the standard library. Empty if the error has passed through neither."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}:{error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_machinery(frame.filename)]
    libraries = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    user_frames = [frame for frame in frames if not any(map(Path(frame.filename).is_relative_to, libraries))]
    if not frames:
        return ""
    last = (user_frames or frames)[-1]
    function = "" if last.name == "<module>" else f" in {last.name}"
    return f" ({last.filename}:{last.lineno}{function})"


def is_interrupt(error: BaseException) -> bool:
    """Whether the error may be a Ctrl-C of the user. False if the handler of SIGINT raises no KeyboardInterrupt, as in a run."""
    handler = signal.getsignal(signal.SIGINT)
    # asyncio.run installs a bound method of its Runner.
    runner = getattr(getattr(handler, "func", None), "__self__", None)
    handler_raises = handler is signal.default_int_handler or isinstance(runner, asyncio.Runner)
    return handler_raises and isinstance(error, KeyboardInterrupt)


@contextlib.contextmanager
def user_code(make_error: Callable[[BaseException], Exception]) -> Iterator[None]:
    """For synchronous user code in the body of `with`. Raises `make_error(error)` for each error of the body except a Ctrl-C. A
    SystemExit is such an error, too: it would end the program, perhaps with exit code 0."""
    try:
        yield
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise make_error(error) from error


def is_machinery(file: str) -> bool:
    """Whether the file belongs to this package or to Python's import system."""
    folders = _PACKAGE, Path(importlib.__file__).parent
    return file.startswith("<frozen importlib") or any(map(Path(file).is_relative_to, folders))


def _load_file(address: str, place: str) -> ModuleType:
    path = Path(os.path.expanduser(place)).absolute()
    if not os.path.isfile(path):
        raise ConfigError(f"cannot load {address!r}: there is no file {path}")
    path = path.resolve()
    _append_to_path(str(path.parent))
    name = _module_name(path)
    with user_code(lambda error: ConfigError(f"cannot load {address!r}: {path} raised {raised(error)}")):
        return importlib.import_module(name)


def _module_name(path: Path) -> str:
    """The first of these that applies: the name by which the file was imported; its stem, if `import STEM` finds it; a new name."""
    known = getattr(sys.modules.get(_names.get(path, "")), "__spec__", None)
    if known is not None and known.origin == str(path):
        return _names[path]
    # Never `__main__`: a file that runs as the program is imported again, by a name of its own.
    specs = {name: getattr(module, "__spec__", None) for name, module in list(sys.modules.items())} | {"__main__": None}
    # Python caches the files of a folder, and a new file may be missing in the cache.
    importlib.invalidate_caches()
    if path.stem.isidentifier() and path.stem not in specs:
        specs[path.stem] = importlib.util.find_spec(path.stem)
    for name, spec in specs.items():
        origin = getattr(spec, "origin", None)
        if isinstance(origin, str) and origin.endswith(path.name) and Path(origin).resolve() == path:
            _names[path] = name
            return name
    # A name with a dot would be a module in a package.
    name = (
        f"asyncrl_user_{path.stem.replace('.', '_')}_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    )
    _files[name] = path
    _names[path] = name
    return name


def _find_spec(name: str, *_: object) -> ModuleSpec | None:
    return importlib.util.spec_from_file_location(name, _files[name]) if name in _files else None


# File -> the name by which the file was imported: a cache for `_module_name`, whose search among all modules takes milliseconds.
_names: dict[Path, str] = {}
# Generated name -> file. Python's import system loads these files, with locks: no thread gets a module that is still loading.
_files: dict[str, Path] = {}
sys.meta_path.append(SimpleNamespace(find_spec=_find_spec))


def _load_module(address: str, place: str) -> ModuleType:
    _append_to_path(str(Path.cwd()))
    with user_code(lambda error: ConfigError(f"cannot load {address!r}: importing {place} raised {raised(error)}")):
        return importlib.import_module(place)


def _append_to_path(folder: str) -> None:
    """Appends the folder to `sys.path` for imports of its files. At the end of the path the folder hides no installed package."""
    if folder not in sys.path:
        sys.path.append(folder)
