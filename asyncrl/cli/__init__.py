"""The console script `asyncrl`: `app.py` reads the words and hands over to one file a command."""
