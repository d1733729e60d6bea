"""Whether the Hugging Face hub can give a model or a data set: asked once and shortly, as its libraries try for most of a minute.

No torch, no transformers.
"""

from __future__ import annotations

import logging
import os
import time
from functools import cache
from pathlib import Path
from typing import Literal

from asyncrl.errors import ConfigError

logger = logging.getLogger("asyncrl.config")

_WAIT_S = 5.0
# An answer, or a silence, is not asked for again within this time.
_TRUE_S = 30.0


def require_hub(source: str, setting: str) -> None:
    """What `source`, a directory or the id of a model, needs to be read as such. Blocks for up to 5 s.

    Errors: ConfigError with both readings of the name.
    """
    if Path(source).is_dir():
        return
    from huggingface_hub import constants
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(source)
        silence = hub_silence(source, "model")
        if constants.HF_HUB_OFFLINE and not _downloaded(source, "model"):
            silence = "HF_HUB_OFFLINE is set, and it was not downloaded before"
        problem = silence and f"and as a model of the hub it cannot be fetched: {silence}"
    except HFValidationError:
        problem = "and as the id of a model of the hub it cannot be read: `name` or `organisation/name`"
    if problem:
        raise ConfigError(
            f"{setting}: there is no directory {source!r} (looked from {Path.cwd()}), {problem}; name a directory, or start where "
            "the hub is reached (HTTPS_PROXY and HF_ENDPOINT say how)"
        )


def hub_silence(name: str, kind: Literal["model", "dataset"]) -> str | None:
    """That the hub does not answer, in words; None where it does, where `name` was downloaded before, and where HF_HUB_OFFLINE
    says that there is none. Blocks for up to 5 s."""
    from huggingface_hub import constants

    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    silence = None if constants.HF_HUB_OFFLINE else _silence(endpoint, time.monotonic() // _TRUE_S)
    if silence is None:
        return None
    if not _downloaded(name, kind):
        return f"{endpoint} does not answer ({silence})"
    _warn(
        f"{endpoint} does not answer ({silence}): {name} is taken as it was downloaded before, after the hub's library has tried "
        "for half a minute; HF_HUB_OFFLINE=1 saves that"
    )
    return None


@cache
def _silence(endpoint: str, when: float) -> str | None:
    """Why nothing answers there; None where something does, whatever it says."""
    from huggingface_hub.utils import get_session

    try:
        get_session().head(endpoint, timeout=_WAIT_S)
    except Exception as error:
        # Versions of the hub's library have different HTTP clients, each with errors of its own.
        return str(error) or type(error).__name__
    return None


@cache
def _warn(text: str) -> None:
    logger.warning("%s", text)


def _downloaded(name: str, kind: str) -> bool:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot_download(name, repo_type=kind, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        return False
    return True
