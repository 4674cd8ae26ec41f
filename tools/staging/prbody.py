"""pr: the body of one pull request, in the shape PyTorch's reviewers ask for.

Why and what come from the patch's description, everything else from its entry
in series.toml and from the results files that entry names. Nothing is made up:
a section without a source says what is missing instead of being left out
silently, except benchmarks, which not every PR needs.
"""

import re
from collections import Counter
from collections.abc import Container, Iterator

from . import benchtable, patchfile
from .benchtable import table
from .errors import StageError
from .series import is_test, PullRequest, Stack


NOT_STATED = "Not stated yet"
_TEST_PLAN = re.compile(
    r"^(?:Test plan|Tests):.*?(?=\n\n\S|\Z)", re.MULTILINE | re.DOTALL
)


def render(stack: Stack, pr: PullRequest) -> str:
    """Markdown of the whole body; its first line is the title.

    Raises:
        StageError: no patch with a description yet, or an unreadable results file.
    """
    patch = stack.patch(pr)
    if patch is None or not patch.message:
        raise StageError(
            f"{pr.patch_path}: no description yet",
            hint="the patch carries it: refresh, or amend the commit and export",
        )
    _, _, text = patch.message.partition("\n\n")
    plans = [found.group(0) for found in _TEST_PLAN.finditer(text)]
    body = re.sub(r"\n{3,}", "\n\n", _TEST_PLAN.sub("", text)).strip()
    sections = [
        f"# {title(stack, pr)}",
        _stack(stack, pr),
        body,
        _section("Support", _support(pr)),
        _section("Test plan", _test_plan(stack, pr, plans)),
        _section("Benchmarks", _benchmarks(stack, pr)),
        _section("Backward compatibility", _bc(stack, pr, patch)),
        _section("What to review", _review(stack, pr, patch)),
        _closing(pr),
    ]
    return "\n\n".join(s for s in sections if s).rstrip() + "\n"


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text}" if text else ""


def title(stack: Stack, pr: PullRequest) -> str:
    """One line: that of the description, else of series.toml."""
    patch = stack.patch(pr)
    return (patch.message if patch else pr.title).partition("\n")[0].strip()


def _stands_alone(stack: Stack, pr: PullRequest) -> bool:
    return next(one for one in stack.series if one.name == pr.series).independent


def _stack(stack: Stack, pr: PullRequest) -> str:
    """As ghstack lists it: newest on top, an arrow at this one; its series only.

    Nothing for a PR that stands alone.
    """
    if _stands_alone(stack, pr):
        return ""
    series = next(one for one in stack.series if one.name == pr.series)
    lines = [f"Series {series.name} (oldest at bottom): {series.why}"]
    for other in reversed([o for o in stack.prs if o.series == pr.series]):
        mark = "__->__ " if other.name == pr.name else ""
        lines.append(f"* {mark}{other.name}: {title(stack, other)}")
    needed = [*dict.fromkeys((*series.needs, *pr.needs))]
    lines += [f"* on top of the series {', '.join(needed)}"] if needed else []
    return "\n".join(lines)


def _support(pr: PullRequest) -> str:
    """The matrix of series.toml: first row is the head."""
    return table([list(row) for row in pr.support]) if pr.support else ""


def _test_plan(stack: Stack, pr: PullRequest, plans: list[str]) -> str:
    """Exact commands in upstream's form, and on what they were run."""
    landing = [test for test in pr.tests if not stack.stays(test)]
    tests = [*landing, *sorted(filter(is_test, pr.upstream_paths))]
    lines = list(pr.test_plan) or [f"python {test}" for test in tests]
    parts = []
    for text in plans:
        words = text.partition(":")[2].strip("\n")
        commands = [line.strip() for line in words.splitlines()]
        extra = [c for c in commands if c.startswith("python ") and c not in lines]
        lines += extra
        prose = [c for c in commands if c and c not in lines]
        if prose and "/" not in prose[0].partition(" ")[0]:
            prose[0] = prose[0][:1].upper() + prose[0][1:]
        parts += ["\n".join(prose)] if prose else []
    if lines:
        parts.append("```\n" + "\n".join(lines) + "\n```")
    edited = {path for path, _, kind in file_sizes(stack, pr) if kind != "test"}
    if edited and edited <= set(pr.upstream_paths):  # nothing that the wheel has
        parts.append("Not run in a build from source.")
    elif tests:
        base = f"torch {stack.base.torch} ({stack.base.git[:8]})"
        others = "" if _stands_alone(stack, pr) else " and those below it"
        parts.append(
            f"Run on CPU, on the {base} wheel with this change{others} applied. Not run in a build "
            "from source."
        )
    return "\n\n".join(parts) or "No test of its own: nothing here runs by itself."


