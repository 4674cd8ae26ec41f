"""Where the libraries of the clients are: a folder of their own, or wherever they are installed."""

import importlib.util
import os
import pathlib
import sys


DEFAULT_FOLDER = "build/clients"


def add_client_packages() -> None:
    """Makes the packages of ``$MOE_CLIENTS``, else build/clients, importable, after all others."""
    default = pathlib.Path(__file__).resolve().parents[3] / DEFAULT_FOLDER
    folder = os.environ.get("MOE_CLIENTS", str(default))
    if folder not in sys.path:
        sys.path.append(folder)


def require_transformers() -> None:
    """Makes transformers importable; else raises an error with the command that installs it."""
    add_client_packages()
    if importlib.util.find_spec("transformers") is None:
        raise ImportError(
            "transformers is not installed. In the root of the repository run\n"
            f"    python3 tools/stage.py python -m pip install --target {DEFAULT_FOLDER} "
            "-r benchmarks/moe/clients/requirements.txt\n"
            "or set MOE_CLIENTS to a folder that has it"
        )
