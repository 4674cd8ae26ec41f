from .triton_impl import register_to_dispatch as _register_triton


_register_triton()
