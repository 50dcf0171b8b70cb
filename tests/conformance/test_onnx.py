"""The engine ``onnx`` with real models: numbers against independent ones, many models in one process, its limits."""

import asyncio
import base64
import json
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

np = pytest.importorskip("numpy", reason="needs the extra 'onnx'")
pytest.importorskip("onnxruntime", reason="needs the extra 'onnx'")
pytest.importorskip("onnx", reason="needs the extra 'convert'")

from tests.support.onnxserver import ENGINE, MAIN, SECRET, OnnxServer  # noqa: E402
from tests.support.smallmodels import (  # noqa: E402
    bert_forward,
    classifier,
    converted,
    minilm_onnx,
    packed_model,
    png_line,
    softmax,
    tagger,
    text_direction,
    tiny_bert,
    weights_of,
)
from tests.support.waiting import eventually, eventually_async  # noqa: E402

from modelyard.engines.onnx.options import OnnxOptions  # noqa: E402

TEXTS = [
    "A man is eating food.",
    "Somebody has a meal, and a rather long one at that, with several courses and much to drink besides.",
    "The stock market fell sharply on Monday.",
]
CLASSES, TAGS = ["good", "bad", "neither"], ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
SENTENCE = "Anna lives in New York and works for Acme."


class Models:
    """The folders of the models that are served."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.classifier = self._bert("classifier", "BertForSequenceClassification", CLASSES)
        self.multi = self._bert(
            "multi", "BertForSequenceClassification", CLASSES, problem_type="multi_label_classification"
        )
        self.reranker = self._bert("reranker", "BertForSequenceClassification", ["LABEL_0"])
        self.tagger = self._bert("tagger", "BertForTokenClassification", TAGS)

    def _bert(self, name: str, architecture: str, labels: list[str], **more: Any) -> Path:
        source = tiny_bert(self.root / f"{name}-source", architecture, labels=labels, **more)
        return converted(source, self.root / name)

    def source(self, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return weights and configuration of what a model was converted from."""
        folder = self.root / f"{name}-source"
        return weights_of(folder), json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("berts"))


@pytest.fixture(scope="module")
def server(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnnxServer]:
    """Return one process with MiniLM and seven guests."""
    options = {"guests": 10, "token_ids": True}
    with OnnxServer(minilm_onnx(), tmp_path_factory.mktemp("onnx") / "log", options) as running:
        for name in ("classifier", "multi", "reranker", "tagger"):
            assert running.load(name, getattr(models, name)) == (200, {"name": name, "loaded": True})
        assert running.load("magika", packed_model("magika") / "model.onnx")[0] == 200
        assert running.load("silero", packed_model("silero") / "silero_vad.onnx")[0] == 200
        assert running.load("upside", text_direction(models.root / "upside"))[0] == 200
        yield running


def cosine(one: Any, other: Any) -> float:
    return float(np.dot(one, other) / np.linalg.norm(one) / np.linalg.norm(other))


