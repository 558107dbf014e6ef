"""A function in a process of its own: its memory, its settings and its end do not touch anybody else's.

A server process imports torch once and is forked for each call, which takes milliseconds; elsewhere than on
Linux each call starts anew, and takes the seconds of torch.
"""

import functools
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from common.errors import TrainingFailed, UserError, is_out_of_memory
from common.system import available_memory, process_memory

ROOT = Path(__file__).parents[2]
TERMINATE_GRACE_S = 2.0  # seconds that a process has to let go of what it shares with others, such as semaphores


class IsolatedCallFailed(TrainingFailed):
    """A call that came to nothing. status: refused, out of memory, time limit or failed. reason: a sentence."""

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


def run_isolated(function: Callable, *arguments: Any, time_limit: float | None = None, bounded: bool = False) -> Any:
    """function(*arguments), of a module, in a new process that ends with it.

    time_limit: in seconds. bounded: on Linux, an allocation fails that the machine has no memory for now, before it
    begins to swap or to kill. Raises Ended where it does not return: for what it raises, what kills it, and time_limit.
    """
    context = _context(function.__module__)
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder, receiver:
        printed = Path(folder) / "printed"
        child = context.Process(target=_work, args=(sender, printed, function, arguments, bounded))
        try:
            with _ctrl_c_waits():
                child.start()
            sender.close()
            if not receiver.poll(time_limit):
                raise IsolatedCallFailed("time limit", f"took longer than {time_limit:g} s")
            status, result = receiver.recv()
            child.join(TERMINATE_GRACE_S)
        except EOFError:
            child.join()
            raise _killed(child.exitcode, printed) from None
        finally:
            _end(child)
    if status != "finished":
        raise IsolatedCallFailed(status, result)
    return result


def _end(child: BaseProcess) -> None:
    """End `child`, politely at first, and whatever it has started, as compilers."""
    if child.pid is None:
        return
    child.terminate()
    child.join(TERMINATE_GRACE_S)
    child.kill()
    child.join()
    with suppress(AttributeError, ProcessLookupError):  # Windows has no groups
        os.killpg(child.pid, signal.SIGKILL)


@contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Inside, Ctrl-C is put off, and processes that are started never get it: it is for the one that started them."""
    pressed = []
    handler = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    blocks = hasattr(signal, "pthread_sigmask")  # what is blocked stays so in processes that are started
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if blocks else None
    try:
        yield
    finally:
        if blocks:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if pressed:
        raise KeyboardInterrupt


@functools.cache
def _context(module: str):
    """multiprocessing's, with a server that has imported `module`, and what the running script imports."""
    if sys.platform != "linux":  # macOS has a fork server, in whose children its GPU library hangs
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or module).stem
    context.set_forkserver_preload([module, script, "torch._dynamo"])  # the last takes seconds, of no row that compiles
    # The server of Python 3.11 does not have this process's sys.path.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    resource_tracker.ensure_running()  # ahead of the server, which needs it: its start would let Ctrl-C through
    with _ctrl_c_waits():
        forkserver.ensure_running()
    return context


def _work(sender: Connection, printed: Path, function: Callable, arguments: tuple, bounded: bool) -> None:
    """In the child."""
    if hasattr(os, "setsid"):
        os.setsid()  # a group of its own, to be ended with all that it starts
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # with all that Python does on its way out
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(printed, "wb") as file:  # what libraries print would break the parent's progress bar
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if bounded:
        _bound_memory()
    try:
        sender.send(("finished", function(*arguments)))
    except UserError as error:
        sender.send(("refused", str(error)))
    except Exception as error:
        if is_out_of_memory(error):
            sender.send(("out of memory", _wanted(error)))
        else:
            lines = str(error).strip().splitlines() or [""]
            sender.send(("failed", f"{type(error).__name__}: {lines[0]}"))


def _end_with_parent() -> None:
    """A parent that is killed cannot end its children, and nobody waits for what they find."""
    wait([multiprocessing.parent_process().sentinel])
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _bound_memory() -> None:
    if available_memory() is None:
        return
    import resource

    most = available_memory() + process_memory("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))


def _wanted(error: Exception) -> str:
    """ "needed 64.0 GiB more", from what PyTorch says."""
    found = re.search(r"tried to allocate ([\d.]+) (\w+)", str(error), re.IGNORECASE)
    if not found:
        return str(error).strip().split("\n")[0] or type(error).__name__
    size, unit = float(found.group(1)), found.group(2)
    return f"needed {size / 2**30:,.1f} GiB more" if unit == "bytes" else f"needed {size:g} {unit} more"


def _killed(code: int, printed: Path) -> IsolatedCallFailed:
    """How a child ended that could not say so."""
    if code == -9:  # SIGKILL, which Windows has not
        return IsolatedCallFailed(
            "out of memory", "its process was killed, probably by Linux, which does so where memory runs out"
        )
    lines = printed.read_text(errors="replace").strip().splitlines() if printed.exists() else []
    name = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    return IsolatedCallFailed("failed", f"its process was {name}" + (f": {lines[-1]}" if lines else ""))
