"""Engines beside the trainer: each in a process of its own, which owns a device and generates while the node trains.

    node    engine.py    the engine that the run sees: requests in, generations out, weights moved, deaths outlived
            router.py    which worker gets a request
            peer.py      one worker as the node sees it: process, request queue, what it was sent
    worker  main.py      the program; server.py: loads the model's form, binds it to the weight board, serves
    both    wire.py      requests and finished sequences as bytes; beside them a channel (concurrency/channel.py)

Start reading in `engine.py`.
"""