def reference(texts: list[str]) -> list[Any]:
    """Return MiniLM's vectors by numpy alone."""
    from tokenizers import Tokenizer

    folder = packed_model("minilm")
    weights, config = weights_of(folder), json.loads((folder / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    found = []
    for text in texts:
        encoding = tokenizer.encode(text)
        hidden = bert_forward(weights, config, encoding.ids, encoding.type_ids)
        mean = hidden.mean(axis=0)
        found.append(mean / np.linalg.norm(mean))
    return found


# --- embeddings ---


def test_embeddings_are_those_of_the_paper_s_formulas(server: OnnxServer) -> None:
    body = server.post("/v1/embeddings", {"input": TEXTS})
    assert [one["index"] for one in body["data"]] == [0, 1, 2]
    for one, wanted in zip(body["data"], reference(TEXTS), strict=True):
        assert cosine(one["embedding"], wanted) > 0.9999
        assert np.linalg.norm(one["embedding"]) == pytest.approx(1, abs=1e-5)
    used = 8 + 23 + 11  # [CLS] and [SEP] among them
    assert body["usage"] == {"prompt_tokens": used, "total_tokens": used}


def test_a_text_has_the_same_vector_alone_and_in_a_batch(server: OnnxServer) -> None:
    together = server.post("/v1/embeddings", {"input": TEXTS * 20})["data"]
    alone = server.post("/v1/embeddings", {"input": TEXTS[1]})["data"][0]["embedding"]
    assert together[1]["embedding"] == pytest.approx(alone, abs=1e-5)
    assert together[58]["embedding"] == pytest.approx(alone, abs=1e-5)


def test_base64_is_little_endian_float32(server: OnnxServer) -> None:
    floats = server.post("/v1/embeddings", {"input": "x"})["data"][0]["embedding"]
    packed = server.post("/v1/embeddings", {"input": "x", "encoding_format": "base64"})["data"][0]["embedding"]
    assert struct.unpack("<384f", base64.b64decode(packed)) == pytest.approx(floats, abs=1e-6)


def test_dimensions_cut_and_scale_to_length_one_again(server: OnnxServer) -> None:
    whole = np.array(server.post("/v1/embeddings", {"input": "x"})["data"][0]["embedding"])
    short = server.post("/v1/embeddings", {"input": "x", "dimensions": 64})["data"][0]["embedding"]
    assert short == pytest.approx(whole[:64] / np.linalg.norm(whole[:64]), abs=1e-5)
    assert server.refusal("/v1/embeddings", {"input": "x", "dimensions": 385})[0] == 400


def test_token_ids_of_its_own_tokenizer_give_the_same_vector(server: OnnxServer) -> None:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(packed_model("minilm") / "tokenizer.json")).encode(TEXTS[0]).ids
    ids = [one for one in ids if one]  # the file pads
    by_ids = server.post("/v1/embeddings", {"input": ids})["data"][0]["embedding"]
    by_text = server.post("/v1/embeddings", {"input": TEXTS[0]})["data"][0]["embedding"]
    assert by_ids == pytest.approx(by_text, abs=1e-5)
    assert server.refusal("/v1/embeddings", {"input": [99_999]})[0] == 400
    assert server.load("strict", minilm_onnx(), {"truncate": False})[0] == 200
    assert "token_ids = true" in server.refusal("/v1/embeddings", {"input": ids}, "strict")[2]
    assert server.unload("strict")[0] == 200


def test_a_long_text_is_cut_or_refused_as_the_option_says(server: OnnxServer) -> None:
    long = "word " * 3000
    assert server.post("/v1/embeddings", {"input": long})["usage"]["prompt_tokens"] == 256
    assert server.load("strict", minilm_onnx(), {"truncate": False, "context_length": 16})[0] == 200
    status, code, message = server.refusal("/v1/embeddings", {"input": long}, "strict")
    assert (status, code) == (400, "context_length_exceeded")
    assert "16 tokens" in message
    assert server.unload("strict")[0] == 200


# --- rerank and score ---


def test_a_bi_encoder_ranks_by_cosine(server: OnnxServer) -> None:
    body = server.post("/v1/rerank", {"query": "What is somebody eating?", "documents": TEXTS, "top_n": 2})
    assert [one["index"] for one in body["results"]] == [0, 1]
    query, first, *_ = reference(["What is somebody eating?", *TEXTS])
    assert body["results"][0]["relevance_score"] == pytest.approx(cosine(query, first), abs=1e-3)


def test_a_cross_encoder_reads_pairs(server: OnnxServer, models: Models) -> None:
    weights, config = models.source("reranker")
    body = server.post("/v1/score", {"text_1": "good day", "text_2": ["a bad day", "acme"]}, "reranker")
    ids = [2, 13, 15, 3, 19, 14, 15, 3]  # [CLS] good day [SEP] a bad day [SEP]
    logit = classifier(weights, bert_forward(weights, config, ids, [0] * 4 + [1] * 4))[0]
    assert body["data"][0]["score"] == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-5)
    assert body["usage"]["prompt_tokens"] == 8 + 6
    ranked = server.post("/v1/rerank", {"query": "good day", "documents": ["a bad day", "acme"]}, "reranker")
    by_index = {one["index"]: one["relevance_score"] for one in ranked["results"]}
    assert [by_index[0], by_index[1]] == pytest.approx([one["score"] for one in body["data"]], abs=1e-5)


