"""Llama 3.1: model, data, checkpoints and the trainer."""
