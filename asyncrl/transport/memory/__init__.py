"""Memory that processes share, of the host and of devices: allocation, ownership and release. Start in `segment.py`."""
