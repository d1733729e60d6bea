"""Rings in shared memory: many producers put records, and one owner takes them. Start in `record_ring.py`."""
