"""The expert MLP on the grouped matmuls of torch._vendor.quack.

``launch`` allocates and orders the calls. ``gemms`` has the matmuls and their
epilogues; no other file imports QuACK and the CuTe DSL. ``rows`` has two
small Triton kernels. Everything but the matmuls is as in ../triton_kernels.
"""
