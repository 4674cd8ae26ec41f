"""series.toml and the tree agree; patches are well formed; pins are exact;
measured numbers in the documents name the results file they are from.

The paths lintrunner passes are ignored: these rules are about the whole.
"""

import json
import re
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from message import report
from staging import drift, evidence, patchfile, series as series_module
from staging.errors import StageError
from staging.prbody import NOT_STATED, render


CODE = "STACK"
_MAX_SUBJECT = 72
_PIN = re.compile(r"^[A-Za-z0-9_.\-]+==[A-Za-z0-9_.]+$")
_DOCUMENTS = ("README.md", "RFC.md", "CONTRIBUTING.md", "benchmarks/moe/README.md")
_RESULTS_FILE = re.compile(r"[\w/.-]*\bresults/[\w.-]+\.json\b")
# Times, rates, sizes and factors; not "60 seconds" or "6 GB of disk".
_MEASURED = re.compile(
    r"\b\d[\d.]*\s?(?:ms|us|[GT]FLOP/s|GB/s|tokens/s|MiB)\b|\b\d+\.\d+x\b"
)
_HEADING = re.compile(r"^#{1,6} ", re.MULTILINE)
_DRIFT_FILE = "torch_patches/drift.json"
_PIN_FILES = ("requirements.txt", "tools/requirements.txt")


def check_series(root: Path) -> None:
    """Bijection between series.toml and the files, and the form of patches."""
    try:
        stack = series_module.load(root)
        problems = series_module.problems(stack)
    except StageError as error:
        problems = [error.message]
        stack = None
    for problem in problems:
        report(series_module.SERIES_FILE, "series", problem, code=CODE)
    if stack is None:
        return
    for pr in stack.prs:
        patch = stack.patch(pr)
        if patch is None or not patch.message:
            continue
        subject, _, body = patch.message.partition("\n\n")
        if len(subject.strip()) > _MAX_SUBJECT:
            rule = (
                f"subject has {len(subject.strip())} characters, allowed {_MAX_SUBJECT}"
            )
            report(pr.patch_path, "subject", rule, code=CODE)
        if not body.strip():
            rule = "no description; the message says why the PR exists"
            report(pr.patch_path, "description", rule, code=CODE)
        if not problems and NOT_STATED in render(stack, pr):
            rule = "changes released lines; say in `bc` what a user can notice"
            report(series_module.SERIES_FILE, pr.name, rule, code=CODE)
        if not patch.message.isascii():
            report(pr.patch_path, "ascii", "the message is not ASCII", code=CODE)


def check_drift(root: Path) -> None:
    """The drift table in CONTRIBUTING.md matches drift.json, which matches the stack."""
    path = root / _DRIFT_FILE
    if not path.exists():
        return
    data = json.loads(path.read_text())
    contributing = root / "CONTRIBUTING.md"
    text = contributing.read_text() if contributing.exists() else ""
    again = f"; run {data['command']} and put `drift --markdown`'s table there"
    if drift.markdown(data) not in text:
        rule = f"has not the table of {_DRIFT_FILE}{again}"
        report(contributing.name, "drift table", rule, code=CODE)
    try:
        stack = series_module.load(root)
    except StageError:
        return  # check_series says it
    edits = {
        pr.name: {patchfile.path_of(part) for part in parts}
        for pr in stack.prs
        if (parts := drift.parts(stack, pr))
    }
    for version in data["versions"]:
        measured = {
            p["name"]: {f["path"] for f in p["files"] if f["status"] != drift.SAME_NAME}
            for p in version["patches"]
        }
        if {name: paths for name, paths in measured.items() if paths} != edits:
            rule = f"{version['version']}: of other PRs or files than today's{again}"
            report(_DRIFT_FILE, "drift", rule, code=CODE)


def check_evidence(root: Path) -> None:
    """RESULTS.md is what the results files say."""
    page = root / evidence.PAGE
    if not page.exists() and not (root / evidence.NOTES).exists():
        return  # nothing is measured here
    try:
        wanted = evidence.render(series_module.load(root))
    except StageError as error:
        report(evidence.PAGE, "results", error.message, code=CODE)
        return
    if not page.exists() or page.read_text(encoding="utf-8") != wanted:
        rule = f"is not of today's results files; run {evidence.COMMAND}"
        report(evidence.PAGE, "results", rule, code=CODE)


def check_pins(root: Path) -> None:
    """Every requirement names one exact version, sorted, once."""
    for name in _PIN_FILES:
        lines = (root / name).read_text().splitlines()
        pins = [line for line in lines if line and not line.startswith("#")]
        for line in pins:
            if not _PIN.match(line):
                rule = f"{line!r}: write name==version"
                report(name, "pin", rule, line=lines.index(line) + 1, code=CODE)
        keys = [re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in pins]
        if keys != sorted(set(keys)):
            report(name, "pin order", "pins must be sorted and unique", code=CODE)


def check_results(root: Path) -> None:
    """Results files that documents name exist; sections with numbers name one."""
    for name in _DOCUMENTS:
        path = root / name
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        starts = [0, *(m.start() for m in _HEADING.finditer(text)), len(text)]
        for start, end in zip(starts, starts[1:]):
            section = text[start:end]
            named = _RESULTS_FILE.findall(section)
            for file in named:
                if not any(
                    (root / base / file).is_file() for base in ("", "benchmarks/moe")
                ):
                    line = text.count("\n", 0, start + section.index(file)) + 1
                    rule = f"{file} does not exist"
                    report(name, "results file", rule, line=line, code=CODE)
            number = _MEASURED.search(section)
            if number and not named:
                line = text.count("\n", 0, start + number.start()) + 1
                rule = (
                    f"{number.group(0)!r} is a measured number; name its file "
                    "below benchmarks/moe/results/ in the same section"
                )
                report(name, "results reference", rule, line=line, code=CODE)


def check_citations(root: Path) -> None:
    """Code and pages that land name no file that stays here."""
    try:
        stack = series_module.load(root)
    except StageError:
        return  # check_series says it
    stays = "|".join(re.escape(entry) for entry in stack.non_landing)
    pattern = re.compile(f"{stays}|{_RESULTS_FILE.pattern}" if stays else _RESULTS_FILE)
    for name in (name for pr in stack.prs for name in pr.files):
        path = root / name
        if not name.startswith(("aten/", "docs/", "torch/")) or not path.exists():
            continue
        text = path.read_text(encoding="utf-8")
        for found in pattern.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            rule = f"{found.group(0)} does not land; say how it was measured"
            report(name, "citation", rule, line=line, code=CODE)


if __name__ == "__main__":
    check_series(Path.cwd())
    check_citations(Path.cwd())
    check_results(Path.cwd())
    check_drift(Path.cwd())
    check_evidence(Path.cwd())
    check_pins(Path.cwd())
