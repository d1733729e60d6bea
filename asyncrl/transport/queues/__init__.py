"""The queue between tasks of one process, in `queue.py`."""
