"""The Runtime: opens the rooms of a run in order, drives the pumps, keeps the run directory, closes everything again.

Start reading in `runtime.py`. `rooms.py` and `real.py` build what the configuration asks for, `gate.py` decides how the model is
run, `memory.py` whether it fits, `embedding.py` and `door.py` let groups in from outside, `journal.py` and `saving.py` leave
something behind.
"""
