"""The migrations, one file a revision: ``rNNNN_what_changes.py``."""
