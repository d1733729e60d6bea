"""Memory in which processes read the data of other processes in place (shared memory, CUDA IPC), and queues between tasks.

    rings/      records from many producers to one owner        queues/     items between the tasks of a process
    memory/     shared-memory segments, slabs and the board     inventory   lists and removes segments in shared memory

Start reading in `queues/queue.py` and `rings/record_ring.py`.
"""
