"""Transfer of bytes between processes without copies: shared memory, CUDA IPC, and the rings on top.

    rings/      records from many producers to one owner        queues/     items between the tasks of a process
    memory/     shared-memory segments, slabs and the board     inventory   lists and removes segments in shared memory

Start reading in `queues/queue.py` and `rings/record_ring.py`.
"""
