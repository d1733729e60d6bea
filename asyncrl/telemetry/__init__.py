"""Events, metrics and idle time of a run. There is no global recorder: a run makes one `Recorder` and passes it to its parts.

Start reading in `recorder.py`. `budget.py` computes which share of a step each device was busy or idle, and why. `live.py`,
`sinks.py`, `trace.py`, `rollouts.py` and `report.py` write the output.
"""
