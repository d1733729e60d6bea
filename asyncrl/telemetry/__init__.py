"""What happened, and where the time went. No torch, no global recorder: a `Recorder` is made once and handed around.

Start reading in `recorder.py`. `budget.py` turns its intervals into busy and idle, `live.py`, `sinks.py`, `trace.py`, `rollouts.py`
and `report.py` are what people and programs see of it.
"""
