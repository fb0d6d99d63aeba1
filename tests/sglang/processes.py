"""The processes of an engine, and their death."""

import psutil


def tree_of(pid: int) -> list[psutil.Process]:
    """Return a process and its children; not Python's tracker, which ends after them and removes their semaphores."""
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    alive = [one for one in tree if one.status() != psutil.STATUS_ZOMBIE]
    return [one for one in alive if "resource_tracker" not in "".join(one.cmdline())]


def kill_tree(pid: int) -> None:
    """End a child and its children by SIGKILL at once; the caller waits for the child."""
    tree = tree_of(pid)
    for one in tree:
        one.kill()
    psutil.wait_procs(tree[1:])
