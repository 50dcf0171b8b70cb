"""The batch plane: a process of its own that takes files of requests through the gateway and writes their answers.

``flow.py`` is the life of a batch. It shares the database and the folder of files with the controller, and speaks to
gateways as everybody does, on sockets that only planes can open.
"""
