"""Checks whether the Hugging Face hub can be reached, with one short request: the hub's own library retries for half a minute."""

from __future__ import annotations

import logging
import os
import time
from functools import cache
from pathlib import Path
from typing import Literal

from asyncrl.errors import ConfigError

logger = logging.getLogger("asyncrl.config")

_TIMEOUT_S = 5.0
_CACHED_S = 30.0  # a success or failure is cached for at most this long


def require_hub(source: str, setting: str) -> None:
    """Refuses a `source` that is neither a directory nor a valid id of a model. If the hub does not answer or HF_HUB_OFFLINE is
    set, also refuses a model that was not downloaded before. Does not ask whether the hub has the model. Blocks like `hub_error`.

    Errors: ConfigError that names `setting` and the reason.
    """
    if Path(source).is_dir():
        return
    from huggingface_hub import constants
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(source)
        error = hub_error(source, "model")
        if constants.HF_HUB_OFFLINE and not _downloaded(source, "model"):
            error = "HF_HUB_OFFLINE is set, and the model was not downloaded before"
        problem = error and (
            f"and as a model of the hub it cannot be fetched: {error}; name a directory, or start where the hub can be reached "
            "(set HTTPS_PROXY or HF_ENDPOINT if needed, without HF_HUB_OFFLINE)"
        )
    except HFValidationError:
        problem = (
            "and the name is no id of a model of the hub; name a directory, or a model as `name` or `organisation/name`"
        )
    if problem:
        raise ConfigError(f"{setting}: there is no directory {source!r} (looked from {Path.cwd()}), {problem}")


def hub_error(name: str, kind: Literal["model", "dataset"]) -> str | None:
    """None, or an error message if the hub does not answer and `name` was not downloaded before. If HF_HUB_OFFLINE is set, makes
    no request and returns None. Blocks for up to 5 s until a connection is made, and for up to 5 s until the answer."""
    from huggingface_hub import constants

    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    error = None if constants.HF_HUB_OFFLINE else _connection_error(endpoint, time.monotonic() // _CACHED_S)
    if error is None:
        return None
    if not _downloaded(name, kind):
        return f"{endpoint} does not answer ({error})"
    _warn_once(
        f"{endpoint} does not answer ({error}): {name} is read from an earlier download, after the hub's library has retried for "
        "half a minute; set HF_HUB_OFFLINE=1 to skip the retries"
    )
    return None


@cache
def _connection_error(endpoint: str, period: float) -> str | None:
    """The error of a request to `endpoint`, or None after any HTTP response. `period`: makes a cached result expire."""
    from huggingface_hub.utils import get_session

    try:
        get_session().head(endpoint, timeout=_TIMEOUT_S)
    except Exception as error:
        # Versions of the hub's library have different HTTP clients, each with errors of its own.
        return str(error) or type(error).__name__
    return None


@cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def _downloaded(name: str, kind: str) -> bool:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot_download(name, repo_type=kind, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        return False
    return True
