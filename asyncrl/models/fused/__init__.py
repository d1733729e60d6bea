"""Decoder layers of known parts, with forward and backward written by hand. Start in `decoder.py`."""
