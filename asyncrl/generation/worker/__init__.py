"""Workers: child processes that generate beside the trainer, each on a device of its own.

Start reading in `process.py`, a worker as the node sees it, and `control.py`, the line over which the two talk.
"""
