"""From rows of prompts to microbatches, in numpy: nothing here needs an engine or a trainer.

Start reading in `prompts.py` (the stream of prompts). Members from other processes wait in `stash.py` for their group.
Whole groups wait in `store.py` until they are trained. `packing.py` packs groups into microbatches.
"""
