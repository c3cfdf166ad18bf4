"""Starts Python programs as forks of a process that has imported torch already.

Importing torch and building an optimizer takes seconds of a core in each rank; a fork takes none
of them. A program has its own arguments, variables, directory and streams, and a process stands for
it that can be waited for, signalled and killed. Only for tests that are not about how a program
starts: those start it as users do.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import leftovers

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_REQUEST_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class Python(NamedTuple):
    """Takes the arguments that Python takes: a script, `-m` or `-c`, each with arguments."""

    executable: str
    env: dict[str, str]
    """With these variables torchrun starts its ranks like this."""


_life = contextlib.ExitStack()
_python: Python | None = None


def python() -> Python:
    """It lasts until `stop`; the first one takes as long as importing torch."""
    global _python
    if _python is None:
        _python = _life.enter_context(_started())
    return _python


def stop() -> None:
    """End it, and whatever it runs."""
    global _python
    _python = None
    _life.close()


@contextlib.contextmanager
def _started() -> Iterator[Python]:
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        address, executable = Path(folder, "address"), Path(folder, "python")
        # Without the site packages: it starts within milliseconds.
        command = f"{sys.executable} -S {__file__} stand-for {address}"
        executable.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        executable.chmod(0o700)
        # It ends when its input does, and belongs to no test.
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        env.pop(leftovers.TESTS, None)
        with subprocess.Popen(
            [sys.executable, __file__, "fork", str(address)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield Python(str(executable), {"PYTHON_EXEC": str(executable)})


# -- the process that stands for a program


def _stand_for_it(address: str, arguments: list[str]) -> None:
    request = {"arguments": arguments, "env": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as there:
        there.connect(address)
        socket.send_fds(there, [json.dumps(request).encode()], [0, 1, 2])
        pid = int(there.recv(100))
        for number in _PASSED_ON:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        # They are the program's alone: whoever reads them sees its end.
        os.closerange(0, 3)
        status = int(there.recv(100))
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) in _PASSED_ON:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


# -- the process that forks


class _Child(NamedTuple):
    pid: int
    end: int
    """Readable once it has ended."""
    parent: socket.socket
    """To the process that stands for it; readable once that one is gone."""


def _requests(address: str) -> list[str]:
    """Returns in the forks only: what each of them is to run."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    children: set[_Child] = set()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        for key, _ in selector.select():
            child = key.data
            if key.fd == 0:
                for each in children:
                    _kill(each)
                os._exit(0)
            elif child is None:
                parent, _ = listener.accept()
                message, streams, _, _ = socket.recv_fds(parent, _REQUEST_BYTES, 3)
                server = os.getpid()
                if (pid := os.fork()) == 0:
                    _die_with(server)
                    for opened in (selector, listener, parent, *(each.parent for each in children)):
                        opened.close()
                    for each in children:
                        os.close(each.end)
                    return _as_asked(json.loads(message), streams)
                for stream in streams:
                    os.close(stream)
                with contextlib.suppress(BrokenPipeError):
                    parent.send(str(pid).encode())
                child = _Child(pid, os.pidfd_open(pid), parent)
                children.add(child)
                selector.register(child.end, selectors.EVENT_READ, child)
                selector.register(parent, selectors.EVENT_READ, child)
            elif child in children and key.fd == child.end:
                _, status = os.waitpid(child.pid, 0)
                children.remove(child)
                selector.unregister(child.end)
                os.close(child.end)
                selector.unregister(child.parent)
                with child.parent, contextlib.suppress(BrokenPipeError):
                    child.parent.send(str(status).encode())
            elif child in children:
                _kill(child)


def _kill(child: _Child) -> None:
    """With what it has forked itself."""
    # Before it has a group of its own there is nothing else to kill.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    os.kill(child.pid, signal.SIGKILL)


def _die_with(parent: int) -> None:
    """However the parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _as_asked(request: dict[str, Any], streams: list[int]) -> list[str]:
    """Make a fork what the program expects to be; its arguments."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    sys.path[1:1] = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    return list(request["arguments"])


def _import_torch() -> None:
    import torch
    import torch.distributed.fsdp
    import torch.distributed.run
    import torch.nn.parallel

    # The first step of the first optimizer imports the compiler.
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
    # A thread is in no fork.
    assert os.listdir("/proc/self/task") == [str(os.getpid())]
    gc.collect()
    # Collecting garbage in a fork would copy all of it.
    gc.freeze()
    # What extensions find left at the end they would complain about.
    atexit.register(gc.unfreeze)


def _run(arguments: list[str]) -> None:
    what, *rest = (each for each in arguments if each != "-u")
    sys.stdout.reconfigure(line_buffering="-u" in arguments)  # type: ignore[union-attr]
    if what == "-m":
        sys.path[0], sys.argv = os.getcwd(), rest
        # Imported before the fork; Python would wonder.
        sys.modules.pop(rest[0], None)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    if what == "-c":
        sys.path[0], sys.argv, source, path = os.getcwd(), ["-c", *rest[1:]], rest[0], "<string>"
    else:
        sys.path[0], sys.argv, path = str(Path(what).resolve().parent), [what, *rest], what
        source, main.__file__ = Path(what).read_text(), what
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _end() -> None:
    """End as Python does, but without freeing one by one the objects that torch consists of."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    role, place, *given = sys.argv[1:]
    if role == "stand-for":
        _stand_for_it(place, given)
    else:
        _die_with(os.getppid())
        _import_torch()
        # What follows happens in the forks. What one raises is reported as Python does it.
        _run(_requests(place))
        _end()
