"""Children that end when the stager is killed. Used by baseenv and compile.

After a kill -9 the next call starts the same work again; a compiler or pip
that lived on would write the same files at the same time.
"""

import ctypes
import signal


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def die_with_parent() -> None:
    """For preexec_fn: the kernel ends this process when its parent dies.

    SIGTERM, because ninja then stops its compilers and removes their outputs.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
