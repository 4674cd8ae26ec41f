"""Writes build/include and build/build.ninja: what to compile, with which flags.

Two binaries replace two nearly empty ones of the wheel:

    libtorch.so   registrations, autograd, C shims, kernels. libtorch_python,
                  AOTInductor packages and C++ programs all link it.
    _C.*.so       the torch._C extension with the Python bindings.

Generated code is compiled as three unity files, because parsing headers is
most of its cost, and so are the sources of the PRs outside native/cpu/ in a
developer build: as two, since those that include ATen/ATen.h cannot share one
with those that forbid it. native/cpu/ is compiled file by file, once per CPU
capability, with upstream's flags (cmake/Codegen.cmake).
"""

import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .baseenv import BaseEnv
from .checkout import Checkout
from .codegen import Generated
from .config import digest, Workspace, write_if_changed


_HERE = Path(__file__).parent
_OVERLAY = _HERE / "overlay"
AUTOGRAD = "torch/csrc/autograd/generated"
_ATEN = "aten/src/ATen"

# The wheel was built with both HAVE_ definitions; they decide the layout of
# DispatchStub and must match.
_COMMON = (
    "-std=c++20 -fPIC -fopenmp -fvisibility=hidden -fvisibility-inlines-hidden "
    "-fno-math-errno -fno-trapping-math -DAT_PER_OPERATOR_HEADERS "
    "-DHAVE_AVX2_CPU_DEFINITION -DHAVE_AVX512_CPU_DEFINITION"
)
_WARNINGS = (
    "-Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers "
    "-Wno-unknown-pragmas -Wno-array-bounds -Wno-maybe-uninitialized "
    "-Wno-uninitialized"
)
_CAPABILITY_FLAGS = {
    "DEFAULT": "",
    "AVX2": "-mavx2 -mfma -mf16c "
    "-mno-avx256-split-unaligned-load -mno-avx256-split-unaligned-store",
    "AVX512": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c",
}
# cpuinfo flags that PyTorch's runtime dispatch asks for.
_CAPABILITY_CPU = {
    "AVX512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"},
    "AVX2": {"avx2", "fma"},
}
_REGISTRATION_KEYS = (
    "CPU",
    "Meta",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
    "QuantizedCPU",
    "SparseCPU",
    "NestedTensorCPU",
    "MkldnnCPU",
)
_UMBRELLAS = {
    "Functions.h": ".h",
    "NativeFunctions.h": "_native.h",
    "Operators.h": "_ops.h",
    "NativeMetaFunctions.h": "_meta.h",
}
_INLINE_KEYS = (
    "CPU",
    "CUDA",
    "Meta",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)
# Helpers that every generated Register*.cpp defines in an anonymous namespace.
_REPEATED_HELPERS = ("create_out", "resize_out", "check_inplace", "maybe_create_proxy")


@dataclass(frozen=True)
class BuildOptions:
    """What the user can choose.

    Args:
        capability: "all" compiles native/cpu/ for every CPU capability, "host"
            only for what this machine's dispatch picks (developer build). "all"
            compiles every source on its own, as upstream does.
        ndebug: compile without debug assertions, as the wheel is. The default
            keeps those of the generated autograd code, which catch kernels
            that return their input.
    """

    capability: str = "host"
    ndebug: bool = False


@dataclass
class Binaries:
    """The files the staged environment takes from the build."""

    ninja_file: Path
    library: Path
    extension: Path | None
    sources: int = 0
    headers: dict[str, Path] = field(default_factory=dict)


def write(
    workspace: Workspace,
    env: BaseEnv,
    checkout: Checkout,
    generated: Generated,
    tip: str,
    options: BuildOptions,
) -> Binaries | None:
    """Writes include files and build.ninja for the stack at ``tip``.

    Returns:
        None when the stack has no C++ at all.
    """
    changed = checkout.names_between(checkout.base, tip)
    sources = [n for n in changed if n.startswith("aten/") and n.endswith(".cpp")]
    if generated.empty and not sources:
        return None
    include = workspace.build / "include"
    headers = {**_staged_headers(checkout, changed), **_generated_headers(generated)}
    _write_headers(include, headers)
    graph = _Graph(workspace, env, options)
    graph.add_generated(generated)
    for name in sources:
        graph.add_source(checkout.path / name, name)
    return graph.write(headers)


# -- headers -------------------------------------------------------------------


def _staged_headers(checkout: Checkout, changed: Iterable[str]) -> dict[str, str]:
    """New and patched headers, at the path they are included by."""
    return {
        name.removeprefix("aten/src/"): (checkout.path / name).read_text()
        for name in changed
        if name.endswith((".h", ".cuh")) and not name.startswith("test/")
    }


