"""The types of the stack's files, and stubs whose templates only upstream has."""

import pytest

from staging import typecheck
from staging.errors import StageError


HUNK = """\
diff --git a/torch/nn/functional.pyi.in b/torch/nn/functional.pyi.in
--- a/torch/nn/functional.pyi.in
+++ b/torch/nn/functional.pyi.in
@@ -7,1 +7,2 @@
 def relu(x: int) -> int: ...
+def moe(x: int) -> int: ...
"""
MOE = """\
from torch.nn import functional as F


def moe(x: int) -> {}:
    return F.{}(x)
"""


def check(project):
    checkout = project.checkout()
    tip = checkout.tip(project.stack, project.console)
    arguments = project.workspace, project.env, checkout, project.stack, tip
    return typecheck.check(*arguments)


def test_error_and_its_correction(project):
    project.write("torch/nn/moe.py", MOE.format("str", "relu"))
    (error,) = check(project)
    assert error.startswith("torch/nn/moe.py:5: bad-return: ")
    project.write("torch/nn/moe.py", MOE.format("int", "relu"))
    assert check(project) == []


@pytest.mark.parametrize(
    "name,platforms",
    [("os.register_at_fork", "win32"), ("os.waitid", "win32, darwin")],
)
def test_name_that_a_platform_lacks(project, name, platforms):
    project.write("torch/nn/moe.py", f"import os\n\n\nprint({name})\n")
    (error,) = check(project)
    assert error.startswith("torch/nn/moe.py:4: missing-attribute: ")
    assert error.endswith(f"(on {platforms})")
    guarded = (
        f"import os\nimport sys\n\nif sys.platform == 'linux':\n    print({name})\n"
    )
    project.write("torch/nn/moe.py", guarded)
    assert check(project) == []


def test_checkout_is_left_alone(project):
    project.setup()
    project.edit_checkout("torch/overrides.py", "line_1 = 'mine'\n")
    project.write("torch/nn/moe.py", MOE.format("int", "relu"))
    assert check(project) == []
    path = project.workspace.checkout / "torch/overrides.py"
    assert path.read_text() == "line_1 = 'mine'\n"


def test_hunk_of_a_template_is_in_the_stub(project):
    project.write("torch/nn/moe.py", MOE.format("int", "moe"))
    (error,) = check(project)
    assert "missing-attribute" in error
    project.edit_lacking("100-first", HUNK)
    assert check(project) == []
    project.setup()
    stub = project.site / "torch/nn/functional.pyi"
    assert stub.read_text().endswith("\ndef moe(x: int) -> int: ...\n")


def test_hunk_that_does_not_fit_the_stub(project):
    project.edit_lacking("100-first", HUNK.replace("relu", "gelu"))
    with pytest.raises(StageError, match="100-first.patch does not fit the stub"):
        project.setup()
