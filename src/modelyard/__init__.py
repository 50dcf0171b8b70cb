"""Modelyard: the open, self-hosted, multi-tenant AI inference platform.

Importing this package does nothing but name the version: no network, no
configuration, no other module. Start reading at ARCHITECTURE.md.
"""

__version__ = "0.1.0"
