"""Starts Python programs as forks of a process that has imported torch already.

Importing torch and building an optimizer takes seconds of a core in each rank; a fork takes none
of them. A program has its own arguments, variables, directory and streams, and a process stands for
it that can be waited for, signalled and killed. The program is in the network, and under the host
name, of that process. Only for tests that are not about how a program starts: those start it as
users do.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import itertools
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import leftovers
import namespaces

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_REQUEST_BYTES = 1 << 20
_MOST_STREAMS = 64
# torchrun's own variable.
_OF_PROGRAMS = "PYTHON_EXEC"
_FORK = "--fork"
# The folder of one that others have started.
_SHARED = "WARM_PYTHON"
_PR_SET_PDEATHSIG = 1
# Process, user and group at the other end of a socket.
_IDS = struct.Struct("3i")
_LIBC = ctypes.CDLL(None)
_WHAT = ("-m", "-c")


class Python(NamedTuple):
    """Takes the arguments that Python takes: a script, `-m` or `-c`, each with arguments."""

    executable: str
    env: dict[str, str]
    """With these variables a program starts its own like this: ranks, and children by spawn."""


_life = contextlib.ExitStack()
_pythons: dict[int, Python] = {}


def python(node: int = 0) -> Python:
    """It lasts until `stop`; the first one takes as long as importing torch.

    Nodes on one machine are told apart by the processes that start their ranks.
    """
    if not _pythons and _SHARED in os.environ:
        _pythons[0] = _python_in(Path(os.environ[_SHARED]))
    elif not _pythons:
        _pythons[0] = _life.enter_context(_started([sys.executable, __file__, "fork"]))
    if node not in _pythons:
        _pythons[node] = _life.enter_context(_started([_pythons[0].executable, _FORK]))
    return _pythons[node]


@contextlib.contextmanager
def with_imported(*modules: str) -> Iterator[Python]:
    """One with these modules imported as well: for tests of what takes seconds to import."""
    with _started([python().executable, _FORK], modules) as found:
        yield found


def python_with(*modules: str) -> Python:
    """The same, until `stop`."""
    return _life.enter_context(with_imported(*modules))


def share() -> Python:
    """The one that all processes started from here on use, too."""
    found = python()
    os.environ[_SHARED] = str(Path(found.executable).parent)
    return found


def stop() -> None:
    """End all of them that this process has started, and whatever they run."""
    _pythons.clear()
    _life.close()


def _python_in(folder: Path) -> Python:
    return Python(str(folder / "python"), {_OF_PROGRAMS: str(folder / "python-of-programs")})


@contextlib.contextmanager
def _started(command: list[str], modules: Sequence[str] = ()) -> Iterator[Python]:
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        address, found = Path(folder, "address"), _python_in(Path(folder))
        for path, role in (
            (Path(found.executable), "stand-for"),
            (Path(found.env[_OF_PROGRAMS]), "stand-for-some"),
        ):
            # Without the site packages: it starts within milliseconds.
            stands = f"{sys.executable} -S {__file__} {role} {address}"
            path.write_text(f'#!/bin/sh\nexec {stands} "$@"\n')
            path.chmod(0o700)
        # It ends when its input does, and belongs to no test.
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        env.pop(leftovers.TESTS, None)
        with subprocess.Popen(
            [*command, str(address), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield found


# -- the process that stands for a program


def _needs_torch(arguments: list[str]) -> bool:
    """The agent does not, and what else programs start with a line of code."""
    return "-c" not in arguments or "--multiprocessing-fork" in arguments


def _stand_for_it(address: str, arguments: list[str]) -> None:
    streams = [int(each) for each in os.listdir("/proc/self/fd")]
    # One of them was the directory itself.
    streams = sorted(each for each in streams if os.path.exists(f"/proc/self/fd/{each}"))
    request = {
        "arguments": arguments,
        "env": dict(os.environ),
        "folder": os.getcwd(),
        "streams": streams,
        "ignored": [each for each in _PASSED_ON if signal.getsignal(each) == signal.SIG_IGN],
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as there:
        there.connect(address)
        socket.send_fds(there, [json.dumps(request).encode()], streams)
        pid = int(there.recv(100))
        for number in _PASSED_ON:
            if number not in request["ignored"]:
                signal.signal(number, lambda number, _: os.kill(pid, number))
        # They are the program's alone: whoever reads them sees its end.
        for stream in streams:
            os.close(stream)
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
                standing_for_it, *_ = _IDS.unpack(
                    parent.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _IDS.size)
                )
                message, streams, _, _ = socket.recv_fds(parent, _REQUEST_BYTES, _MOST_STREAMS)
                server = os.getpid()
                if (pid := os.fork()) == 0:
                    _die_with(server)
                    for opened in (selector, listener, parent, *(each.parent for each in children)):
                        opened.close()
                    for each in children:
                        os.close(each.end)
                    namespaces.enter(standing_for_it)
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
    # Above all numbers that they are to have.
    above = [fcntl.fcntl(each, fcntl.F_DUPFD, max(request["streams"]) + 1) for each in streams]
    for stream in streams:
        os.close(stream)
    for number, stream in zip(request["streams"], above, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    for number in _PASSED_ON:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else usual)
    os.environ.clear()
    os.environ.update(request["env"])
    if _OF_PROGRAMS in os.environ:
        sys.executable = os.environ[_OF_PROGRAMS]
        multiprocessing.set_executable(sys.executable)
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
    # What extensions find left at the end they would complain about.
    atexit.register(gc.unfreeze)
    _ready_to_fork()


def _ready_to_fork() -> None:
    # A thread is in no fork.
    assert os.listdir("/proc/self/task") == [str(os.getpid())]
    gc.collect()
    # Collecting garbage in a fork would copy all of it.
    gc.freeze()


def _run(arguments: list[str]) -> None:
    flags = list(itertools.takewhile(lambda each: each not in _WHAT and each[0] == "-", arguments))
    what, *rest = arguments[len(flags) :]
    sys.stdout.reconfigure(line_buffering="-u" in flags)  # type: ignore[union-attr]
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


def _status(error: BaseException) -> int:
    """What Python says of what ended a program, and the exit code that it gives it."""
    if not isinstance(error, SystemExit):
        # As for a debugger, and for what looks after the end of a program.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        if sys.version_info >= (3, 12):
            sys.last_exc = error
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    if isinstance(error.code, int):
        return error.code
    if error.code is not None:
        sys.stderr.write(f"{error.code}\n")
    return int(error.code is not None)


def _end(status: int) -> None:
    """End as Python does, but without freeing one by one the objects that torch consists of."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    role, place, *given = sys.argv[1:]
    if role == "stand-for-some" and not _needs_torch(given):
        os.execv(sys.executable, [sys.executable, *given])
    elif role != "fork":
        _stand_for_it(place, given)
    else:
        _die_with(os.getppid())
        _import_torch()
        # What follows happens in the forks.
        what = _requests(place)
        while what[0] == _FORK:
            _, place, *modules = what
            for module in modules:
                importlib.import_module(module)
            _ready_to_fork()
            what = _requests(place)
        status = 0
        try:
            _run(what)
        except KeyboardInterrupt:
            # Python ends by the signal then.
            raise
        except BaseException as error:  # noqa: BLE001
            status = _status(error)
        _end(status)
