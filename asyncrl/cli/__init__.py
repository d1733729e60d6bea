"""The console script `asyncrl`. `app.py` reads the name of the command and calls `main` of that command's file."""
