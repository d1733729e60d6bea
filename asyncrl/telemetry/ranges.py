"""NVTX ranges in the domain `asyncrl`, which `nsys` shows. Without such a profiler a range costs one comparison."""

from __future__ import annotations

from typing import Any

import nvtx

# NVTX keeps registered strings until the process ends, so ranges with further names are not opened.
_MAX_NAMES = 4096


class NvtxRanges:
    """Opens and closes NVTX ranges, from any thread. Does nothing if `on` is False or the user set `NVTX_DISABLE`."""

    def __init__(self, on: bool) -> None:
        self._domain: Any = nvtx.get_domain("asyncrl") if on and nvtx.enabled() else None
        self._attributes: dict[str, Any] = {}

    def open(self, name: str) -> Any:
        """Begin a range. Pass the result to `close`."""
        if self._domain is None:
            return None
        attributes = self._attributes.get(name)
        if attributes is None:
            if len(self._attributes) >= _MAX_NAMES:
                return None
            attributes = self._attributes[name] = self._domain.get_event_attributes(message=name)
            # None: no profiler is attached, and none can attach to this process later.
            if attributes is None:
                self._domain = None
                return None
        return self._domain.start_range(attributes)

    def close(self, opened: Any) -> None:
        """End the range that `open` began."""
        if opened is not None and self._domain is not None:
            self._domain.end_range(opened)
