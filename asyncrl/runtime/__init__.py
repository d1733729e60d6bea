"""The Runtime: opens a run in order, drives the pumps, keeps the run directory, closes everything again.

Start reading in `runtime.py`, the facade; `opening.py` makes the run behind it, `opened.py` is that run. `build.py` and
`real.py` build what the configuration asks for, `gate.py` decides how the model is run, `memory.py` whether it fits,
`embedding.py` and `door.py` let groups in from outside, `journal.py` and `saving.py` leave something behind.
"""
