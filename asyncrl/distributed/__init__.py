"""Many ranks: the ledger that admits groups, the store that ranks share, and collectives.

Start reading in `reservation.py`: it has the rule that bounds the age of every group, with a proof. `ledger.py` keeps the books of
one rank, and `store_ledger.py` those of many ranks, with `shared_books.py` and `watch.py`. `hosting.py` opens the ranks' store, and
`sealed.py` authenticates its values. `world.py` has the collectives. `fsdp.py` shards a model over the ranks.
"""
