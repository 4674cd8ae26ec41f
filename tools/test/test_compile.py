"""The compiler: first error only, named by the file the user edits."""

import ctypes
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from conftest import make_project

from staging import buildgraph, compile, null_dispatch
from staging.buildgraph import Binaries
from staging.errors import StageError


@pytest.fixture
def graph(project):
    """A build.ninja of one source and one library, in the stager's layout."""
    build = project.workspace.build
    source = build / "checkout/aten/src/ATen/native/MoE.cpp"
    source.parent.mkdir(parents=True)
    (build / "include/ATen/native").mkdir(parents=True)
    library = build / "lib/libtorch.so"
    ninja_file = build / "build.ninja"
    paths = [buildgraph._paths([p]) for p in (build / "obj/MoE.o", source, library)]
    include = buildgraph._word(f"-I{build}/include")
    ninja_file.write_text(
        f"rule cc\n  command = g++ {include} -fPIC -MMD -MF $out.d -c $in -o $out\n"
        "  depfile = $out.d\n  deps = gcc\n"
        "rule link\n  command = g++ -shared -Wl,-z,defs $in -o $out\n"
        f"build {paths[0]}: cc {paths[1]}\n"
        f"build {paths[2]}: link {paths[0]}\n"
    )
    return source, Binaries(ninja_file, library, None, sources=1)


@pytest.mark.parametrize("jobs", ("abc", "0", "-1", "1.5"))
def test_bad_number_of_jobs(monkeypatch, jobs):
    monkeypatch.setenv("MAX_JOBS", jobs)
    with pytest.raises(StageError, match=f"MAX_JOBS must be an integer .*got '{jobs}'"):
        compile.check_compiler()


def test_first_error_only(project, graph, console):
    source, binaries = graph
    lines = ["int first = undeclared_name;", "int second = other_name;"]
    source.write_text("\n".join(lines) + "\n")
    with pytest.raises(StageError) as failure:
        compile.build(project.workspace, binaries, console)
    message = failure.value.message
    assert message.splitlines()[1].startswith(
        "aten/src/ATen/native/MoE.cpp:1:13: error: 'undeclared_name' was not declared"
    )
    assert "int first = undeclared_name;" in message
    assert "other_name" not in message
    assert "other_name" in failure.value.log.read_text()


def test_error_in_a_header_names_the_source_header(project, graph, console):
    source, binaries = graph
    text = "int broken = nothing_here;\n"
    (project.workspace.build / "include/ATen/native/MoE.h").write_text(text)
    source.with_name("MoE.h").write_text(text)
    source.write_text("#include <ATen/native/MoE.h>\n")
    with pytest.raises(StageError, match=r"aten/src/ATen/native/MoE\.h:1:14: error"):
        compile.build(project.workspace, binaries, console)


def test_header_edit_recompiles(project, graph, console):
    source, binaries = graph
    header = project.workspace.build / "include/ATen/native/MoE.h"
    header.write_text("#define VALUE 1\n")
    source.write_text(
        '#include <ATen/native/MoE.h>\nextern "C" int value() { return VALUE; }\n'
    )
    compile.build(project.workspace, binaries, console)
    header.write_text("#define VALUE 2\n")
    compile.build(project.workspace, binaries, console)
    assert ctypes.CDLL(str(binaries.library)).value() == 2


