"""Triton kernels of the MoE ops; see launch.py for the entry points.

experts.py says what travels: an expert layer as one value. Then read in the order of a token's
way: topk (the router), permutation (who goes where, tile lists), forward (up-projection with
activation, grouped matmul), reductions (combine), backward. rows.py launches what is bound by
memory, matmuls.py the products, launch.py puts them together. configs.py has the tiles.

This package imports only torch and triton and nothing else of torch._native, so
that it can be loaded by path on any release of torch.
"""
