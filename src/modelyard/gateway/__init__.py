"""The data plane. ``flow.py`` is the life of a request; read it first."""
