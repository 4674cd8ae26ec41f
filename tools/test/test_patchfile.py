"""The text form of a patch: parse and render are inverses."""

from hypothesis import given, strategies as st

from staging import patchfile


DIFF = """\
diff --git a/torch/a.py b/torch/a.py
--- a/torch/a.py
+++ b/torch/a.py
@@ -3,2 +3,3 @@ def f():
 x
+y
 z
@@ -40,1 +41,2 @@
 q
+r
diff --git a/torch/b.py b/torch/b.py
--- a/torch/b.py
+++ b/torch/b.py
@@ -1 +1 @@
-a
+b
"""
LINE = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1).filter(
    lambda s: not s.startswith(("---", "diff --git", "Subject:", "[PATCH"))
)


@given(title=LINE, body=st.lists(LINE, max_size=4))
def test_parse_inverts_render(title, body):
    message = title + "\n" + ("\n" + "\n".join(body) + "\n" if body else "")
    text = patchfile.render(message, DIFF, "A <a@b.c>")
    assert patchfile.parse(text) == patchfile.Patch(message, DIFF)
    again = patchfile.parse(text)
    assert patchfile.render(again.message, again.diff, "A <a@b.c>") == text


def test_message_without_edits():
    text = patchfile.render("Only files\n\nWhy.\n", "", "A <a@b.c>")
    assert patchfile.parse(text) == patchfile.Patch("Only files\n\nWhy.\n", "")


def test_mail_of_git_format_patch():
    text = (
        "From 1234 Mon Sep 17 00:00:00 2001\nFrom: A <a@b.c>\nDate: x\n"
        "Subject: [PATCH 2/3] A title that git\n folds\n\nBody.\n---\n torch/a.py | 1 +\n\n"
        + DIFF.replace("\n--- a/torch/b", "\nindex 12ab..34cd 100644\n--- a/torch/b")
        + "-- \n2.39.5\n\n"
    )
    patch = patchfile.parse(text)
    assert patch.message == "A title that git folds\n\nBody.\n"
    assert patch.paths == ("torch/a.py", "torch/b.py")
    assert patchfile.normalise(patch.diff) == DIFF


def test_removed_line_that_looks_like_a_signature():
    diff = DIFF + "@@ -9,2 +9,1 @@\n--- \n x\n"
    assert patchfile.parse(diff).diff == diff


def test_hunk_is_named_by_number_and_header():
    assert patchfile.hunk_at(DIFF, "torch/a.py", 40).startswith("hunk 2 of 2 (@@ -40,1")
    assert patchfile.hunk_at(DIFF, "torch/b.py", 1).startswith("hunk 1 of 1")
    assert patchfile.hunk_at(DIFF, "torch/b.py", 7) == "line 7"
