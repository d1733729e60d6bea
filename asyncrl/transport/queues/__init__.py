"""Items in order, with credits: within a process, between two, and of a device. Start in `tensor_queue.py`: one contract."""
