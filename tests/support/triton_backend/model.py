"""A Triton backend in Python that runs ONNX models: it stands in for NVIDIA's onnxruntime backend, which has no wheel.

Triton loads it as the backend ``onnxruntime`` (its own process, the environment
of ``tools/pytriton.py``), so that the server, its batcher and its metrics are
real, and a model's folder is what a GPU machine would be given.
"""

import pathlib

import numpy
import onnxruntime
import triton_python_backend_utils as triton

_TYPES = {"tensor(float)": "TYPE_FP32", "tensor(int64)": "TYPE_INT64", "tensor(int32)": "TYPE_INT32"}


def _session(folder, version):
    file = pathlib.Path(folder) / str(version) / "model.onnx"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        """Say what goes in and comes out, as the real backend does for a model without a configuration."""
        said = config.as_dict()
        # Triton tells no place; the guard starts it in the folder that has the repository.
        session = _session(pathlib.Path("repository") / said["name"], 1)
        batches = said["max_batch_size"] > 0
        for tensors, add in ((session.get_inputs(), config.add_input), (session.get_outputs(), config.add_output)):
            for one in tensors:
                dims = [size if isinstance(size, int) else -1 for size in one.shape][1 if batches else 0 :]
                add({"name": one.name, "data_type": _TYPES[one.type], "dims": dims})
        return config

    def initialize(self, args):
        self.session = _session(args["model_repository"], args["model_version"])
        self.names = [one.name for one in self.session.get_inputs()]

    def execute(self, requests):
        """Run one batch of all requests that Triton put together."""
        parts = [
            {name: triton.get_input_tensor_by_name(request, name).as_numpy() for name in self.names}
            for request in requests
        ]
        whole = {name: numpy.concatenate([part[name] for part in parts]) for name in self.names}
        outputs = self.session.run(None, whole)
        answers, at = [], 0
        for part in parts:
            rows = len(next(iter(part.values())))
            tensors = [
                triton.Tensor(one.name, values[at : at + rows])
                for one, values in zip(self.session.get_outputs(), outputs, strict=True)
            ]
            answers.append(triton.InferenceResponse(output_tensors=tensors))
            at += rows
        return answers

