"""Calls torchgen's real generators with the filtered op lists. Used by main.

Everything below ``out`` has the layout of a PyTorch build:

    aten/src/ATen/            registrations, ops/ headers
    torch/csrc/autograd/generated/
    aoti/                     C shims of the new ops
    shims/                    c_shim_*.h over all ops, as checked in upstream
    changed/                  registrations of changed existing ops
    python/                   annotated_fn_args.py
"""

import re
from argparse import Namespace
from pathlib import Path
from unittest import mock

import torchgen.gen as gen
from tools.autograd import (
    gen_annotated_fn_args,
    gen_autograd_functions,
    gen_inplace_or_view_type,
    gen_python_functions as python,
    gen_trace_type,
    gen_variable_type,
    load_derivatives,
)
from torchgen.api import cpp
from torchgen.api.autograd import match_differentiability_info
from torchgen.gen_aoti_c_shim import gen_aoti_c_shim_files
from torchgen.model import (
    dispatch_keys,
    DispatchKey,
    NativeFunction,
    NativeFunctionsGroup,
    NativeFunctionsViewGroup,
)
from torchgen.selective_build.selector import SelectiveBuilder
from torchgen.utils import FileManager

from opdiff import masked_indices, OpDiff, parse_all_backends, Rejected


AUTOGRAD = "torch/csrc/autograd/generated"
_FUNCTION_KEYS = {
    DispatchKey.CPU,
    DispatchKey.CUDA,
    DispatchKey.CompositeImplicitAutograd,
    DispatchKey.CompositeImplicitAutogradNestedTensor,
    DispatchKey.CompositeExplicitAutograd,
    DispatchKey.CompositeExplicitAutogradNonFunctional,
    DispatchKey.Meta,
}
_BOUND = (python.is_py_torch_function, python.is_py_nn_function)
_AOTI_BACKENDS = {DispatchKey.CPU, DispatchKey.CUDA, None}
# Those of `gen.py --update-aoti-c-shim`, on every platform.
_CHECKED_IN_BACKENDS = _AOTI_BACKENDS | {DispatchKey.MPS, DispatchKey.XPU}


