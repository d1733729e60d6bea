"""The decoder written out, for layers that consist of known parts. Start in `decoder.py`."""
