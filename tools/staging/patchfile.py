"""The text format of one pull request's patch: parse, render, name a hunk.

A patch is a mail as `git am` reads it: zero commit hash, no statistics, no
signature, no index lines (they change whenever an earlier PR of the stack
touches the same file). The message is the description of the pull request.
Reading is lenient (a bare `git diff` is accepted), writing has one form.
Texts are the bytes of the files decoded with ``surrogateescape``, and lines
end at "\\n" only, so that any file survives.
Used by stack, checkout, export, apply and drift.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from .texts import encode


_ZERO = "0" * 40
_DIFF = re.compile(r"^diff --git a/(.+) b/(.+)$", re.MULTILINE)
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@.*$", re.MULTILINE)
# What format-patch writes below a diff. A removed line "- " looks like its first
# line, but the diff does not end with a line that starts with a digit.
_SIGNATURE = re.compile(r"\n-- \n\d[^\n]*\n*\Z")


@dataclass(frozen=True)
class Patch:
    """A parsed patch file.

    Args:
        message: subject line, blank line, body; "" for a bare diff.
        diff: from the first ``diff --git`` line on.
    """

    message: str
    diff: str

    @property
    def paths(self) -> tuple[str, ...]:
        """The files it edits, in order."""
        return tuple(m.group(2) for m in _DIFF.finditer(self.diff))

    def only(self, paths: Collection[str]) -> Patch:
        """The same message with the edits of these files."""
        kept = (p for p in split_by_file(self.diff) if path_of(p) in paths)
        return replace(self, diff="".join(kept))

    def without(self, paths: Collection[str]) -> Patch:
        """The same message with the edits of all other files."""
        kept = (p for p in split_by_file(self.diff) if path_of(p) not in paths)
        return replace(self, diff="".join(kept))

    @property
    def created(self) -> tuple[str, ...]:
        """Files it would add or delete, which a patch must not do."""
        found = []
        for part in split_by_file(self.diff):
            if re.search(r"^(new|deleted) file mode ", part, re.MULTILINE):
                match = _DIFF.match(part)
                found.append(match.group(2) if match else part[:60])
        return tuple(found)


def parse(text: str) -> Patch:
    """Splits a patch file into message and diff."""
    match = _DIFF.search(text)
    head = text[: match.start()] if match else text
    diff = text[match.start() :] if match else ""
    diff = _SIGNATURE.sub("\n", diff)
    return Patch(_message(head), diff)


def _message(head: str) -> str:
    """Subject and body of the mail header; "" if there is no Subject."""
    headers, _, body = head.partition("\n\n")
    subject = re.search(
        r"^Subject:[ ]*((?:.*)(?:\n[ \t].*)*)", headers, flags=re.MULTILINE
    )
    if not subject:
        return ""
    title = re.sub(r"\s*\n\s+", " ", subject.group(1)).strip()
    title = re.sub(r"^\[PATCH[^\]]*\]\s*", "", title)
    body = re.split(r"^---$", body, maxsplit=1, flags=re.MULTILINE)[0].strip("\n")
    return f"{title}\n\n{body}\n" if body else f"{title}\n"


def render(message: str, diff: str, author: str) -> str:
    """The one written form of a patch, byte for byte."""
    title, _, body = message.strip("\n").partition("\n\n")
    header = (
        f"From {_ZERO} Mon Sep 17 00:00:00 2001\n"
        f"From: {author}\n"
        "Date: Sat, 1 Jan 2000 00:00:00 +0000\n"
        f"Subject: [PATCH] {title}\n"
    )
    body = body.strip("\n") + "\n" if body.strip() else ""
    return f"{header}\n{body}---\n\n{normalise(diff)}"


def normalise(diff: str) -> str:
    """Drops the index lines of a git diff."""
    parts = split_by_file(diff)
    return "".join(
        re.sub(r"^index [0-9a-f]+\.\.[0-9a-f]+(?: \d+)?\n", "", p, flags=re.MULTILINE)
        if "\n@@ " in p
        else p
        for p in parts
    )


def split_by_file(diff: str) -> list[str]:
    """One piece of text per ``diff --git`` line."""
    starts = [m.start() for m in _DIFF.finditer(diff)] + [len(diff)]
    return [diff[a:b] for a, b in zip(starts, starts[1:])]


def path_of(part: str) -> str:
    """The file that one piece of split_by_file edits."""
    match = _DIFF.match(part)
    return match.group(2) if match else ""


def merge(*diffs: str) -> str:
    """One diff of several over different files, in the order git writes."""
    parts = [part for diff in diffs for part in split_by_file(diff)]
    return "".join(sorted(parts, key=lambda part: encode(path_of(part))))


def hunks(part: str) -> list[str]:
    """The header lines of the hunks of one file, in order."""
    return [match.group(0) for match in _HUNK.finditer(part)]


def context(part: str) -> str:
    """Names the text a file must have for its hunks: a hash of their old lines.

    Line numbers do not enter, so it stays when the hunks only move.
    """
    total = hashlib.sha256()
    for line in part[part.find("\n@@ ") + 1 :].split("\n"):
        if line.startswith("@@ "):
            total.update(b"@@\n")
        elif line[:1] in (" ", "-"):
            total.update(encode(f"{line[1:]}\n"))
    return total.hexdigest()[:16]


def sides(part: str) -> list[tuple[list[str], list[str]]]:
    """The old and the new lines of each hunk of one file."""
    found: list[tuple[list[str], list[str]]] = []
    for line in part[part.find("\n@@ ") + 1 :].split("\n"):
        if line.startswith("@@ "):
            found.append(([], []))
        for lines, marks in zip(found[-1] if found else (), (" -", " +")):
            if line[:1] in tuple(marks):
                lines.append(line[1:])
    return found


def added(part: str) -> list[list[str]]:
    """The added lines of each hunk of one file."""
    found: list[list[str]] = []
    for line in part[part.find("\n@@ ") + 1 :].split("\n"):
        if line.startswith("@@ "):
            found.append([])
        elif found and line[:1] == "+":
            found[-1].append(line[1:])
    return found


def changed_lines(part: str) -> int:
    """Added plus removed lines of the hunks of one file."""
    body = part[part.find("\n@@ ") + 1 :] if "\n@@ " in part else ""
    return sum(line[:1] in ("+", "-") for line in body.split("\n"))


def hunk_at(diff: str, path: str, line: int) -> str:
    """Names the hunk of ``path`` that starts at old line ``line``.

    Returns:
        "hunk 2 of 3 (@@ -10,4 +10,6 @@)", or "line N" when none starts there.
    """
    for part in split_by_file(diff):
        if path_of(part) != path:
            continue
        found = list(_HUNK.finditer(part))
        for number, hunk in enumerate(found, 1):
            if int(hunk.group(1)) == line:
                return f"hunk {number} of {len(found)} ({hunk.group(0)})"
    return f"line {line}"
