"""Many ranks: the ledger that admits groups, the line between ranks, and collectives.

Start reading in `reservation.py`: it has the rule that bounds the age of every group, with a proof. `ledger.py` keeps the books in
one process, and `line_ledger.py` asks them for many ranks. `line.py` carries messages between processes, and `exchange.py` keeps
them until they are answered. `rendezvous.py` has the start. `world.py` has the collectives. `fsdp.py` shards a model over ranks.
"""
