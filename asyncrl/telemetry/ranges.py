"""NVTX ranges of this package's domain: what `nsys` shows. Where no tool listens they cost one comparison."""

from __future__ import annotations

from typing import Any

import nvtx

# NVTX keeps registered strings for ever: beyond this many different names no range is opened.
_NAMES = 4096


class Ranges:
    """Opened and closed from any thread."""

    def __init__(self, on: bool) -> None:
        """Also off where the user switched them off (`NVTX_DISABLE`)."""
        self._domain: Any = nvtx.get_domain("asyncrl") if on and nvtx.enabled() else None
        self._attributes: dict[str, Any] = {}

    def open(self, name: str) -> Any:
        """Begin a range. `close` takes what this returns."""
        if self._domain is None:
            return None
        attributes = self._attributes.get(name)
        if attributes is None:
            if len(self._attributes) >= _NAMES:
                return None
            attributes = self._attributes[name] = self._domain.get_event_attributes(message=name)
            # No tool listens: the domain is a dummy, for the whole life of the process.
            if attributes is None:
                self._domain = None
                return None
        return self._domain.start_range(attributes)

    def close(self, opened: Any) -> None:
        """End the range that `open` began."""
        if opened is not None and self._domain is not None:
            self._domain.end_range(opened)
