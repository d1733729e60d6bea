"""User code by its address: `path/to/file.py:name` or `package.module:name`.

Guarantees: a file is one module of the process, also where another file imports it by its name; it is whole before anybody gets
it, and gone where loading it failed; whatever goes wrong is one `ConfigError` that names the address, the place that was looked at
and the cause (chained). No torch here.

Loading **runs** the user's module. Reward functions are loaded in worker processes for that reason; in the run's own process
only what lives there: environments, hooks, models, losses and advantages (these two with the configuration: they have settings).
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import hashlib
import importlib
import importlib.util
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
    """`"dir/file.py:name"` -> `("dir/file.py", "name")`. Errors: `ConfigError` where it is not of that form."""
    place, separator, name = address.rpartition(":")
    if not separator or not place or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{address!r} is not an address of user code; write `file.py:name` or `package.module:name`")
    return place, name


def load_object(address: str) -> Any:
    """The object at `address`; a relative file path counts from the working directory. Dotted names reach into classes.

    Errors: `ConfigError` for a malformed address, a missing file, module or name, and for an import that raises.
    """
    place, name = split_address(address)
    module = _load_file(address, place) if place.endswith(".py") else _load_module(address, place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise _lacks(address, part, vars(module))
        found = getattr(found, part)
    return found


def check_address(address: str) -> None:
    """What can be said of an address while nothing of the user's runs. Errors: `ConfigError` where it is malformed, or there is no
    such file, or that is no Python or makes no such name."""
    place, name = split_address(address)
    if not place.endswith(".py"):
        return
    path, first = Path(place).expanduser(), name.partition(".")[0]
    if not path.is_file():
        raise ConfigError(f"there is no file {place} (of {address!r}; looked from {Path.cwd()})")
    with warnings.catch_warnings(), user_code(lambda error: ConfigError(f"cannot load {address!r}: {raised(error)}")):
        # Loading it shows them.
        warnings.simplefilter("ignore")
        text = path.read_bytes()
        known = compile(text, place, "exec", dont_inherit=True).co_names
    # Code may make names that it does not spell.
    if first not in known and b"import *" not in text and not {"globals", "vars", "setattr", "__getattr__"} & {*known}:
        raise _lacks(address, first, known)


def _lacks(address: str, name: str, known: Iterable[str]) -> ConfigError:
    near = difflib.get_close_matches(name, [each for each in known if not each.startswith("_")], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"cannot load {address!r}: {split_address(address)[0]} has no {name!r}{hint}")


def installed(package: str) -> bool:
    """Whether an optional package can be imported. A folder without `__init__.py` (data, what a sink wrote) is none. Errors:
    ConfigError where a folder with one, in the working directory, is found in the package's place."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return False
    folder = Path.cwd() / package
    if str(folder) in (spec.submodule_search_locations or ()):
        raise ConfigError(f"the folder {folder} hides the package {package}; rename it, or start in another directory")
    return True


def raised(error: BaseException) -> str:
    """What user code raised and where, in one line: `ValueError: no such row (/home/me/rows.py:12 in rows)`.

    The place is the last line that ran in a file of the user's; in an installed package where no such file took part.
    """
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    kind = type(error).__name__
    said = f"{kind}: {text}" if text else kind
    if isinstance(error, SyntaxError):
        return f"{said} ({error.filename}:{error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_machinery(frame.filename)]
    installed = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    own = [frame for frame in frames if not frame.filename.startswith(installed)]
    if not frames:
        return said
    last = (own or frames)[-1]
    return f"{said} ({last.filename}:{last.lineno}{'' if last.name == '<module>' else f' in {last.name}'})"


def is_interrupt(error: BaseException) -> bool:
    """Whether this may be somebody's Ctrl-C. In `asyncrl run` none is: SIGINT has a handler there that raises nothing."""
    handler = signal.getsignal(signal.SIGINT)
    raises = handler is signal.default_int_handler or isinstance(
        getattr(getattr(handler, "func", None), "__self__", None), asyncio.Runner
    )
    return raises and isinstance(error, KeyboardInterrupt)


@contextlib.contextmanager
def user_code(failed: Callable[[BaseException], Exception]) -> Iterator[None]:
    """Around code of the user's that does not wait: whatever it raises is `failed(error)`. SystemExit and the like, too: they
    must not end the program as if all were well."""
    try:
        yield
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise failed(error) from error


def _is_machinery(file: str) -> bool:
    """Ours, or Python's for imports."""
    return file.startswith(("<frozen importlib", str(Path(importlib.__file__).parent))) or Path(file).is_relative_to(
        _PACKAGE
    )


def _load_file(address: str, place: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"cannot load {address!r}: there is no file {path}")
    _append_to_path(str(path.parent))
    name = _module_name(path)
    with user_code(lambda error: ConfigError(f"cannot load {address!r}: {path} raised {raised(error)}")):
        return importlib.import_module(name)


def _module_name(path: Path) -> str:
    """The name under which another module has imported the file, or would as its neighbour; else one of ours."""
    specs = {name: getattr(module, "__spec__", None) for name, module in list(sys.modules.items())} | {"__main__": None}
    # The file may be younger than what Python remembers of its folder.
    importlib.invalidate_caches()
    if path.stem.isidentifier() and path.stem not in specs:
        specs[path.stem] = importlib.util.find_spec(path.stem)
    for name, spec in specs.items():
        origin = getattr(spec, "origin", None)
        if isinstance(origin, str) and origin.endswith(path.name) and Path(origin).resolve() == path:
            return name
    name = f"asyncrl_user_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    _files[name] = path
    return name


def _find_spec(name: str, *_: object) -> ModuleSpec | None:
    return importlib.util.spec_from_file_location(name, _files[name]) if name in _files else None


# By names of ours. Python's own import loads these, too: no thread gets a module before it is whole, and none that failed stays.
_files: dict[str, Path] = {}
sys.meta_path.append(SimpleNamespace(find_spec=_find_spec))


def _load_module(address: str, place: str) -> ModuleType:
    _append_to_path(str(Path.cwd()))
    with user_code(lambda error: ConfigError(f"cannot load {address!r}: importing {place} raised {raised(error)}")):
        return importlib.import_module(place)


def _append_to_path(folder: str) -> None:
    """Neighbours of the user's file can be imported; last, so that none of them shadows an installed package."""
    if folder not in sys.path:
        sys.path.append(folder)
