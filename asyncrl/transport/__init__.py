"""Bytes between processes, without copies on the way: shared memory, CUDA IPC, and the queues and rings on top of them.

    rings/      records of many producers for one owner         queues/     arrays and tensors, in order, with credits
    memory/     what is allocated, by whom, until when
    rendezvous  how a process finds another one                 inventory   what lies in shared memory, and how to clear it

Start reading in `queues/queue.py` and `rings/record_ring.py`.
"""
