"""A neighbour of the platform that no request may reach."""

import socket
import threading


class Canary:
    """A neighbour that counts who connects to it."""

    def __init__(self) -> None:
        self.hits = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self._count)
        self.thread.start()

    def _count(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.hits += 1
            connection.close()

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(5)
