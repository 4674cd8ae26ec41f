"""Expert parallelism for mixture-of-experts layers (prototype).

Token switches move tokens to the ranks of their experts and back; placement decides
which rank that is. The docstring of each module says what it does and what it promises.
"""
