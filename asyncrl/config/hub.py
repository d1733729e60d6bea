"""Whether the Hugging Face hub answers at all, asked once and shortly: its libraries try for most of a minute to find out.

No torch, no transformers.
"""

from __future__ import annotations

import logging
import math
import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Literal

from asyncrl.errors import ConfigError

logger = logging.getLogger("asyncrl.config")

_WAIT_S = 5.0
_TRUE_S = 30.0  # so long a silence is not asked again
_heard: dict[str, tuple[float, str | None]] = {}  # endpoint -> when it was asked, and why it was silent
_told: set[str] = set()  # of what was downloaded before: it is asked for several times
_OFFLINE = {
    "model": ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
    "dataset": ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
}


def require_hub(source: str, setting: str) -> None:
    """What `source`, a directory or the id of a model, needs to be read as such. Blocks for up to 5 s.

    Errors: ConfigError with both readings of the name.
    """
    if Path(source).is_dir():
        return
    missing = f"{setting}: there is no directory {source!r} (looked from {Path.cwd()})"
    if not _is_id(source):
        raise ConfigError(
            f"{missing}, and as the id of a model of the hub it cannot be read: `name` or `organisation/name`"
        )
    switch = _offline("model")
    if switch is not None:
        silence = None if _downloaded(source, "model") else f"{switch} is set, and it was not downloaded before"
    else:
        silence = hub_silence(source, "model")
    if silence is not None:
        raise ConfigError(
            f"{missing}, and as a model of the hub it cannot be fetched: {silence}; name a directory, or start where the hub is "
            "reached (HTTPS_PROXY and HF_ENDPOINT say how)"
        )


def hub_silence(name: str, kind: Literal["model", "dataset"]) -> str | None:
    """That the hub does not answer, in words; None where it does, or where `name` was downloaded before. Nothing is asked where the
    hub's own switches say that there is none. Blocks for up to 5 s."""
    if _offline(kind) is not None:
        return None
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    silence = _silence(endpoint)
    if silence is None:
        return None
    if _downloaded(name, kind):
        if name in _told:
            return None
        _told.add(name)
        logger.warning(
            "%s does not answer (%s): %s is taken as it was downloaded before, after the hub's library has tried for half a "
            "minute; HF_HUB_OFFLINE=1 saves that",
            endpoint,
            silence,
            name,
        )
        return None
    return f"{endpoint} does not answer ({silence})"


def _offline(kind: str) -> str | None:
    """The switch of the hub's libraries that is on."""
    return next(
        (name for name in _OFFLINE[kind] if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")), None
    )


def _silence(endpoint: str) -> str | None:
    """Why nothing answers there; None where something does, whatever it says."""
    when, silence = _heard.get(endpoint, (-math.inf, ""))
    if silence is None or time.monotonic() - when < _TRUE_S:
        return silence
    found: list[str | None] = []
    # On a thread: looking up a name has a time-out of its own, which may be long.
    thread = threading.Thread(target=lambda: found.append(_ask(endpoint)), name="hub", daemon=True)
    thread.start()
    thread.join(_WAIT_S)
    silence = found[0] if found else f"within {_WAIT_S:g} s"
    _heard[endpoint] = time.monotonic(), silence
    return silence


def _ask(endpoint: str) -> str | None:
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_WAIT_S).close()
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):  # others may trust it, by a file that is not known here
            return None
        return "time-out" if isinstance(reason, TimeoutError) else str(reason)
    return None


def _is_id(name: str) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _downloaded(name: str, kind: str) -> bool:
    if not _is_id(name):
        return False
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind), "snapshots")
    return folder.is_dir() and any(folder.iterdir())
