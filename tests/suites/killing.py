"""The end of a process in the middle of its training, as a power cut would make it."""

import os
import signal

from scao import SCAO


def kill_after(steps):
    """Send this process SIGKILL as soon as SCAO has taken so many steps."""
    step, taken = SCAO.step, []

    def dies(self, *arguments):
        taken.append(step(self, *arguments))
        if len(taken) == steps:
            os.kill(os.getpid(), signal.SIGKILL)

    SCAO.step = dies
