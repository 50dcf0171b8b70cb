"""Cohere's own SDK, which asks ``{base}/v2/rerank``."""

import cohere
from checks import KEY, MODEL, URL, check, run
from cohere.core.request_options import RequestOptions

client = cohere.ClientV2(api_key=KEY, base_url=URL, timeout=20)
DOCUMENTS = ["nothing of it", "the capital of France", "France"]
ONCE = RequestOptions(max_retries=0)


@check
def ranks() -> None:
    found = client.rerank(model=MODEL, query="the capital of France", documents=DOCUMENTS, request_options=ONCE)
    assert sorted(entry.index for entry in found.results) == [0, 1, 2]
    scores = [entry.relevance_score for entry in found.results]
    assert found.results[0].index == 1
    assert scores == sorted(scores, reverse=True)
    assert all(0 <= score <= 1 for score in scores)
    assert found.id


@check
def says_what_is_billed() -> None:
    found = client.rerank(model=MODEL, query="France", documents=DOCUMENTS, request_options=ONCE)
    assert found.meta is not None
    assert found.meta.billed_units is not None
    assert found.meta.billed_units.search_units == 1


@check
def returns_the_best_only() -> None:
    found = client.rerank(model=MODEL, query="France", documents=DOCUMENTS, top_n=1, request_options=ONCE)
    assert len(found.results) == 1


@check
def errors_become_their_classes() -> None:
    try:
        client.rerank(model="no-such-model", query="x", documents=["y"], request_options=ONCE)
    except cohere.NotFoundError as error:
        told = str(error.body)
    else:
        told = "nothing"
    assert "no-such-model" in told


run()
