"""Expert parallelism for mixture-of-experts layers (prototype).

A token's way                                        Experts on their way
    payload           bytes of a row, of a message       plan    who runs what
    exchange          one level: rows to ranks and back  loads   what plans are made by
    recompute         what is not sent again             fetch   weights, gradients back
    in_flight         communication beside computation
    agreement         checks that all ranks agree
    all_to_all        the token switches, rerun
    all_gather        the one for decoding
    overlap_schedule  order of the parts of a layer

Each module imports some of those above it, ``fetch`` those above ``all_to_all``. Its docstring says
what it does and what it promises. ``ExpertParallel`` and ``ExpertPlacement``
(torch/distributed/tensor/parallel) use them.
"""
