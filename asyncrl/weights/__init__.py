"""How an engine comes to have version v, and how that is proved (`proof.py`): `shared.py` in one process, `posted.py` on a board
for others."""
