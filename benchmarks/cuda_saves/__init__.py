"""Compares what a rehearsal says that CUDA saves with what torch's own forward pass for CUDA saves, byte for byte.

A CUDA build of torch runs a forward pass on CUDA tensors without data, on a machine without a GPU. Its autograd nodes
and saves are those of a GPU. `python -m benchmarks.cuda_saves` prints where the rehearsal differs, for every model of
the zoo and for models of transformers and timm, with and without autocast.
"""
