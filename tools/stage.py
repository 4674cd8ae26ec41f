#!/usr/bin/env python3
"""Stages the MoE pull requests onto the released PyTorch wheel.

    python3 tools/stage.py run      everything from nothing, then the demo
    python3 tools/stage.py --help   all verbs

This file only needs the standard library: it checks the machine, makes the
stager's own small environment in the user's cache, and runs tools/staging in
it. The rest of the stager starts at tools/staging/cli.py.
"""

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
from typing import NoReturn


ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PINS = os.path.join(ROOT, "tools", "requirements.txt")
HELP = {"-h", "--help"}


def fail(message) -> NoReturn:
    """Ends with one readable message."""
    print("error: " + message, file=sys.stderr)
    sys.exit(1)


def words():
    """The stager's own arguments, without those that it passes to another program."""
    given = sys.argv[1:]
    return given[: given.index("--")] if "--" in given else given


def show_help() -> NoReturn:
    """Help before the first installation: read out of the verbs' docstrings."""
    with open(os.path.join(ROOT, "tools", "staging", "cli.py")) as file:
        tree = ast.parse(file.read())
    verbs = {}
    for node in [node for node in tree.body if isinstance(node, ast.FunctionDef)]:
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "cli.command":
                named = [ast.literal_eval(arg) for arg in call.args]
                verbs[named[0] if named else node.name] = ast.get_docstring(node) or ""
    asked = [verbs[word] for word in words() if word in verbs]
    if asked:
        print("%s\n\nIts options show once any verb has run." % asked[0])
    else:
        print(__doc__.strip())
        for name, text in verbs.items():
            print("    %-10s%s" % (name, text.splitlines()[0]))
    sys.exit(0)


def check_python():
    """The wheel is built for one Python version; another cannot load it."""
    with open(os.path.join(ROOT, "torch_patches", "series.toml")) as file:
        match = re.search(r'^python = "([0-9.]+)"', file.read(), re.MULTILINE)
    wanted = match.group(1) if match else "3.11"
    found = "%d.%d" % sys.version_info[:2]
    if found != wanted:
        other = shutil.which("python" + wanted)
        fix = (other or "python" + wanted) + " tools/stage.py " + " ".join(sys.argv[1:])
        fail(
            "this is Python %s (%s), but the stack is pinned to Python %s\n"
            "fix: %s%s"
            % (
                found,
                sys.executable,
                wanted,
                fix,
                "" if other else "   (after installing it)",
            )
        )


def cache_folder():
    """Same rule as staging/config.py."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    default = os.path.join(home, "pytorch-moe-staging")
    return os.path.abspath(os.environ.get("MOE_STAGING_CACHE") or default)


def tools_python():
    """Path of the interpreter with the pinned tools; installs them once."""
    with open(PINS, "rb") as file:
        key = hashlib.sha256(file.read() + sys.version.encode()).hexdigest()[:12]
    folder = os.path.join(cache_folder(), "tools-" + key)
    python = os.path.join(folder, "bin", "python")
    stamp = os.path.join(folder, "complete")
    if os.path.exists(stamp):
        return python
    if HELP.intersection(words()):
        show_help()
    import fcntl  # Linux only, like the stager

    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with open(folder + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(stamp):
            install_tools(folder, python)
            with open(stamp, "w"):
                pass
    return python


def install_tools(folder, python):
    """venv + pip; a folder without the stamp is a killed attempt."""
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        fail(
            "this Python cannot make environments: no module ensurepip\nfix: install "
            "it (Debian, Ubuntu: apt-get install python%d.%d-venv)"
            % sys.version_info[:2]
        )
    print("... install the stager's tools into " + folder, file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", folder],
        pip + ["--no-input", "-r", PINS],
    ):
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode:
            lines = done.stdout.strip().splitlines() or ["no output"]
            errors = [line for line in lines if "ERROR" in line] or lines
            fail(
                "%s failed: %s\nfix: check the network and the disk, then repeat "
                "the command" % (" ".join(command[1:4]), errors[-1])
            )


def main():
    """Replaces this process by the stager proper."""
    check_python()
    if not shutil.which("git"):
        fail(
            "git is not on PATH\nfix: install it (Debian, Ubuntu: apt-get install git)"
        )
    try:
        python = tools_python()
    except BrokenPipeError:  # --help | head
        sys.exit(1)
    except OSError as error:
        fail(
            "%s: %s\nfix: make it writable, or set MOE_STAGING_CACHE to a folder that is"
            % (error.strerror, error.filename)
        )
    start = "import sys; sys.path.insert(0, sys.argv.pop(1)); import staging.cli as c; c.main()"
    sys.stdout.flush()
    os.environ["MOE_STAGING_CACHE"] = cache_folder()
    os.execv(python, [python, "-c", start, os.path.join(ROOT, "tools")] + sys.argv[1:])


if __name__ == "__main__":
    main()
