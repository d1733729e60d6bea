"""From rows of prompts to microbatches, in numpy: nothing here needs an engine or a trainer.

Start reading in `prompts.py` (the stream of prompts). Members of a group wait in `stash.py` until the group is whole.
Whole groups wait in `store.py` until they are trained. `packing.py` packs groups into microbatches.
"""
