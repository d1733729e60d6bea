"""A device on a CPU: one stream, a clock of its own, and events with the rules of the CUDA driver."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

LATENCY_S = 5e-6  # from a launch on an idle device to its begin


class HostClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeDevice:
    """`drift`: seconds that the device's clock gains in a second of `clock`."""

    def __init__(self, clock: Callable[[], float], drift: float = 0.0) -> None:
        self.clock, self.rate = clock, 1.0 + drift
        self.free_at = 0.0  # when all that was launched has ended, on `clock`
        self.events: list[FakeEvent] = []
        self.is_capturing = False
        self.is_broken = False

    def reached_at(self) -> float:
        """When the device reaches what is launched now."""
        return max(self.clock() + LATENCY_S, self.free_at)

    def launch(self, seconds: float) -> None:
        self.free_at = self.reached_at() + seconds

    def check(self) -> None:
        assert not self.is_capturing, "the call breaks the capture of a graph"
        if self.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def new_event(self) -> FakeEvent:
        self.events.append(FakeEvent(self))
        return self.events[-1]


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.reached: float | None = None

    def record(self) -> None:
        self.device.check()
        self.reached = self.device.reached_at()

    def query(self) -> bool:
        self.device.check()
        return self.reached is None or self.device.clock() >= self.reached

    def elapsed_time(self, end: FakeEvent) -> float:
        self.device.check()
        if self.device is not end.device:
            raise RuntimeError("CUDA error: invalid resource handle")
        if self.reached is None or end.reached is None or not (self.query() and end.query()):
            raise RuntimeError("CUDA error: device not ready")
        milliseconds = 1e3 * self.device.rate * (end.reached - self.reached)
        # The driver's resolution is half a microsecond, and its result a float32.
        return float(np.float32(round(2e3 * milliseconds) / 2e3))

    def synchronize(self) -> None:
        raise AssertionError("the host waits for the device")