def test_a_document_is_cut_where_that_is_asked(server: OnnxServer) -> None:
    whole = server.post("/v1/rerank", {"query": "good", "documents": ["good day in new york"]}, "reranker")
    cut = server.post(
        "/v1/rerank", {"query": "good", "documents": ["good day in new york"], "max_tokens_per_doc": 2}, "reranker"
    )
    assert (whole["usage"]["prompt_tokens"], cut["usage"]["prompt_tokens"]) == (9, 6)


# --- classes ---


def test_a_text_is_classified_by_softmax_or_sigmoid_as_the_configuration_says(
    server: OnnxServer, models: Models
) -> None:
    ids = [2, 18, 13, 15, 3]  # [CLS] the good day [SEP]
    for name in ("classifier", "multi"):
        weights, config = models.source(name)
        logits = classifier(weights, bert_forward(weights, config, ids, [0] * 5))
        wanted = softmax(logits) if name == "classifier" else 1 / (1 + np.exp(-logits))
        [one] = server.post("/v1/classify", {"input": "The good day"}, name)["data"]
        assert one["probs"] == pytest.approx(wanted, abs=1e-5)
        assert (one["label"], one["num_classes"]) == (CLASSES[int(np.argmax(wanted))], 3)
        assert one["scores"][0] == {"label": one["label"], "score": max(one["probs"])}


def test_entities_are_found_where_the_tokens_are(server: OnnxServer, models: Models) -> None:
    weights, config = models.source("tagger")
    ids = [2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 20, 3]
    scores = softmax(tagger(weights, bert_forward(weights, config, ids, [0] * 12)))
    words = ["Anna", "lives", "in", "New", "York", "and", "works", "for", "Acme", "."]
    wanted = [
        (TAGS[int(row.argmax())], word, pytest.approx(row.max(), abs=1e-5))
        for word, row in zip(words, scores[1:-1], strict=True)
        if row.argmax()
    ]
    assert wanted, "the random model names something"
    body = server.post("/v1/token_classify", {"input": [SENTENCE], "aggregation_strategy": "none"}, "tagger")
    [one] = body["data"]
    assert [(found["entity"], found["word"], found["score"]) for found in one["entities"]] == wanted
    assert all(SENTENCE[found["start"] : found["end"]] == found["word"] for found in one["entities"])
    assert body["usage"]["prompt_tokens"] == 12
    grouped = server.post("/v1/token_classify", {"input": SENTENCE}, "tagger")["data"][0]["entities"]
    assert 0 < len(grouped) <= len(wanted)
    assert set(grouped[0]) == {"entity_group", "score", "word", "start", "end"}


def test_a_picture_of_text_is_upright_or_upside_down(server: OnnxServer) -> None:
    labels = []
    for is_turned in (False, True):
        url = f"data:image/png;base64,{base64.b64encode(png_line(is_turned=is_turned)).decode()}"
        body = server.post("/v1/classify", {"input": [{"type": "image_url", "image_url": {"url": url}}]}, "upside")
        probs = body["data"][0]["probs"]
        assert sum(probs) == pytest.approx(1, abs=1e-3)
        assert max(probs) > 0.9, "the graph ends in its own softmax; a second one leaves 0.73 at most"
        labels.append(body["data"][0]["label"])
    assert labels == ["upright", "upside down"]


# --- tensors ---


