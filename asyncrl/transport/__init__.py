"""Bytes between processes, without copies on the way: shared memory, CUDA IPC, and the queues and rings on top of them.

Start reading in `queue.py`: the contract of all tensor queues.

    memory    segment, words, blocks, extents, arena, handles, slab, slab_cuda    what is allocated, by whom, until when
    queues    queue, tensor_*, device_queue                                      arrays and tensors, in order, with credits
    rings     ring*, record_ring, producer*, rendezvous                           records of many producers for one owner
    inventory                                                                      what lies in shared memory, and how to clear it
"""
