"""Which ops are new or changed against the wheel. Imported by main and emit.

Parses both native_functions.yaml files in full. A filtered yaml would be
silently wrong: torchgen gives a dispatch key without entries a default index,
and kernels of structured ops vanish.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torchgen.gen as gen
from torchgen.model import (
    BackendIndex,
    dispatch_keys,
    DispatchKey,
    NativeFunction,
    NativeFunctionsGroup,
)


# What `python -m torchgen.gen` leaves out unless asked for.
_IGNORED = {
    DispatchKey.MPS,
    DispatchKey.SparseMPS,
    DispatchKey.SparseCsrMPS,
    DispatchKey.MTIA,
}
_ALL_KEYS = list(dispatch_keys)


class Rejected(Exception):
    """The overlay cannot express this change; the message says why."""


@dataclasses.dataclass(frozen=True)
class OpDiff:
    """The full patched yaml and the ops in it that differ from the wheel's.

    Args:
        parsed: result of torchgen's parser for the patched yaml.
        base_indices: backend indices of the wheel's yaml.
        added: new overloads, as native functions.
        changed: overloads of the wheel whose dispatch table changed.
    """

    parsed: gen.ParsedYaml
    base_indices: dict[DispatchKey, BackendIndex]
    added: list[NativeFunction]
    changed: list[NativeFunction]

    def groups(
        self, functions: Sequence[NativeFunction]
    ) -> list[NativeFunction | NativeFunctionsGroup]:
        """The groups (functional, out, in-place) these overloads form."""
        wanted = {str(f.func.name) for f in functions}
        found = []
        for group in gen.get_grouped_native_functions(self.parsed.native_functions):
            members = _members(group)
            hits = [f for f in members if str(f.func.name) in wanted]
            if not hits:
                continue
            if functions is self.added and len(hits) != len(members):
                raise Rejected(
                    f"{hits[0].func.name}: a new overload of an existing group; the "
                    "overlay can only add whole groups"
                )
            found.append(group)
        return found


def keep_usual_keys() -> None:
    """Restricts torchgen to the keys a default build generates."""
    dispatch_keys[:] = [k for k in dispatch_keys if k not in _ignored()]


def compare(base_yaml: Path, new_yaml: Path, tags: Path) -> OpDiff:
    """Parses both files and finds the difference.

    Raises:
        Rejected: an op was removed, or the schema of an existing op changed.
    """
    base = gen.parse_native_yaml(str(base_yaml), str(tags), _ignored())
    new = gen.parse_native_yaml(str(new_yaml), str(tags), _ignored())
    before = {str(f.func.name): f for f in base.native_functions}
    after = {str(f.func.name): f for f in new.native_functions}
    removed = sorted(set(before) - set(after))
    if removed:
        raise Rejected(f"{removed[0]}: an op of the wheel cannot be removed")
    added, changed = [], []
    for name, function in after.items():
        if name not in before:
            added.append(function)
        elif _identity(function, new) != _identity(before[name], base):
            if str(function.func) != str(before[name].func):
                raise Rejected(f"{name}: the schema of an existing op cannot change")
            changed.append(function)
    return OpDiff(new, base.backend_indices, added, changed)


def masked_indices(diff: OpDiff) -> dict[DispatchKey, BackendIndex]:
    """Backend indices reduced to the (changed op, key) pairs that differ."""
    names = {f.func.name for f in diff.changed}
    masked = {}
    indices = diff.parsed.backend_indices
    for key in [*indices, *(k for k in dispatch_keys if k not in indices)]:
        new, old = indices[key], diff.base_indices[key]
        kept = {
            name: kernel
            for name, kernel in new.index.items()
            if name in names
            and (name not in old.index or old.index[name].kernel != kernel.kernel)
        }
        masked[key] = dataclasses.replace(new, index=kept)
    return masked


def parse_all_backends(yaml: str, tags: str) -> gen.ParsedYaml:
    """The yaml with the kernels of every platform, as ``gen.py --update-aoti-c-shim`` reads it."""
    # The cache does not ask which keys were ignored.
    cache = gen._GLOBAL_PARSE_NATIVE_YAML_CACHE
    cached, usual = cache.pop(yaml), list(dispatch_keys)
    dispatch_keys[:] = _ALL_KEYS
    try:
        return gen.parse_native_yaml(yaml, tags, {DispatchKey.MTIA})
    finally:
        dispatch_keys[:] = usual
        cache[yaml] = cached


def _ignored() -> set[DispatchKey]:
    return _IGNORED | {k for k in DispatchKey if k.name.endswith("XPU")}


def _members(group: NativeFunction | NativeFunctionsGroup) -> list[NativeFunction]:
    if isinstance(group, NativeFunctionsGroup):
        return list(group.functions())
    return [group]


def _identity(function: NativeFunction, parsed: gen.ParsedYaml) -> tuple:
    """Schema plus everything else about an op that reaches the generators."""
    kernels = frozenset(
        (str(key), metadata.kernel)
        for key in dispatch_keys
        for metadata in [parsed.backend_indices[key].get_kernel(function)]
        if metadata
    )
    return (
        str(function.func),
        function.variants,
        function.structured,
        str(function.structured_delegate),
        function.structured_inherits,
        frozenset(function.tags),
        function.manual_cpp_binding,
        function.manual_kernel_registration,
        function.device_guard,
        function.device_check,
        str(function.python_module),
        str(function.category_override),
        function.has_composite_implicit_autograd_kernel,
        function.has_composite_explicit_autograd_kernel,
        kernels,
    )