def test_a_header_of_the_wheel_that_a_patch_edits_changes_the_command(project):
    """An object of before names the wheel's header as its dependency, which stays as it is."""
    build, site = project.workspace.build, project.env.site
    source = build / "MoE.cpp"
    for path in (source, site / "torch/include/ATen/native/MoE.h"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#include <ATen/native/MoE.h>\n")
    rules = []
    for _ in range(2):
        graph = buildgraph._Graph(
            project.workspace, project.env, buildgraph.BuildOptions(capability="all")
        )
        graph.add_source(source, "aten/src/ATen/native/MoE.cpp")
        rules.append("".join(graph._rules))
        header = build / "include/ATen/native/MoE.h"
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text("")
    assert rules[0] != rules[1] and "PATCHED_HEADERS=MoE" in rules[1]


def test_overlay_headers_are_not_system_headers(project):
    """-MMD leaves headers of -isystem folders out of the dependencies."""
    graph = buildgraph._Graph(project.workspace, project.env, buildgraph.BuildOptions())
    graph._env.site.joinpath("torch/lib").mkdir(parents=True)
    library = graph._env.site / "torch/lib/libtorch.so"
    command = ["g++", "-shared", "-x", "c++", "/dev/null", "-o", library]
    subprocess.run(command, check=True)
    graph.write({})
    text = (project.workspace.build / "build.ninja").read_text()
    assert f"-I{project.workspace.build}/include" in text


def test_paths_with_a_space(tmp_path, console):
    """Spaces in the paths of the clone, the cache and the interpreter are quoted in build.ninja."""
    project = make_project(tmp_path / "a clone $1: one's")
    lib, build = project.env.site / "torch/lib", project.workspace.build
    lib.mkdir(parents=True)
    for name in ("libtorch.so", "libc10.so"):
        command = ["g++", "-shared", "-x", "c++", "/dev/null", "-o", lib / name]
        subprocess.run(command, check=True)
    source = build / "checkout/aten/src/ATen/native/MoE.cpp"
    source.parent.mkdir(parents=True)
    (build / "include").mkdir()
    (build / "include/value.h").write_text("#define VALUE 7\n")
    source.write_text('#include <value.h>\nextern "C" int value() { return VALUE; }\n')
    graph = buildgraph._Graph(project.workspace, project.env, buildgraph.BuildOptions())
    graph.add_source(source, "aten/src/ATen/native/MoE.cpp")
    binaries = graph.write({})
    compile.build(project.workspace, binaries, console)
    symbols = subprocess.run(["nm", binaries.library], capture_output=True, text=True)
    assert " value\n" in symbols.stdout
    (build / "include/value.h").write_text("#define VALUE nothing_here\n")
    with pytest.raises(StageError, match=r"/value\.h:1:15: error: 'nothing_here'"):
        compile.build(project.workspace, binaries, console)


@pytest.mark.parametrize("capability, objects", [("host", 2), ("all", 3)])
def test_sources_are_compiled_together(project, capability, objects, console):
    """But for a build of all capabilities, and errors still name the source."""
    lib = project.env.site / "torch/lib"
    lib.mkdir(parents=True)
    for name in ("libtorch.so", "libc10.so"):
        command = ["g++", "-shared", "-x", "c++", "/dev/null", "-o", lib / name]
        subprocess.run(command, check=True)
    options = buildgraph.BuildOptions(capability)
    graph = buildgraph._Graph(project.workspace, project.env, options)
    texts = {
        "One": "#define TORCH_ASSERT_ONLY_METHOD_OPERATORS\nint one = 1;\n",
        "Two": "#define TORCH_ASSERT_ONLY_METHOD_OPERATORS\nint two = nothing_here;\n",
        "Three": "#include <ATen/ATen.h>\n",
    }
    (project.workspace.build / "include/ATen").mkdir(parents=True)
    (project.workspace.build / "include/ATen/ATen.h").touch()
    for name, text in texts.items():
        source = project.workspace.checkout / f"aten/src/ATen/native/{name}.cpp"
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(text)
        graph.add_source(source, f"aten/src/ATen/native/{name}.cpp")
    binaries = graph.write({})
    assert binaries.sources == objects
    where = r"aten/src/ATen/native/Two\.cpp:2:11: error: 'nothing_here'"
    with pytest.raises(StageError, match=where):
        compile.build(project.workspace, binaries, console)


def test_hidden_symbol_is_a_link_error(project, graph, console):
    source, binaries = graph
    source.write_text("int hidden(int); int user() { return hidden(1); }\n")
    with pytest.raises(StageError, match=r"undefined reference to hidden\(int\)"):
        compile.build(project.workspace, binaries, console)


def test_no_compiler(project, graph, console, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(StageError, match="g.. is not on PATH") as failure:
        compile.build(project.workspace, graph[1], console)
    assert "apt-get install g++" in failure.value.hint


def test_no_binutils(project, graph, console, monkeypatch, tmp_path):
    (tmp_path / "g++").write_text("#!/bin/sh\necho 12\n")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StageError, match="not on PATH: as, ld, nm, readelf") as failure:
        compile.build(project.workspace, graph[1], console)
    assert "install binutils" in failure.value.hint


def test_old_compiler(project, graph, console, monkeypatch, tmp_path):
    fake = tmp_path / "g++"
    fake.write_text("#!/bin/sh\necho 9\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StageError, match=r"g\+\+ 9 is too old"):
        compile.build(project.workspace, graph[1], console)


def test_no_python_headers(project, monkeypatch):
    """Said before torch is downloaded."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nonexistent")
    project.env.stamp.unlink()
    with pytest.raises(StageError, match="/nonexistent/Python.h is missing") as failure:
        project.setup()
    assert "-dev)" in failure.value.hint
    assert not project.env.stamp.exists()


def test_killed_stager_takes_the_compiler_along(project, graph):
    """A compiler that lived on would write the files of the next call."""
    source, binaries = graph
    marker = project.root / "lived-on"
    text = binaries.ninja_file.read_text()
    slow = f"command = sh -c 'echo compiling; sleep 1; touch \"{marker}\"; false'"
    binaries.ninja_file.write_text(re.sub(r"command = g\+\+ -I.*", slow, text))
    source.write_text("int x;\n")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from staging import compile; from staging.buildgraph import Binaries\n"
        "from staging.config import Workspace; from staging.console import Console\n"
        "b = Path(sys.argv[2]); w = Workspace(b.parent, b, b)\n"
        "x = Binaries(b / 'build.ninja', b / 'lib/libtorch.so', None, 1)\n"
        "compile.build(w, x, Console())\n"
    )
    tools = str(Path(compile.__file__).parents[1])
    build = str(project.workspace.build)
    process = subprocess.Popen(
        [sys.executable, "-c", program, tools, build], stderr=subprocess.PIPE
    )
    assert b"compile" in process.stderr.readline()
    time.sleep(0.4)
    process.kill()
    process.wait()
    time.sleep(1.5)
    assert not marker.exists()


def test_full_disk_while_compiling(project):
    lines = ["/usr/bin/ld: final link failed: No space left on device"]
    error = compile._first_error(lines, project.workspace, Path("log"))
    assert error.message.startswith("no space left on the disk")


def test_host_build_compiles_what_the_dispatcher_picks(monkeypatch):
    monkeypatch.setattr(buildgraph, "_host_capability", lambda: "AVX512")
    plain = "REGISTER_DISPATCH(stub, &kernel)"
    also = "ALSO_REGISTER_AVX512_DISPATCH(stub, &kernel)"
    assert buildgraph.capabilities(plain, "host") == ["AVX2"]
    assert buildgraph.capabilities(also, "host") == ["AVX512"]
    assert buildgraph.capabilities(plain + also, "host") == ["AVX2", "AVX512"]
    assert buildgraph.capabilities(also, "all") == ["DEFAULT", "AVX2", "AVX512"]
    monkeypatch.setattr(buildgraph, "_host_capability", lambda: "AVX2")
    assert buildgraph.capabilities(also, "host") == ["AVX2"]


def test_null_kernels_for_the_other_capabilities(tmp_path):
    """A library that only defines one pointer links, and the others are null."""
    source = tmp_path / "stub.cpp"
    source.write_text(
        "namespace at::native { struct tag; using Fn = void (*)();\n"
        "template <typename F, typename T> struct DispatchStub {\n"
        "  static F DEFAULT, AVX2, AVX512; };\n"
        "template <> Fn DispatchStub<Fn, tag>::AVX2 = [] {};\n}\n"
        "using S = at::native::DispatchStub<at::native::Fn, at::native::tag>;\n"
        'extern "C" int kernels() {\n'
        "  return !!S::DEFAULT + 2 * !!S::AVX2 + 4 * !!S::AVX512; }\n"
    )
    objects = [str(tmp_path / "stub.o")]
    subprocess.run(["g++", "-fPIC", "-c", source, "-o", objects[0]], check=True)
    assembly, library = tmp_path / "null.s", tmp_path / "lib.so"
    names = null_dispatch.missing_pointers(objects)
    assert len(names) == 2
    assembly.write_text(null_dispatch.assembly(names))
    link = ["g++", "-shared", "-Wl,-z,defs", *objects, assembly, "-o", library]
    subprocess.run(link, check=True)
    assert ctypes.CDLL(str(library)).kernels() == 2
