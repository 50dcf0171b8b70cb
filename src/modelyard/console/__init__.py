"""The web console: server-rendered pages, no script, no Node build.

It never imports the controller: ``views.ConsoleContext`` says what it needs of it.
"""

from modelyard.console.app import build_console

__all__ = ["build_console"]
