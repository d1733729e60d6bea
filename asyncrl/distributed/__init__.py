"""Many ranks: the ledger that admits groups, the line (messages between ranks), and collectives.

Start in `reservation.py`, the rule that bounds the age of every trained group. `ledger.py` applies the rule in one process, and
`line_ledger.py` serves that ledger to other ranks. `line.py` carries messages between processes, and `exchange.py` keeps each
message until its answer; `connections.py` has the lines to training ranks. `rendezvous.py` lets the ranks find each other, and
`joining.py` lets nodes join later. `roles.py` says which ranks train and which generate. `world.py` has the rank of this process,
`collectives.py` the collectives. `fsdp.py` shards a model over ranks. `launcher.py` ends a rank whose torchrun has ended.
"""
