"""Decisions: pure functions, folds, and state machines without I/O (``DESIGN.md`` section 7)."""
