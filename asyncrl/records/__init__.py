"""Record schema v1: scored trajectories as bytes, for any process that has numpy.

Start reading in `layout.py` (what lies where). `write.py` and `read.py` are the two ways, `trajectories.py` what a run makes of a
record, `check.py` what can be trained, from any source.
"""