def test_a_file_is_known_by_its_bytes(server: OnnxServer) -> None:
    """Magika's own preparation: the first and last 1,024 bytes without white space, padded with 256."""
    config = json.loads((packed_model("magika") / "config.min.json").read_text())
    text = b"import os\n\n\ndef main() -> None:\n    for name in os.listdir('.'):\n        print(name)\n" * 3
    begin = list(text.strip()[:1024])
    data = begin + [256] * (1024 - len(begin)) + [256] * (1024 - len(begin)) + begin
    tensor = {"name": "bytes", "shape": [1, 2048], "datatype": "INT32", "data": data}
    body = server.post("/v2/models/magika/infer", {"inputs": [tensor], "id": "7"})
    assert (body["model_name"], body["id"]) == ("magika", "7")
    [output] = body["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("target_label", "FP32", [1, 214])
    assert config["target_labels_space"][int(np.argmax(output["data"]))] == "python"


def test_a_model_with_a_state_hears_silence(server: OnnxServer) -> None:
    import onnxruntime

    state = np.zeros((2, 1, 128), np.float32)
    session = onnxruntime.InferenceSession(
        str(packed_model("silero") / "silero_vad.onnx"), providers=["CPUExecutionProvider"]
    )
    sound = np.random.default_rng(3).normal(0, 0.1, (1, 576)).astype(np.float32)
    for _ in range(2):  # the state of the first call goes into the second
        want, next_state = session.run(None, {"input": sound, "state": state, "sr": np.array(16000, np.int64)})
        inputs = [
            {"name": "input", "shape": [1, 576], "datatype": "FP32", "data": sound.tolist()},
            {"name": "state", "shape": [2, 1, 128], "datatype": "FP32", "data": state.reshape(-1).tolist()},
            {"name": "sr", "shape": [], "datatype": "INT64", "data": [16000]},
        ]
        outputs = {one["name"]: one for one in server.post("/v2/models/silero/infer", {"inputs": inputs})["outputs"]}
        assert outputs["output"]["data"] == pytest.approx(want.reshape(-1), abs=1e-4)
        state = np.array(outputs["stateN"]["data"], np.float32).reshape(outputs["stateN"]["shape"])
        assert state == pytest.approx(next_state, abs=1e-4)


def test_models_describe_themselves_by_the_open_inference_protocol(server: OnnxServer) -> None:
    assert server.ask("GET", "/v2/health/live", secret="") == (200, {"live": True})
    assert server.ask("GET", "/v2/health/ready", secret="")[0] == 200
    assert server.ask("GET", "/v2")[1]["name"] == "modelyard-onnx"
    assert server.ask("GET", "/v2/models/magika/ready")[0] == 200
    assert server.ask("GET", "/v2/models/none/ready")[0] == 404
    body = server.ask("GET", "/v2/models/magika")[1]
    assert body["inputs"] == [{"name": "bytes", "datatype": "INT32", "shape": [-1, 2048]}]
    assert body["outputs"] == [{"name": "target_label", "datatype": "FP32", "shape": [-1, 214]}]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "other"}, "no input"),
        ({"datatype": "FP32"}, "INT32"),
        ({"shape": [1, 2047]}, "shape"),
        ({"shape": [2, 2048]}, "elements"),
        ({"data": [1.5] * 2048}, "no INT32"),
        ({"data": ["1"] * 2048}, "no INT32"),
        ({"data": [True] * 2048}, "no INT32"),
        ({"data": [2**40] * 2048}, "no INT32"),
        ({"data": [[[0]] * 2048]}, "nested"),
    ],
)
def test_a_wrong_tensor_is_named(server: OnnxServer, change: dict[str, Any], reason: str) -> None:
    tensor = {"name": "bytes", "shape": [1, 2048], "datatype": "INT32", "data": [0] * 2048, **change}
    status, _, message = server.refusal("/v2/models/magika/infer", {"inputs": [tensor]})
    assert status == 400
    assert reason in message


