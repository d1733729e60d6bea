"""Items in order, with credits: within a process, between two, and of a device. Start in `queue.py`: one contract."""
