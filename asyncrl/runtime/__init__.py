"""The Runtime: opens a run in order, drives the pumps, keeps the run directory, closes everything again.

Start reading in `runtime.py`, the facade. `decided.py` decides what a run is, `opening.py` opens it in order, and `opened.py` is
the open run. `build.py` opens what stands behind the ports, `real.py` the model, its trainer and the engine; `gate.py` decides how
the model is run, and `memory.py` estimates what it takes. `embedding.py` and `door.py` let groups in from outside, `journal.py` and
`saving.py` write the run directory.
"""
