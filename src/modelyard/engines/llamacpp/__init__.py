"""llama.cpp: language models in GGUF files on CPU, as the prebuilt wheel ``xllamacpp`` brings it.

``engine.py`` is the contract and ``options.py`` what a deploy may set. A
replica is one process, ``server.py``; one that takes adapters in while it runs
is ``front.py`` with such processes as children:

* ``front.py`` listens, and answers what concerns adapters; ``relay.py`` passes
  requests on, rewritten by ``bodies.py``;
* ``desk.py`` says which request goes to which slot of which child, and who
  waits; ``slots.py`` (pure) whose prompts a slot holds;
* ``children.py`` starts a child with a set of adapters and ends it,
  ``generations.py`` replaces one by the next;
* ``adapters.py`` admits an adapter, ``peft.py`` and ``gguf_file.py`` turn
  PEFT's form into llama.cpp's; ``page.py`` joins the children's metrics.
"""

from modelyard.engines.llamacpp.engine import LlamaCppEngine

__all__ = ["LlamaCppEngine"]
