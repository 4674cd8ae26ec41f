"""Random edits -> refresh -> export -> apply is the identity, byte for byte.

MOE_PROPERTY_CASES sets the number of cases; .ci/long runs 200.
"""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from conftest import identify, make_project, Upstream, WHEEL_FILES
from hypothesis import given, HealthCheck, settings, strategies as st

from staging import export
from staging.gitrepo import GitRepo


CASES = int(os.environ.get("MOE_PROPERTY_CASES", "12"))
OLD = [name for name in WHEEL_FILES if name.endswith(("s.py", "l.py"))]
# Lines that mean something to a mail, a patch, a shell or a decoder.
ODD = (
    b"-- ", b"- ", b"---", b"+++ b/x", b"--- a/x", b"diff --git a/x b/x", b"@@ -1 +1 @@",
    b"From 0000", b">From me", b"Subject: [PATCH] no", b"index 12..34", b"\\ No newline",
    b"2.39.5", b"", b"\t", b" trailing  ", b"caf\xc3\xa9", b"\xff\xfe", b"\x0c", b"\xc2\x85",
    b"\xe2\x80\xa8", b"<<<<<<< HEAD", b"=======", b"a\rb", b"line_11 = 11", b"$Id$",
)  # fmt: skip
LINE = st.one_of(st.sampled_from(ODD), st.binary(max_size=12)).map(
    lambda data: data.replace(b"\n", b"").replace(b"\0", b"")
)
END = st.sampled_from([b"\n", b"\n", b"\r\n", b"\r\r\n"])
TEXT = st.lists(st.tuples(LINE, END), max_size=12).map(
    lambda lines: b"".join(line + end for line, end in lines)
)
DATA = st.one_of(
    TEXT, TEXT.map(lambda data: data.rstrip(b"\r\n")), st.just(b"\0\1\2\n")
)
NAMES = st.sampled_from(
    ["torch/nn/a b.py", "test/caf\u00e9.py", "torch/nn/-x.py", "docs/source/[x]*.md",
     "torch/nn/new.py", "benchmarks/moe/deep/er/x.txt"]
)  # fmt: skip
SPLICE = st.tuples(st.sampled_from(OLD), st.integers(0, 400), st.integers(0, 60), DATA)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A project in the form export writes; every case starts from a copy."""
    project = make_project(tmp_path_factory.mktemp("template"))
    project.setup()
    export.export(project.checkout(), project.stack)
    project.setup()
    return project


@pytest.fixture(scope="module")
def clean(template, tmp_path_factory):
    """A clone of what the project was recovered from."""
    path = tmp_path_factory.mktemp("upstream") / "clone"
    source = template.env.folder / "source-1"
    GitRepo(path.parent).run("clone", "-q", str(source), path.name)
    identify(path)
    return path


def edit(checkout: Path, splices, new_files, executable):
    """Makes the edits; True if anything differs then."""
    for name, start, length, data in splices:
        path = checkout / name
        old = path.read_bytes()
        path.write_bytes(old[:start] + data + old[start + length :])
    for name, data in new_files.items():
        path = checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    if executable:
        (checkout / executable).chmod(0o755)


@settings(
    max_examples=CASES,
    deadline=None,
    derandomize=CASES < 100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    splices=st.lists(SPLICE, min_size=1, max_size=3),
    new_files=st.dictionaries(NAMES, DATA, max_size=2),
    executable=st.sampled_from([None, *OLD]),
)
def test_edit_refresh_apply_is_the_identity(
    template, clean, splices, new_files, executable
):
    with tempfile.TemporaryDirectory(dir=template.root.parent) as name:
        folder = Path(name)
        shutil.copytree(template.root, folder / "repo", symlinks=True)
        project = type(template)(folder / "repo", template.cache)
        checkout = project.checkout()
        checkout.ensure_current(project.stack, project.console)
        before = checkout.git.resolve("HEAD^{tree}")
        edit(checkout.path, splices, new_files, executable)
        if not checkout.edits():
            return
        checkout.git.run("add", "-A", "-f")
        wanted = checkout.git.run("write-tree").strip()
        checkout.git.run("reset", "-q")
        project.refresh("110")
        assert checkout.git.resolve("HEAD^{tree}") == wanted != before
        # Any bytes survive; that some are not to land is another rule.
        problems = export.verify(checkout, project.stack)
        assert [p for p in problems if "binary data does not land" not in p] == []
        shutil.copytree(clean, folder / "clone", symlinks=True)
        upstream = Upstream(folder / "clone", project)
        upstream.apply()
        assert upstream.tree() == wanted
        assert upstream.said == ["applied", "applied"]