def _generated_headers(generated: Generated) -> dict[str, str]:
    aten = generated.folder / _ATEN
    if generated.empty:
        return {}
    found = {
        f"ATen/ops/{path.name}": path.read_text()
        for folder in (generated.folder / "changed" / _ATEN / "ops", aten / "ops")
        for path in sorted(folder.glob("*.h"))
    }
    for umbrella, includes in umbrella_includes(aten / "ops").items():
        text = f"#pragma once\n#include_next <ATen/{umbrella}>\n{includes}"
        found[f"ATen/{umbrella}"] = text
    # Over the new ops only: the first is big, the others are not in the wheel.
    for name in ("RedispatchFunctions.h", "ViewMetaClasses.h", "FunctionalInverses.h"):
        found[f"ATen/{name}"] = (aten / name).read_text()
    for name in ("Functions.h", "python_functions.h"):
        path = generated.folder / AUTOGRAD / name
        found[f"{AUTOGRAD}/{name}"] = path.read_text()
    # The wheel's own types stay declared.
    types = (generated.folder / AUTOGRAD / "python_return_types.h").read_text()
    found[f"{AUTOGRAD}/python_return_types.h"] = types.replace(
        "#pragma once",
        f"#pragma once\n#include_next <{AUTOGRAD}/python_return_types.h>",
        1,
    )
    return found


def umbrella_includes(ops: Path) -> dict[str, str]:
    """ATen/Functions.h and its kin -> include lines for the new ops."""
    names = {path.name for path in ops.glob("*.h")}
    roots = sorted(n.removesuffix("_ops.h") for n in names if n.endswith("_ops.h"))
    suffixes = dict(_UMBRELLAS)
    for key in _INLINE_KEYS:
        suffixes[f"{key}Functions_inl.h"] = f"_{key.lower()}_dispatch.h"
    return {
        umbrella: "".join(
            f"#include <ATen/ops/{r}{suffix}>\n" for r in roots if r + suffix in names
        )
        for umbrella, suffix in suffixes.items()
    }


def _write_headers(include: Path, headers: dict[str, str]) -> None:
    for name, text in headers.items():
        write_if_changed(include / name, text)
    for path in include.rglob("*"):
        if path.is_file() and path.relative_to(include).as_posix() not in headers:
            path.unlink()


# -- the ninja file --------------------------------------------------------------


