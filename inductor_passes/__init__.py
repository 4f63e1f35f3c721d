"""TorchInductor passes for fully sharded data parallel graphs: re-gather, bucket, reorder."""