def test_numbers_that_are_none_are_an_error_and_harm_nobody_else(server: OnnxServer, tmp_path: Path) -> None:
    assert server.load("root", _square_root(tmp_path / "root.onnx"), {"batch_tensors": True})[0] == 200
    bad, good = ({"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [x]}]} for x in (-1, 4))

    async def both() -> list[tuple[int, Any]]:
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {SECRET}"}) as session:
            url = f"http://127.0.0.1:{server.port}/v2/models/root/infer"

            async def ask(body: Any) -> tuple[int, Any]:
                async with session.post(url, json=body) as answer:
                    return answer.status, await answer.json()

            return await asyncio.gather(*(ask(bad if place % 4 == 0 else good) for place in range(16)))

    for place, (status, body) in enumerate(asyncio.run(both())):
        if place % 4 == 0:
            assert (status, body["error"]["code"]) == (500, "invalid_output")
        else:
            assert (status, body["outputs"][0]["data"]) == (200, [2.0])
    assert server.unload("root")[0] == 200


def _square_root(file: Path) -> Path:
    from onnx import TensorProto, helper, save_model

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 1]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Sqrt", ["x"], ["y"])], "root", [x], [y])
    save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), str(file))
    return file


# --- many models, and what goes wrong ---


def test_a_model_that_gives_one_row_for_many_texts_ends_nobody_else(server: OnnxServer, tmp_path: Path) -> None:
    from onnx import TensorProto, helper, numpy_helper, save

    folder = tmp_path / "onerow"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((packed_model("minilm") / "tokenizer.json").read_bytes())
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["wide"], ["one"], keepdims=1),
        helper.make_node("Mul", ["one", "row"], ["sentence_embedding"]),
    ]
    asked = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "tokens"])
    told = helper.make_tensor_value_info("sentence_embedding", TensorProto.FLOAT, [1, 4])
    row = numpy_helper.from_array(np.ones((1, 4), np.float32), "row")
    graph = helper.make_graph(nodes, "onerow", [asked], [told], [row])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "model.onnx")
    assert server.load("onerow", folder)[0] == 200
    body = server.post("/v1/embeddings", {"input": TEXTS}, "onerow")
    assert [len(one["embedding"]) for one in body["data"]] == [4] * len(TEXTS), "each is computed alone"
    server.post("/v1/embeddings", {"input": TEXTS})
    assert server.unload("onerow")[0] == 200


def test_what_a_model_cannot_do_is_said(server: OnnxServer) -> None:
    for path, body, model in (
        ("/v1/classify", {"input": "x"}, MAIN),
        ("/v1/embeddings", {"input": "x"}, "classifier"),
        ("/v1/token_classify", {"input": "x"}, "classifier"),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}, "magika"),
    ):
        assert server.refusal(path, body, model)[:2] == (400, "route_unsupported"), path
    assert server.refusal("/v1/embeddings", {"input": "x"}, "nobody")[:2] == (404, "model_not_found")


def test_bad_models_are_refused_with_the_reason_and_harm_nobody(
    server: OnnxServer, models: Models, tmp_path: Path
) -> None:
    (tmp_path / "broken.onnx").write_bytes((models.classifier / "model.onnx").read_bytes()[:5000])
    cases = [
        (tmp_path / "broken.onnx", {}, "truncated"),
        (tmp_path / "gone.onnx", {}, "No such file"),
        (models.classifier, {"task": "image_classify"}, "four axes"),
        (models.classifier / "model.onnx", {"task": "classify"}, "tokenizer.json"),
        (models.classifier, {"task": "rerank"}, "one label"),
        (models.classifier, {"no_such": 1}, "no_such"),
    ]
    for place, options, reason in cases:
        status, answer = server.load("bad", place, options)
        assert status == 400, answer
        assert reason in answer["error"]["message"]
    assert "bad" not in server.models()
    server.post("/v1/embeddings", {"input": "still here"})


