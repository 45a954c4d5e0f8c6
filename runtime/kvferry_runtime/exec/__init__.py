"""Tensors: KV memory, model runner and sampler."""
