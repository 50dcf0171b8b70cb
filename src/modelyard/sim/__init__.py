"""The simulator: what the platform does at a scale that no machine here has, decided by the production policies.

Two levels. The request level (``world.py``) has every request, every iteration of every engine, and the gateway's own
dispatcher; it is right for routing, admission, fairness and latency, up to some dozens of replicas. The fleet level
(``fleet/``) has endpoints, replicas and accelerators in ticks, and is right for thousands of them over days. Neither
decides anything: what decides is ``policy/``, as in production. Time and chance are arguments, so that a seed says all.
"""
