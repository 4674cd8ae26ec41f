"""Triton kernels of the MoE ops; see launch.py for the entry points.

experts.py describes an expert layer as one value. A token passes the other files in this
order: topk (the router), permutation (the rows of each expert, tile lists), forward (up-projection
with activation, grouped matmul), reductions (combine), backward. rows.py launches the memory-bound
kernels, matmuls.py the products, and launch.py combines them. configs.py has the tiles.

This package imports only torch and triton and nothing else of torch._native, so
that it can be loaded by path on any release of torch.
"""
