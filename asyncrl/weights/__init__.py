"""How an engine comes to have version v, and how that is proved: `shared.py` on one device, `gathered.py` from a cut model."""