class _Graph:
    """Collects objects, then writes build.ninja."""

    def __init__(
        self, workspace: Workspace, env: BaseEnv, options: BuildOptions
    ) -> None:
        self._workspace = workspace
        self._env = env
        self._options = options
        self._obj = workspace.build / "obj"
        self._unity = workspace.build / "unity"
        self._kernels: list[str] = []
        self._rules: list[str] = []
        # Sources that are compiled together, by the name of their unity file.
        self._together: dict[str, list[Path]] = {"sources": [], "sources_of_aten": []}
        self._library_objects: list[Path] = []
        self._extension_objects: list[Path] = []

    def add_generated(self, generated: Generated) -> None:
        """The three unity files."""
        if generated.empty:
            return
        registrations, others = _registration_sources(generated.folder)
        aten = "".join(map(_separate_helpers, registrations)) + _includes(others)
        # Warnings of generated code are upstream's business.
        self._compile_unity("aten", aten, "-O1 -w", self._library_objects)
        if not generated.added:
            return
        autograd = generated.folder / AUTOGRAD
        names = [
            "Functions.cpp",
            "VariableTypeEverything.cpp",
            "TraceTypeEverything.cpp",
        ]
        in_place = autograd / "ADInplaceOrViewTypeEverything.cpp"
        if "m.impl" in in_place.read_text():
            names.append(in_place.name)
        texts = [autograd / name for name in names] + [_OVERLAY / "hidden_symbols.cpp"]
        self._compile_unity(
            "autograd", _includes(texts), "-O1 -w", self._library_objects
        )
        names = [
            "python_functionsEverything.cpp",
            "python_nn_functions.cpp",
            "python_return_types.cpp",
            "python_torch_functions_0.cpp",
        ]
        texts = [autograd / name for name in names] + [_OVERLAY / "python_module.cpp"]
        # The parser of arguments formats with fmt, whose functions a wheel does not export.
        python = f"-O1 -w -DFMT_HEADER_ONLY=1 -isystem {_word(sysconfig.get_paths()['include'])}"
        self._compile_unity("python", _includes(texts), python, self._extension_objects)

    def add_source(self, path: Path, name: str) -> None:
        """A source file of a PR, once or once per capability."""
        stem = (
            name.removeprefix("aten/src/ATen/").removesuffix(".cpp").replace("/", ".")
        )
        if not re.fullmatch(r"aten/src/ATen/native/cpu/[^/]+\.cpp", name):
            if self._options.capability == "all":
                flags = f"-O2 {_WARNINGS}{self._shadow_flag(path)}"
                self._compile(path, stem, flags, self._library_objects)
            else:
                is_narrow = "#define TORCH_ASSERT_" in path.read_text()
                unity = "sources" if is_narrow else "sources_of_aten"
                self._together[unity].append(path)
            return
        wanted = capabilities(path.read_text(), self._options.capability)
        for capability in wanted:
            flags = (
                f"-O3 {_WARNINGS} {_CAPABILITY_FLAGS[capability]} "
                f"-DCPU_CAPABILITY={capability} -DCPU_CAPABILITY_{capability}"
            )
            self._compile(path, f"{stem}.{capability}", flags, self._library_objects)
            self._kernels.append(self._rules.pop())

    def _shadow_flag(self, *paths: Path) -> str:
        """Names the headers of the wheel that a patch edits and ``paths`` include.

        An object from before the edit depends on the wheel's header, which does not change.
        """
        include = self._workspace.build / "include"
        pattern = r'#include [<"](ATen/[^>"]+)[>"]'
        names = {n for path in paths for n in re.findall(pattern, path.read_text())}
        shadowed = [
            Path(name).stem
            for name in sorted(names)
            if (include / name).exists()
            and (self._env.site / "torch/include" / name).exists()
        ]
        return f" -DPATCHED_HEADERS={'_'.join(shadowed)}" if shadowed else ""

    def write(self, headers: dict[str, str]) -> Binaries:
        """Writes build.ninja (if different) and names its products."""
        for unity, paths in self._together.items():
            if paths:
                flags = f"-O2 {_WARNINGS}{self._shadow_flag(*paths)}"
                self._compile_unity(
                    unity, _includes(paths), flags, self._library_objects
                )
        library = self._workspace.build / "lib" / "libtorch.so"
        extension = None
        objects = _paths(self._library_objects)
        if self._options.capability == "host":
            empty = _paths([self._obj / "null_dispatch.s"])
            self._rules.append(f"build {empty}: nulldispatch {objects}")
            self._rules.append(f"build {empty}.o: assemble {empty}")
            objects += f" {empty}.o"
        target = _paths([library])
        self._rules.append(f"build {target}: library {objects}\ndefault {target}")
        if self._extension_objects:
            suffix = sysconfig.get_config_var("EXT_SUFFIX")
            extension = library.with_name(f"_C{suffix}")
            objects, second = _paths(self._extension_objects), _paths([extension])
            self._rules.append(f"build {second}: extension {objects} | {target}")
            self._rules.append(f"default {second}")
        # Kernels take longest, and ninja starts with the first lines.
        text = "\n".join([*self._header(), *self._kernels, *self._rules]) + "\n"
        ninja_file = self._workspace.build / "build.ninja"
        write_if_changed(ninja_file, text)
        return Binaries(
            ninja_file=ninja_file,
            library=library,
            extension=extension,
            sources=len(self._library_objects) + len(self._extension_objects),
            headers={n: self._workspace.build / "include" / n for n in headers},
        )

    def _compile_unity(
        self, name: str, text: str, flags: str, objects: list[Path]
    ) -> None:
        path = self._unity / f"{name}.cpp"
        write_if_changed(path, text)
        self._compile(path, f"unity_{name}", flags, objects)

    def _compile(
        self, source: Path, name: str, flags: str, objects: list[Path]
    ) -> None:
        target = self._obj / f"{name}.o"
        objects.append(target)
        names = f"{_paths([target])}: cc {_paths([source])}"
        self._rules.append(f"build {names}\n  flags = {flags}")

    def _header(self) -> list[str]:
        build, site = self._workspace.build, self._env.site
        torch_include = site / "torch/include"
        include = (
            f"{_word(f'-I{build}/include')} -isystem {_word(torch_include)} "
            f"-isystem {_word(f'{torch_include}/torch/csrc/api/include')}"
        )
        # No machine path reaches the binaries or an error message.
        prefixes = " ".join(
            _word(f"-ffile-prefix-map={folder}/=")
            for folder in (self._workspace.checkout, build, torch_include)
        )
        ndebug = "-DNDEBUG" if self._options.ndebug else ""
        needed = " ".join(f"-l:{n}" for n in _torch_libraries(site))
        lib = _word(f"-L{site}/torch/lib")
        null_dispatch = f"{_word(sys.executable)} {_word(_HERE / 'null_dispatch.py')}"
        return [
            f"builddir = {str(build).replace('$', '$$')}",
            f"common = {_COMMON} {ndebug} {prefixes} {include}",
            "rule cc",
            "  command = g++ $common $flags -MMD -MF $out.d -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = compile $out",
            "rule nulldispatch",
            f"  command = {null_dispatch} $out $in",
            "rule assemble",
            "  command = g++ -c $in -o $out",
            "rule library",
            "  command = g++ -shared -Wl,-soname,libtorch.so -o $out $in -fopenmp "
            "-Wl,-z,defs -Wl,--allow-shlib-undefined -Wl,-rpath,\\$$ORIGIN "
            f"{lib} -Wl,--no-as-needed {needed} -Wl,--as-needed -l:libc10.so",
            "  description = link libtorch.so",
            "rule extension",
            f"  command = g++ -shared -o $out $in -Wl,--no-as-needed "
            f"{_word(f'-L{build}/lib')} "
            f"-l:libtorch.so {lib} -l:libtorch_python.so -Wl,--as-needed "
            "-l:libtorch_cpu.so -l:libc10.so -Wl,--enable-new-dtags "
            "-Wl,-rpath,\\$$ORIGIN:\\$$ORIGIN/lib",
            "  description = link torch._C",
        ]


