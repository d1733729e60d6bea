"""Records of many producers for one owner, which may die at any moment on either side. Start in `record_ring.py`."""
