"""Transfer of bytes between processes without copies: shared memory, CUDA IPC, and the queues and rings on top.

    rings/      records from many producers to one owner        queues/     arrays and tensors, in order, with credits
    memory/     shared-memory segments and slabs                rendezvous  how a process connects to an owner
    inventory   lists and removes segments in shared memory

Start reading in `queues/queue.py` and `rings/record_ring.py`.
"""
