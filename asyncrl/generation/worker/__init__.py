"""Engines in worker processes. A worker generates on its device (several with `generation.tensor_parallel`) while ranks train.

    rank    engine.py    the engine that the run uses: requests, generations, weights, restarts of dead workers
            router.py    chooses the worker of each request
            peer.py      the rank's side of one worker: process, queue of requests, weights that were sent
    worker  main.py      the program
            server.py    receives requests and weights over a channel (concurrency/channel.py), and sends generations
            opening.py   creates the engine and attaches the weight board

Start reading in `engine.py`.
"""
