"""Runs torchgen of a patched checkout. Started by staging/codegen.py.

Runs in the Python of the base environment (it has yaml), with torchgen and
tools.autograd imported from the checkout, because a PR may patch those too:

    python main.py CHECKOUT WHEEL_YAML OUT [--only-shims]

Writes OUT/result.json: {"added": [...], "changed": [...]}, or {"error": text}
with exit status 1 when torchgen or the overlay rejects the change.
"""

import argparse
import json
import sys
import traceback
from pathlib import Path


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("wheel_yaml", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only-shims", action="store_true")
    args = parser.parse_args()
    sys.path.insert(0, str(args.checkout))
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        result = _generate(args)
    except Exception as error:
        traceback.print_exc()
        result = {"error": _first_line(error), "kind": type(error).__name__}
    (args.out / "result.json").write_text(json.dumps(result, indent=1))
    return 1 if "error" in result else 0


def _generate(args: argparse.Namespace) -> dict:
    from emit import Emitter  # needs the checkout on sys.path
    from opdiff import compare, keep_usual_keys

    keep_usual_keys()
    native = args.checkout / "aten/src/ATen/native"
    diff = compare(
        args.wheel_yaml, native / "native_functions.yaml", native / "tags.yaml"
    )
    emitter = Emitter(args.checkout, args.out, diff)
    emitter.shims()
    if not args.only_shims:
        emitter.registrations()
        emitter.changed_registrations()
        emitter.autograd_sources()
        emitter.python_bindings()
        emitter.function_arguments()
    return {
        "added": [str(f.func.name) for f in diff.added],
        "changed": [str(f.func.name) for f in diff.changed],
    }


def _first_line(error: Exception) -> str:
    """torchgen's messages are long; the first lines say what is wrong."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return "\n".join(lines[:6]) if lines else type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
