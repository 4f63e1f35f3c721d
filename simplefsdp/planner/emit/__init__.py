"""The code that TorchInductor writes for a GPU that is not there."""
