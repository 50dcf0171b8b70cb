"""Benchmarks: each prints one table, as ratios against a named peer measured in the same run. See README.md."""