def test_names_are_not_taken_over(server: OnnxServer, models: Models) -> None:
    assert server.load("classifier", models.classifier)[0] == 200, "again is no error"
    assert server.load("classifier", models.tagger)[0] == 409
    assert server.load(MAIN, models.tagger)[0] == 409
    assert server.unload(MAIN)[0] == 409
    assert server.unload("nobody")[0] == 404


def test_guests_are_evicted_for_others_and_come_back_with_their_next_request(models: Models, tmp_path: Path) -> None:
    with OnnxServer(models.classifier, tmp_path / "log", {"guests": 2}) as probe:
        base = probe.sample("modelyard_onnx_resident_bytes")
        assert probe.load("one", minilm_onnx())[0] == 200
        size = probe.models()["one"]["memory_bytes"]
    assert size > 85_000_000, "at least its weights"
    limit = int(base + 1.6 * size)
    with OnnxServer(models.classifier, tmp_path / "log", {"guests": 2}, memory_bytes=limit) as server:
        for name in ("one", "two"):
            assert server.load(name, minilm_onnx())[0] == 200
        assert {name: one["is_loaded"] for name, one in server.models().items()} == {
            MAIN: True,
            "one": False,
            "two": True,
        }
        assert server.sample("modelyard_onnx_evictions_total") == 1
        first = server.post("/v1/embeddings", {"input": TEXTS[0]}, "one")["data"][0]["embedding"]
        assert cosine(first, reference(TEXTS[:1])[0]) > 0.9999
        assert server.models()["two"]["is_loaded"] is False
        assert server.load("three", models.tagger)[0] == 409, "two guests are the most"
        page = json.dumps(server.ask("GET", "/v1/models")[1])
        assert ENGINE.read_guests(page) == {"one", "two"}
    with OnnxServer(models.classifier, tmp_path / "log", {"guests": 2}, memory_bytes=int(base)) as server:
        status, answer = server.load("one", minilm_onnx())
        assert (status, answer["error"]["code"]) == (503, "insufficient_memory")
        assert "guests_mib" in answer["error"]["message"]
        server.post("/v1/classify", {"input": "good"})


def test_a_load_does_not_hold_up_who_is_served(server: OnnxServer) -> None:
    async def during() -> int:
        headers = {"authorization": f"Bearer {SECRET}"}
        async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}", headers=headers) as session:
            body = {"name": "late", "path": str(minilm_onnx()), "options": {}}
            loading = asyncio.create_task(session.post("/v1/load_model", json=body))
            served = 0
            while not loading.done():
                async with session.post("/v1/classify", json={"model": "classifier", "input": "good day"}) as answer:
                    assert answer.status == 200
                    served += 1
            assert (await loading).status == 200
            return served

    assert asyncio.run(during()) >= 3
    assert server.unload("late")[0] == 200


async def test_an_unload_that_was_given_up_can_be_asked_for_again(models: Models, tmp_path: Path) -> None:
    with OnnxServer(models.classifier, tmp_path / "log", {"guests": 1}) as server:
        assert server.load("one", minilm_onnx())[0] == 200
        headers = {"authorization": f"Bearer {SECRET}"}
        async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}", headers=headers) as session:
            large = {"model": "one", "input": ["a text that takes some time " * 20] * 400}
            call = asyncio.create_task(session.post("/v1/embeddings", json=large))

            async def is_running() -> bool:
                return (await asyncio.to_thread(server.engine_load)).running == 1

            await eventually_async(is_running, 30, "somebody uses it")
            unloading = asyncio.create_task(session.post("/v1/unload_model", json={"name": "one"}))

            async def is_unnamed() -> bool:
                return "one" not in await asyncio.to_thread(server.models)

            await eventually_async(is_unnamed, 30, "nobody new may use it")
            unloading.cancel()

            async def is_named() -> bool:
                return "one" in await asyncio.to_thread(server.models)

            await eventually_async(is_named, 30, "whoever asks what is in memory is told")
            call.cancel()
        assert server.unload("one")[0] == 200
        assert set(server.models()) == {MAIN}


