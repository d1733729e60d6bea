"""Shared memory and device memory: allocation, ownership and release. Start in `segment.py`."""
