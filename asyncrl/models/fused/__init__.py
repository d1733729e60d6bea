"""The decoder written out, and the proof that it computes what the model does. Start in `decoder.py`."""
