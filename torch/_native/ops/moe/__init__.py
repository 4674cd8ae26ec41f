from .cutedsl_impl import register_to_dispatch as _register_cutedsl
from .triton_impl import register_to_dispatch as _register_triton


# In the order in which they are asked.
_register_cutedsl()
_register_triton()
