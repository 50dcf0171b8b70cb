"""Our server of small models beside raw ONNX Runtime."""
