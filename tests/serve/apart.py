"""What tests change of an engine in its own process, which imports them by their names."""

import os
import signal
import time

from ridgeline.serve import engine_process


def slow(build):
    """Steps that last."""
    engine = build()
    plain = engine.step

    def step():
        time.sleep(0.02)
        return plain()

    engine.step = step
    return engine


def broken(build):
    """An engine that fails in its fourth step."""
    engine = slow(build)
    plain, left = engine.step, [3]

    def step():
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("the kernel is gone")
        return plain()

    engine.step = step
    return engine


def picky(build):
    """A slow one that can not take a prompt which begins with token 9."""
    engine = slow(build)
    plain = engine.add

    def add(request):
        if request.prompt[0] == 9:
            raise ValueError("nine")
        plain(request)

    engine.add = add
    return engine


def exits(code):
    """What ends while it loads."""
    os._exit(code)


def killed():
    """What the system kills while it loads."""
    os.kill(os.getpid(), signal.SIGKILL)


def unforeseen():
    """What fails as nobody expected."""
    raise ValueError("this was not foreseen")


def long_to_close(build, closed, go):
    """One that closes when there is a file ``go``, and then later than its last step may take. When it has said that
    its last step has ended, it makes a file "closing", and when it has closed, the file ``closed`` beside it."""
    engine_process.LAST = 0.2
    engine = build()
    plain = engine.close

    def close():
        closed.with_name("closing").touch()
        while not go.exists():
            time.sleep(0.01)
        time.sleep(0.5)
        plain()
        closed.touch()

    engine.close = close
    return engine


def failing(build, closed, go):
    """One whose step fails, and that takes long to close, as :func:`long_to_close`."""
    engine = long_to_close(build, closed, go)

    def step():
        raise RuntimeError("the kernel is gone")

    engine.step = step
    return engine


def hanging(build, began):
    """One whose steps do not end, of which the last one gets half a second; a step makes a file first."""
    engine_process.LAST = 0.5
    engine = build()

    def step():
        began.touch()
        time.sleep(1000)

    engine.step = step
    return engine
