"""The Runtime: opens the parts of a run in order, runs the pumps, writes the run directory, and closes all parts.

Start reading in `runtime.py`, the facade. `decided.py` resolves the settings, `opening.py` opens the parts, and `opened.py` is the
open run. `meeting.py` opens the line to the other ranks. `build.py` opens the implementations of the ports, and `real.py`
model, trainer and engine. `gate.py` chooses how the model is computed, and `memory.py` estimates the memory of devices.
`program.py` and `door.py` take groups of the program and of other processes. `journal.py` and `saving.py` write the run directory.
"""
