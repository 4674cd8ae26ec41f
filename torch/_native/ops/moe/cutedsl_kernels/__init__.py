"""The expert MLP on the grouped matmuls of torch._vendor.quack.

``launch`` allocates and orders the calls; ``gemms`` are the matmuls and their
epilogues, the only file that imports QuACK and with it the CuTe DSL; ``rows`` holds two
small Triton kernels. What no matmul does is as in ../triton_kernels.
"""
