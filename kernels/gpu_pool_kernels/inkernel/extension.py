"""The IPython extension: registers what the other modules do, and loads them only when used."""

import faulthandler
import functools
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from . import slice_requests

#: The variables of ``caps``, which is loaded only where one of them is set.
LIMIT_VARIABLES = ("GPU_POOL_TORCH_FRACTION", "GPU_POOL_TENSORFLOW_MIB")
#: Set where the slice has a limit above what is granted: ``burst`` is loaded only there.
BURST_VARIABLE = "GPU_POOL_LIMIT_MIB"
#: What this kernel's user is to read below the first cell.
NOTICE_VARIABLE = "GPU_POOL_NOTICE"
#: Set where a pool has started this kernel in a pod.
POD_VARIABLE = "GPU_POOL_POD"
USAGE = "Use %gpu to see this kernel's slice of a GPU, %gpu use 10% to change its size, or %gpu keep 2h."


def load(shell: object) -> None:
    """Register ``%gpu`` and the look at failed cells with an ``InteractiveShell``."""
    shell.register_magic_function(gpu, magic_kind="line")  # type: ignore[attr-defined]
    shell.events.register("post_run_cell", explain_failure)  # type: ignore[attr-defined]
    forget_arguments()
    follow_environment()
    if POD_VARIABLE in os.environ:
        say_where_it_fails()
    tell(shell, os.environ.pop(NOTICE_VARIABLE, ""))


def say_where_it_fails() -> None:
    """Have Python write where it was when a signal ends it, for whoever has its pod's standard error."""
    if not faulthandler.is_enabled():
        # ipykernel keeps that, and takes what is written to the usual descriptor for itself.
        kept = getattr(sys.stderr, "_original_stdstream_copy", None)
        faulthandler.enable(file=kept if isinstance(kept, int) else 2, all_threads=False)


def limit_frameworks() -> None:
    """Have the limits set that this kernel was given, whenever their frameworks are imported."""
    if any(name in os.environ for name in LIMIT_VARIABLES):
        from . import caps

        caps.watch()


def follow_environment() -> None:
    """Let the frameworks have the limits that the variables of the slice say now."""
    limit_frameworks()
    follow_burst()


def take_changes(changed: "dict[str, list[str | None]]") -> None:
    """Change variables of the slice, as whoever launched this kernel says."""
    from . import slice_requests

    catch_up()
    slice_requests.apply(changed)
    follow_burst()


def listen_to_changes() -> bool:
    """Hear in a pod of what changes in the variables of the slice; return whether there is where to."""
    from . import burst

    return burst.listen_to_changes(catch_up)


def follow_burst() -> None:
    """Hear of memory on top of the slice, where it has a limit above what is granted."""
    if BURST_VARIABLE in os.environ:
        from . import burst

        burst.follow(catch_up)


# Of the process, which is one kernel.
@functools.lru_cache(maxsize=None)  # noqa: UP033 - Python 3.6 has no other
def size_changes() -> "slice_requests.SizeChanges":
    """Return what this kernel has asked for by ``%gpu use``."""
    from . import slice_requests

    return slice_requests.SizeChanges(follow_environment, listen_to_changes)


def catch_up() -> None:
    """Take the answer to ``%gpu use`` that is there, if any: what is heard otherwise may be later."""
    size_changes().catch_up()


def tell(shell: object, notice: str) -> None:
    """Print a notice below the next cell that runs."""
    events = shell.events  # type: ignore[attr-defined]

    def tell_now(*_: object) -> None:
        events.unregister("pre_run_cell", tell_now)
        print(notice, file=sys.stderr)

    if notice:
        events.register("pre_run_cell", tell_now)


def forget_arguments() -> None:
    """Take what the launcher added out of ``sys.argv``, which is the user's to read."""
    for position, word in enumerate(sys.argv):
        if word == __package__ and sys.argv[position - 1] == "--ext":
            del sys.argv[position - 1 : position + 1]
            return


def gpu(line: str) -> object:
    """Show this kernel's slice of a GPU: its size, device, memory, limits and age.

    ``%gpu use 10%`` changes the size. ``%gpu keep 2h`` says that the kernel is
    in use, so that its slice is not lent to others meanwhile.
    """
    words = line.split()
    if not words:
        from . import slice_info, slice_requests

        catch_up()
        slice_requests.ask_for_memory()
        return slice_info.current()
    if words[0] == "keep" and len(words) == 2:
        from . import slice_requests

        slice_requests.keep(words[1])
    elif words[0] == "use" and len(words) > 1:
        size_changes().use(" ".join(words[1:]))
    else:
        print(USAGE, file=sys.stderr)
    return None


def explain_failure(result: object = None) -> None:
    """Add a line under the traceback of a cell for which GPU memory ran out.

    IPython calls this after every cell with its ``ExecutionResult``; those
    before 6.5 call it with nothing, and get no line.
    """
    error = getattr(result, "error_in_exec", None)
    if error is None:
        return
    try:
        from . import slice_info

        line = slice_info.explanation(error)
    except Exception:  # noqa: BLE001 - the user's own error stands; ours must not hide it
        return
    if line:
        print(line, file=sys.stderr)
        say_memory()


def say_memory() -> None:
    """In a pod, have it printed how much of its memory this kernel uses; nothing where nobody answers."""
    try:
        from . import slice_requests

        slice_requests.ask_for_memory()
    except Exception:  # noqa: BLE001 - as above
        return
