"""Shared memory and device memory: who allocates it, who may look at it, and when it is free again. Start in `segment.py`."""
