"""A load generator for users: how fast an endpoint answers, at given concurrency or rate.

It speaks OpenAI's API over aiohttp and knows nothing of the platform, so that any server can be measured.
``client.py`` makes one request and notes when its tokens came, ``driver.py`` makes many, ``statistics.py`` says what
they come to, ``picture.py`` draws it and ``comparing.py`` puts two runs beside one another. The names of figures are
those of ``vllm bench serve``.
"""