# --- load ---


async def test_who_leaves_frees_its_place_and_what_waits_is_counted(models: Models, tmp_path: Path) -> None:
    options = {"guests": 1, "batch_max": 4, "queue_max": 600}
    with OnnxServer(minilm_onnx(), tmp_path / "log", options) as server:
        headers = {"authorization": f"Bearer {SECRET}"}
        url = f"http://127.0.0.1:{server.port}/v1/embeddings"
        large = {"model": MAIN, "input": ["a text that takes some time " * 20] * 400}
        async with aiohttp.ClientSession(headers=headers) as session:
            call = asyncio.create_task(session.post(url, json=large))

            async def load() -> tuple[int | None, int | None]:
                found = await asyncio.to_thread(server.engine_load)
                return found.running, found.waiting

            async def is_running() -> bool:
                return await load() == (1, 0)

            await eventually_async(is_running, 30, "the first runs")
            async with session.post(url, json=large) as refused:
                assert refused.status == 429
                assert (await refused.json())["error"]["code"] == "queue_full"
                assert refused.headers["retry-after"] == "1"
            # One text goes between those of the large request.
            async with session.post(url, json={"model": MAIN, "input": "short"}) as answer:
                assert answer.status == 200
            assert not call.done(), "a small request does not wait for a large one"
            call.cancel()

            async def is_idle() -> bool:
                return await load() == (0, 0)

            await eventually_async(is_idle, 30, "the place is free")
        done = server.sample(f'modelyard_onnx_items_total{{model="{MAIN}"}}')
        assert done < 400, "what nobody waits for is not computed"
        assert server.sample(f'modelyard_onnx_requests_total{{model="{MAIN}",outcome="left"}}') == 1


async def test_requests_at_once_are_batched(server: OnnxServer) -> None:
    series = 'modelyard_onnx_batch_size_{}{{model="acme/main"}}'
    before = server.sample(series.format("count")), server.sample(series.format("sum"))
    headers = {"authorization": f"Bearer {SECRET}"}
    async with aiohttp.ClientSession(headers=headers) as session:

        async def ask() -> dict[str, Any]:
            body = {"model": MAIN, "input": "all of the same length"}
            async with session.post(f"http://127.0.0.1:{server.port}/v1/embeddings", json=body) as answer:
                found: dict[str, Any] = await answer.json()
                return found

        answers = await asyncio.gather(*(ask() for _ in range(64)))
    first = answers[0]["data"][0]["embedding"]
    assert all(answer["data"][0]["embedding"] == pytest.approx(first, abs=1e-5) for answer in answers)
    batches = server.sample(series.format("count")) - before[0]
    assert server.sample(series.format("sum")) - before[1] == 64
    assert batches < 32, "on the average more than two to a batch"


def test_tokens_and_requests_are_counted_by_model(server: OnnxServer) -> None:
    tokens = 'modelyard_onnx_prompt_tokens_total{model="classifier"}'
    before, load = server.sample(tokens), server.engine_load()
    used = server.post("/v1/classify", {"input": ["good day", "bad"]}, "classifier")["usage"]["prompt_tokens"]
    assert used == 7
    assert server.sample(tokens) == before + used
    assert server.engine_load().prompt_tokens_total == (load.prompt_tokens_total or 0) + used


