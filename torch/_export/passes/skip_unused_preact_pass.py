import operator

import torch


def skip_unused_preact_pass(graph: torch.fx.Graph) -> None:
    """Sets ``compute_preact=False`` where nothing reads the pre-activations of ``_moe_mlp``.

    They are an output for the backward. A graph that is captured in grad mode asks for them, also
    when it is an inference graph in the end, or a forward whose backward computes them again; only
    the graph can tell. ``F.moe_mlp`` decides by itself where there is none.

    Args:
        graph: functional ATen ops after autograd; changed in place.
    """
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.aten._moe_mlp.default
    ):
        # Anything but an element of the result could be a look at both.
        indices = {
            user.args[1] if user.target is operator.getitem else None
            for user in node.users
        }
        if not indices <= {0} or node.kwargs.get("compute_preact") is False:
            continue
        node.update_kwarg("compute_preact", False)
        if "val" in node.meta:
            output, preact = node.meta["val"]
            node.meta["val"] = output, preact.new_empty(0, preact.shape[1])
