"""Lanes, tasks, threads and child processes.

Start reading in `supervisor.py` (the one task group of a run) and `lane.py` (the one thread that owns a device). `watchdog.py`
ends a run that makes no progress, and `describe.py` has the descriptions of tasks and waits for the watchdog's messages.
"""