def _endless(file: Path, name: str, shape: list[Any], kind: int) -> Path:
    """Write a graph that adds up for ever, of one input."""
    from onnx import TensorProto, helper, numpy_helper, save_model

    told = [helper.make_tensor_value_info(one, TensorProto.FLOAT, None) for one in ("v", "v2")]
    asked = [helper.make_tensor_value_info(one, TensorProto.BOOL, []) for one in ("c", "c2")]
    count = helper.make_tensor_value_info("i", TensorProto.INT64, [])
    nodes = [helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Add", ["v", "v"], ["v2"])]
    body = helper.make_graph(nodes, "body", [count, asked[0], told[0]], [asked[1], told[1]])
    constants = [
        numpy_helper.from_array(np.array(2**62, np.int64), "n"),
        numpy_helper.from_array(np.array(True), "t"),
    ]
    nodes = [
        helper.make_node("Cast", [name], ["x"], to=TensorProto.FLOAT),
        helper.make_node("Loop", ["n", "t", "x"], ["sentence_embedding"], body=body),
    ]
    given = helper.make_tensor_value_info(name, kind, shape)
    made = helper.make_tensor_value_info("sentence_embedding", TensorProto.FLOAT, shape)
    graph = helper.make_graph(nodes, "endless", [given], [made], constants)
    save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(file))
    return file


async def test_what_nobody_waits_for_any_more_gives_the_cores_back(models: Models, tmp_path: Path) -> None:
    from onnx import TensorProto

    with OnnxServer(models.classifier, tmp_path / "log", {"guests": 1}) as server:
        endless = _endless(tmp_path / "endless.onnx", "numbers", ["n", 1], TensorProto.FLOAT)
        assert server.load("endless", endless)[0] == 200
        headers = {"authorization": f"Bearer {SECRET}"}
        async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}", headers=headers) as session:
            body = {"inputs": [{"name": "numbers", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
            call = asyncio.create_task(session.post("/v2/models/endless/infer", json=body))

            async def is_running() -> bool:
                return (await asyncio.to_thread(server.engine_load)).running == 1

            await eventually_async(is_running, 30, "it computes, for ever")
            call.cancel()
        server.post("/v1/classify", {"input": "good"})
        assert server.unload("endless")[0] == 200


def test_a_model_whose_first_input_takes_for_ever_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from modelyard.engines.onnx import model
    from modelyard.formats import ArtifactInvalidError
    from onnx import TensorProto

    monkeypatch.setattr(model, "WARM_S_MAX", 0.2)
    (tmp_path / "tokenizer.json").write_bytes((packed_model("minilm") / "tokenizer.json").read_bytes())
    _endless(tmp_path / "model.onnx", "input_ids", ["batch", "tokens"], TensorProto.INT64)
    with pytest.raises(ArtifactInvalidError, match="cannot compute a first input"):
        model.load_model("endless", tmp_path, OnnxOptions(), 1)


# --- the process ---


def test_it_stops_at_once_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    with OnnxServer(minilm_onnx(), tmp_path / "log") as server:

        async def leave() -> None:
            headers = {"authorization": f"Bearer {SECRET}"}
            async with aiohttp.ClientSession(headers=headers) as session:
                body = {"model": MAIN, "input": ["word " * 250] * 500}
                url = f"http://127.0.0.1:{server.port}/v1/embeddings"
                call = asyncio.create_task(session.post(url, json=body))

                async def is_running() -> bool:
                    return (await asyncio.to_thread(server.engine_load)).running == 1

                await eventually_async(is_running, 30, "it computes")
                assert server.process is not None
                server.process.send_signal(signal.SIGTERM)
                with pytest.raises((aiohttp.ClientError, AssertionError)):
                    assert (await call).status == 200

        asyncio.run(leave())
        assert server.process is not None
        assert eventually(lambda: server.process is not None and server.process.poll() is not None, 30, "it ended")
        assert server.process.returncode == 0


def test_a_model_that_cannot_be_loaded_ends_the_process_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\x08\x09\x3a\x05junk!")
    server = OnnxServer(tmp_path / "model.onnx", tmp_path / "log")
    server.start()
    assert server.process is not None
    assert server.process.wait(60) == 1
    assert "the model cannot be loaded" in (tmp_path / "log").read_text()