def _benchmarks(stack: Stack, pr: PullRequest) -> str:
    """The benchmark tables. A PR that stands alone has programs in its description instead."""
    if _stands_alone(stack, pr):
        return ""
    return "\n\n".join(benchtable.render(stack.root, entry) for entry in pr.results)


def _bc(stack: Stack, pr: PullRequest, patch: patchfile.Patch) -> str:
    """What series.toml says, else only what the diff itself proves."""
    if pr.bc:
        return pr.bc.strip()
    ours = set()  # what PRs below added is not released yet
    for other in stack.prefix(pr.name).prs[:-1]:
        ours |= set(_lines(stack.patch(other), "+"))
    removed = dict(_lines(patch, "-", but=ours))
    changed = [f"`{path}`" for path in removed if stack.owner(path) is None]
    if not changed:
        return "Not BC-breaking: it only adds, no released line changes."
    return (
        f"**{NOT_STATED}.** It changes released lines of {', '.join(changed)}; say "
        "what a user can notice in `bc` of series.toml."
    )


def _lines(
    patch: patchfile.Patch | None, sign: str, but: Container[tuple[str, str]] = ()
) -> Iterator[tuple[str, str]]:
    """(path, text) of the added or removed lines of a patch."""
    for part in patchfile.split_by_file(patch.diff) if patch else ():
        path = patchfile.path_of(part)
        for line in part[part.find("\n@@ ") :].split("\n"):
            if line.startswith(sign) and (path, line[1:]) not in but:
                yield path, line[1:]


def _review(stack: Stack, pr: PullRequest, patch: patchfile.Patch) -> str:
    """What changes where, biggest first, so that a reviewer knows the order."""
    sizes = sorted(file_sizes(stack, pr), key=lambda item: -item[1])
    new = set(pr.files)
    rows = [["file", "changed lines", ""]]
    for path, lines, kind in sizes:
        words = [w for w in ("new" if path in new else "", kind) if w]
        rows.append([f"`{path}`", str(lines), ", ".join(words)])
    counts = Counter(kind for _, lines, kind in sizes for _ in range(lines))
    text = f"{table(rows)}\n\n{counts['']} changed lines outside tests, generated files and kernels"
    text += f"; {counts['kernel']} lines of kernels." if counts["kernel"] else "."
    return f"{text} {pr.large.strip()}" if pr.large else text


def file_sizes(
    stack: Stack, pr: PullRequest, later: Counter[str] | None = None
) -> Iterator[tuple[str, int, str]]:
    """(path, changed lines, kind) of every file of a PR, ``later`` being :func:`growth` where
    a caller has it.

    Kind is "test", "generated", "kernel", "docs", "data" or "" for the code
    whose size is limited.
    """
    later = growth(stack) if later is None else later
    patch = stack.patch(pr)
    for part in patchfile.split_by_file(patch.diff) if patch else ():
        path = patchfile.path_of(part)
        yield path, patchfile.changed_lines(part), kind_of(path)
    for path in pr.files:
        data = (stack.root / path).read_bytes()
        lines = 0 if b"\0" in data else data.count(b"\n") - later[path]
        yield path, lines, kind_of(path)


def growth(stack: Stack) -> Counter[str]:
    """Lines that patches add to each file: the tree has a new file as the last PR leaves it."""
    grown: Counter[str] = Counter()
    for pr in stack.every_pr:
        grown.update(path for path, _ in _lines(stack.patch(pr), "+"))
        grown.subtract(path for path, _ in _lines(stack.patch(pr), "-"))
    return grown


_KINDS = (
    ("generated", r".*/generated/.*|test/expect/.*"),
    ("data", r".*\.(npz|json|csv|png)"),
    ("docs", r".*\.(md|rst)"),
    ("test", r"test/.*|torch/testing/.*|benchmarks/.*"),
    ("kernel", r"aten/src/ATen/native/(cpu|cuda)/.*|.*/triton_kernels/.*"),
)


def kind_of(path: str) -> str:
    """Which files do not count against the size of a PR, and why."""
    return next((kind for kind, form in _KINDS if re.fullmatch(form, path)), "")


def _closing(pr: PullRequest) -> str:
    lines = [f"Fixes {issue}" for issue in pr.fixes]
    labels = ", ".join(f"`{label}`" for label in pr.labels)
    lines += [f"Labels: {labels}"] if labels else []
    if pr.owners:
        names = [f"@{owner.lstrip('@')}" for owner in pr.owners]
        lines.append(f"cc {' '.join(names)}")
    return "\n".join(lines)
