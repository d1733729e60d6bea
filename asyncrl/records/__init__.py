"""Record schema v1: scored trajectories as bytes, for any process with numpy.

Start reading in `layout.py`, the layout of the bytes. `write.py` writes records and `read.py` reads them. `trajectories.py` makes
trajectories from a record. `check.py` checks that a trajectory can be trained.
"""