def _paths(paths: Iterable[Path]) -> str:
    """Paths of a build line: ninja ends one at a space or a colon."""
    return " ".join(re.sub(r"([$ :])", r"$\1", str(path)) for path in paths)


def _word(text: str | Path) -> str:
    """One word of a command, for the shell and, before it, for ninja."""
    return shlex.quote(str(text)).replace("$", "$$")


def capabilities(source: str, wanted: str) -> list[str]:
    """The CPU capabilities a native/cpu/ file is compiled for.

    Args:
        source: its text; AVX512 kernels are only used where the file asks for
            them (ALSO_REGISTER_AVX512_DISPATCH).
        wanted: "all" or "host".
    """
    if wanted == "all":
        return list(_CAPABILITY_FLAGS)
    host = _host_capability()
    if host != "AVX512":
        return [host]
    found = []
    if re.search(r"(?<!\w)REGISTER_DISPATCH\(", source):
        found.append("AVX2")
    if "ALSO_REGISTER_AVX512_DISPATCH(" in source:
        found.append("AVX512")
    return found or list(_CAPABILITY_FLAGS)


def _host_capability() -> str:
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "DEFAULT"
    match = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    flags = set(match.group(1).split()) if match else set()
    return next((c for c, need in _CAPABILITY_CPU.items() if need <= flags), "DEFAULT")


def _registration_sources(gen: Path) -> tuple[list[Path], list[Path]]:
    """(Register<Key> files, other sources) that register or define something."""
    aten, changed = gen / _ATEN, gen / "changed" / _ATEN
    keyed = [aten / f"Register{key}Everything.cpp" for key in _REGISTRATION_KEYS]
    keyed = [path for path in keyed if _defines_something(path)]
    keyed += [p for p in sorted(changed.glob("Register*.cpp")) if "CUDA" not in p.stem]
    others = [
        aten / "RegisterSchema.cpp",
        aten / "OperatorsEverything.cpp",
        aten / "RegisterFunctionalizationEverything.cpp",
        aten / "CompositeViewCopyKernels.cpp",
        gen / "aoti" / "c_shim_cpu.cpp",
    ]
    return keyed, [path for path in others if _defines_something(path)]


def _defines_something(path: Path) -> bool:
    text = path.read_text()
    if path.name == "CompositeViewCopyKernels.cpp":
        return "_out_symint(" in text or bool(
            re.search(r"\n(?:at::)?(?:Tensor|void|const|::?std)[^\n]*\(", text)
        )
    if path.name.startswith("c_shim_"):
        return "AOTITorchError aoti_torch_" in text
    return bool(re.search(r"m\.(?:impl|def)\(|at::_ops::|::call\(", text))


def _separate_helpers(path: Path) -> str:
    """Includes a Register file with its file-local helpers renamed."""
    tag = digest(str(path))[:8]
    defines = "".join(f"#define {h} {h}_{tag}\n" for h in _REPEATED_HELPERS)
    undefines = "".join(f"#undef {h}\n" for h in _REPEATED_HELPERS)
    return f'{defines}#include "{path}"\n{undefines}'


def _includes(paths: Iterable[Path]) -> str:
    return "".join(f'#include "{path}"\n' for path in paths)


def _torch_libraries(site: Path) -> list[str]:
    """libtorch_* libraries the wheel's libtorch.so needs (CUDA wheels: two)."""
    output = subprocess.run(
        ["readelf", "-d", str(site / "torch/lib/libtorch.so")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return re.findall(r"\(NEEDED\).*\[(libtorch_[^\]]+)\]", output)