class Emitter:
    """One source tree in, one build-like folder out."""

    def __init__(self, source: Path, out: Path, diff: OpDiff) -> None:
        self.source = source
        self.out = out
        self.diff = diff
        self.aten = source / "aten/src/ATen"
        self.autograd = source / "tools/autograd"
        self.yaml = str(self.aten / "native/native_functions.yaml")
        self.tags = str(self.aten / "native/tags.yaml")

    def registrations(self) -> None:
        """Schema, kernels, headers and functionalization of the new ops."""
        groups = self.diff.groups(self.diff.added)
        views = gen.get_grouped_by_view_native_functions(self.diff.added)
        install = self.out / "aten/src/ATen"
        self._generate(
            self._arguments(
                self.diff.added, groups, self.diff.parsed.backend_indices, install
            ),
            [g for g in views if isinstance(g, NativeFunctionsViewGroup)],
        )
        schema = install / "RegisterSchema.cpp"
        schema.write_text(_as_fragment(schema.read_text()))

    def changed_registrations(self) -> None:
        """Only the (op, key) pairs of existing ops that differ from the wheel."""
        if not self.diff.changed:
            return
        groups = self.diff.groups(self.diff.changed)
        install = self.out / "changed/aten/src/ATen"
        members = [f for g in groups for f in _functions(g)]
        arguments = self._arguments(members, groups, masked_indices(self.diff), install)
        self._generate(arguments, [])
        # A structured op may gain a backend; its Meta and non-functional kernels, which
        # come with any, are the wheel's.
        of_the_wheel = ("Functionalization", "RegisterMeta", "NonFunctional")
        for path in install.glob("*.cpp"):
            registers = "m.impl" in path.read_text()
            wanted = path.stem.startswith("Register") and path.stem.endswith(
                "Everything"
            )
            if not (registers and wanted) or any(n in path.stem for n in of_the_wheel):
                path.unlink()

    def autograd_sources(self) -> None:
        """VariableType, Functions, TraceType and their Python classes."""
        out = self.out / AUTOGRAD
        out.mkdir(parents=True, exist_ok=True)
        templates = str(self.autograd / "templates")
        infos, used_keys = load_derivatives.load_derivatives(
            str(self.autograd / "derivatives.yaml"), self.yaml, self.tags
        )
        names = {str(f.func.name) for f in self.diff.added}
        ordered = sorted(self.diff.added, key=lambda f: cpp.name(f.func))
        matched = match_differentiability_info(ordered, infos)
        own = {k: v for k, v in infos.items() if str(k.name) in names}
        gen_variable_type.gen_variable_type(
            str(out), self.yaml, self.tags, matched, templates, used_keys
        )
        gen_inplace_or_view_type.gen_inplace_or_view_type(
            str(out), self.yaml, self.tags, matched, templates
        )
        gen_trace_type.gen_trace_type(str(out), self.diff.added, templates)
        gen_autograd_functions.gen_autograd_functions_lib(str(out), own, templates)
        gen_autograd_functions.gen_autograd_functions_python(str(out), own, templates)

    def python_bindings(self) -> None:
        """torch.<op> and torch._C._nn.<op>, their parsers and named-tuple return types."""
        out = self.out / AUTOGRAD
        functions = [f for f in self.diff.added if python.should_generate_py_binding(f)]
        for function in functions:
            if not any(is_bound(function) for is_bound in _BOUND):
                raise Rejected(
                    f"{function.func.name}: only functions of the namespaces torch and torch._C._nn "
                    "can be bound by the overlay (no other python_module, no method variant)"
                )
        none_deprecated = out / "deprecated_empty.yaml"
        none_deprecated.write_text("[]")
        signatures = python.load_signatures(
            functions, str(none_deprecated), method=False
        )
        manager = FileManager(out, self.autograd / "templates", dry_run=False)
        python.create_python_bindings_sharded(
            manager,
            signatures,
            python.is_py_torch_function,
            "torch",
            "python_torch_functions.cpp",
            method=False,
            num_shards=1,
            symint=True,
        )
        python.create_python_bindings(
            manager,
            signatures,
            python.is_py_nn_function,
            "torch.nn",
            "python_nn_functions.cpp",
            method=False,
        )
        everything = lambda function: True  # noqa: E731
        python.create_python_return_type_bindings(
            manager, signatures, everything, "python_return_types.cpp"
        )
        python.create_python_return_type_bindings_header(
            manager, signatures, everything, "python_return_types.h"
        )

    def shims(self) -> None:
        """C shim sources of the new ops, and the headers over all ops."""
        full = parse_all_backends(self.yaml, self.tags)
        every = gen.get_grouped_native_functions(full.native_functions)
        self._shims(
            self.out / "shims",
            _CHECKED_IN_BACKENDS,
            full,
            full.native_functions,
            [g for g in every if isinstance(g, NativeFunctionsGroup)],
        )
        own = self.diff.groups(self.diff.added)
        self._shims(
            self.out / "aoti",
            _AOTI_BACKENDS,
            self.diff.parsed,
            self.diff.added,
            [g for g in own if isinstance(g, NativeFunctionsGroup)],
        )

    def function_arguments(self) -> None:
        """annotated_fn_args.py, which a build writes into torch.testing."""
        out = self.out / "python"
        out.mkdir(parents=True, exist_ok=True)
        gen_annotated_fn_args.gen_annotated(
            self.yaml, self.tags, str(out), str(self.autograd)
        )

    # -- helpers -----------------------------------------------------------------

    def _manager(self, folder: Path) -> FileManager:
        folder.mkdir(parents=True, exist_ok=True)
        options = Namespace(
            source_path=str(self.aten), install_dir=str(folder), dry_run=False
        )
        return gen.make_file_manager(options=options, install_dir=str(folder))

    def _arguments(self, functions, groups, indices, install: Path) -> dict:
        return {
            "native_functions": functions,
            "grouped_native_functions": groups,
            "structured_native_functions": [
                g for g in groups if isinstance(g, NativeFunctionsGroup)
            ],
            "selector": SelectiveBuilder.get_nop_selector(),
            "static_dispatch_idx": [],
            "backend_indices": indices,
            "core_fm": self._manager(install / "core"),
            "cpu_fm": self._manager(install),
            "device_fms": {"cuda": self._manager(install)},
            "dispatch_keys": dispatch_keys,
            "functions_keys": _FUNCTION_KEYS,
            "rocm": False,
            "per_operator_headers": True,
        }

    def _generate(self, arguments: dict, views: list) -> None:
        install = Path(arguments["cpu_fm"].install_dir)
        # gen_source_files also writes C shims; those have their own step.
        with mock.patch.object(gen, "gen_aoti_c_shim_files"):
            gen.gen_source_files(
                **arguments,
                view_groups=views,
                aoti_fm=self._manager(self.out / "aoti"),
                cpu_vec_fm=self._manager(install),
                force_schema_registration=False,
                skip_dispatcher_op_registration=False,
                update_aoti_c_shim=False,
                aoti_backends=_AOTI_BACKENDS,
                extend_aoti_c_shim=False,
            )
        headers = {**arguments, "backend_indices": self.diff.parsed.backend_indices}
        gen.gen_headers(
            **headers,
            valid_tags=gen._GLOBAL_PARSE_TAGS_YAML_CACHE[self.tags],
            headeronly_fm=self._manager(install / "core"),
            ops_fm=self._manager(install / "ops"),
        )

    def _shims(self, folder: Path, backends, parsed, functions, structured) -> None:
        gen_aoti_c_shim_files(
            aoti_fm=self._manager(folder),
            aoti_backends=backends,
            native_functions=functions,
            structured_native_functions=structured,
            backend_indices=parsed.backend_indices,
            extra_cuda_headers="",
            extend_aoti_c_shim=False,
            update_aoti_c_shim=True,
        )


def _functions(group: NativeFunction | NativeFunctionsGroup) -> list[NativeFunction]:
    return (
        list(group.functions()) if isinstance(group, NativeFunctionsGroup) else [group]
    )


def _as_fragment(schema: str) -> str:
    """The aten library is defined by the wheel; ours may only add to it."""
    text = schema.replace("TORCH_LIBRARY(aten, m)", "TORCH_LIBRARY_FRAGMENT(aten, m)")
    # The template also defines an op that is not in the yaml; the wheel has it.
    text = re.sub(
        r"\n\s*// Distributed Ops.*?m\.def\(\"get_gradients[^\n]*\n",
        "\n",
        text,
        flags=re.DOTALL,
    )
    if "TORCH_LIBRARY(aten" in text or "get_gradients" in text:
        raise Rejected("RegisterSchema.cpp has a form this stager does not know")
    return text
