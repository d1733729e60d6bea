"""Many ranks: who may start a group, who comes to which step, and how tensors are reduced.

Start reading in `reservation.py`, the rule that bounds the age of every group, with its proof. `ledger.py` and `store_ledger.py`
keep its books on one rank and on many (`shared_books.py`, `watch.py`); `hosting.py` and `sealed.py` are the store that many ranks
share, and what is believed there; `world.py` holds the collectives, `fsdp.py` a model that is cut over the ranks.
"""
