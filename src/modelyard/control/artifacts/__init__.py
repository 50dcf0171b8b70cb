"""Artifacts: the files of models, from anywhere, by content.

``store.py`` is the way in, ``sources/`` says where things come from,
``collect.py`` what may go again.
"""

from modelyard.control.artifacts.errors import ArtifactError, CorruptError
from modelyard.control.artifacts.sources.schemes import Sources
from modelyard.control.artifacts.store import ArtifactStore, Progressed

__all__ = ["ArtifactError", "ArtifactStore", "CorruptError", "Progressed", "Sources"]
