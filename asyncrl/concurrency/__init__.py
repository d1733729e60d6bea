"""Structured concurrency that can be watched: nothing waits without a name, and nothing outlives its owner.

Start reading in `supervisor.py` (the one task group of a run) and `lane.py` (the one thread that owns a device). `watchdog.py`
ends a run in which nothing moves, with the help of `dump.py` and `describe.py`.
"""
