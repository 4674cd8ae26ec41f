"""Expert parallelism for mixture-of-experts layers (prototype).

The path of tokens                                   The path of experts
    groups            of ranks, only for these           plan    who runs what
    payload           bytes of a row, of a message       loads   inputs of plans
    recompute         what is not sent again             fetch   weights, gradients back
    wire_bytes        what is sent, counted
    exchange          one level: rows to ranks and back
    in_flight         communication beside computation
    agreement         checks that all ranks agree
    all_to_all        the token switches, rerun
    all_gather        the one for decoding
    overlap_schedule  order of the parts of a layer

A module imports only modules above it, and ``fetch`` those above ``all_to_all``. Each docstring says
what the module does and promises. ``ExpertParallel`` and ``ExpertPlacement``
(torch/distributed/tensor/parallel) use them.
"""
