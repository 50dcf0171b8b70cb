"""The control plane. ``flow.py`` is the life of a deployment; read it first."""
