"""The Runtime: opens the parts of a run in order, runs the pumps, writes the run directory, and closes all parts.

Start reading in `runtime.py`, the facade. `decided.py` resolves the settings, `opening.py` opens the parts, and `opened.py` is the
open run. `meeting.py` connects the ranks. `build.py` opens the implementations of the ports, and calls `real.py` to open the model,
the trainer and the engine. `gate.py` chooses how the model is computed, and `memory.py` estimates the memory of devices.
`program.py` takes groups from the program, `door.py` from other processes. `journal.py` and `saving.py` write the run directory.
"""
