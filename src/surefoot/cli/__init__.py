"""The command line: `entry.py` is where it begins, `app.py` the commands together, `process.py` exit codes and signals."""
