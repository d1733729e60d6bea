"""Queues with credits: within a process, between processes, and on a device. Start in `queue.py`, which has the contract."""
