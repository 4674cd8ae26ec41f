from .triton_impl import register_to_dispatch


register_to_dispatch()
