"""Inference layers of a decoder: linear, norm, rotary embedding, MLP. Plain functions of tensors, no sequence state."""
