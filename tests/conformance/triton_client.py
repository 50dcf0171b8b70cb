"""What ``test_triton.py`` lets NVIDIA's client do at our gateway; prints what it saw as JSON."""

import json
import sys

import numpy
import tritonclient.http as http


def inputs(rows):
    tensor = http.InferInput("x", list(rows.shape), "FP32")
    tensor.set_data_from_numpy(rows, binary_data=False)
    return [tensor]


address, key, model = sys.argv[1:]
headers = {"authorization": f"Bearer {key}"}
client = http.InferenceServerClient(url=address, concurrency=8)
wanted = [http.InferRequestedOutput("y", binary_data=False)]


def infer(rows):
    return client.infer(model, inputs(rows), outputs=wanted, headers=headers)


two = numpy.array([[1, 2, 3, 4], [10, 20, 30, 40]], dtype=numpy.float32)
calls = [
    client.async_infer(model, inputs(numpy.full((1, 4), place, dtype=numpy.float32)), outputs=wanted, headers=headers)
    for place in range(16)
]
print(
    json.dumps(
        {
            "live": client.is_server_live(headers=headers),
            "ready": client.is_server_ready(headers=headers),
            "model_ready": client.is_model_ready(model, headers=headers),
            "unknown_model_ready": client.is_model_ready("no-such-model", headers=headers),
            "outputs": infer(two).as_numpy("y").tolist(),
            "concurrent": [call.get_result().as_numpy("y").tolist()[0] for call in calls],
        }
    )
)
