"""Triton kernels of the MoE ops; see launch.py for the entry points.

Read in the order of a token's way: topk (the router), permutation (who goes
where, tile lists), forward (up-projection with activation, grouped matmul),
reductions (combine), backward. activations.py and configs.py hold the two tables.

This package imports only torch and triton and nothing else of torch._native, so
that it can be loaded by path on any release of torch.
"""
