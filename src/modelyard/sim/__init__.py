"""A fleet in virtual time, driving the very same ``policy/`` code that runs live.

Request level: every request is an event. Fleet level (``fleet/``): ten thousand endpoints by ticks.
"""
