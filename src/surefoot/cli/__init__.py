"""The command line: `app.py` is the entry point, every other module one command with its `register(app)`."""
