"""Many ranks: the ledger that admits groups, the line between ranks, and collectives.

Start reading in `reservation.py`: it has the rule that bounds the age of every group, with a proof. `ledger.py` keeps the books in
one process, and through `line_ledger.py` many ranks use these books. `line.py` carries messages between processes, and
`exchange.py` keeps each message until its answer. `rendezvous.py` lets the ranks find each other. `world.py` has the rank of
this process, and `collectives.py` the collectives. `fsdp.py` shards a model over ranks.
"""
