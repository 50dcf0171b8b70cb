"""What runs inside of vLLM's own process, under its own interpreter: this folder is on its ``PYTHONPATH``.

So nothing here may import anything that is not in every Python, the platform least of all.
"""
