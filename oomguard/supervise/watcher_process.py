"""What the watcher does in its own process: start the command, pass signals on, reap, and end the tree."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

from oomguard.supervise import tree
from oomguard.supervise.before import Before
from oomguard.supervise.channel import receive, send
from oomguard.supervise.held_parent import LOOK_MS, HeldParent
from oomguard.supervise.process_control import become_subreaper, die_with_parent, set_name
from oomguard.supervise.program import execute, for_this_process, read_failure
from oomguard.supervise.signal_sets import JOB_STOPS, OF_TERMINAL, SI_KERNEL, STOPS
from oomguard.supervise.twin import Twin
from oomguard.supervise.watcher_terminal import Lent, WatcherTerminal, has_terminal
from oomguard.supervise.witness import Witness

AFTER_KILL_WAIT_S: Final = 2.0


class WatcherProcess:
    """Serves oomguard until its end of the channel closes, then ends everything below.

    Where the command has a terminal of its own it leads the session of it. Else the command is in oomguard's process group, and
    so is a witness: a signal that it has too was sent to the group, so that the command has it already.
    """

    def __init__(self, channel: socket.socket, parent: int, before: Before) -> None:
        self._channel, self._parent, self._before = channel, parent, before
        self._child: int | None = None
        self._terminal: WatcherTerminal | None = None
        self._lent = Lent()
        self._told = False
        self._paused_parent = False
        self._times_gone_on = 0
        self._shares_group = False
        self._witness: Witness | None = None
        self._hurried = False
        self._folders: list[str] = []
        self._gone = False
        self._twin = Twin()
        self._held = HeldParent(parent)

    def run(self) -> NoReturn:
        """Serve to the end; never returns into what was forked."""
        try:
            self._prepare()
            while not self._gone:
                self._wait()
            self._end_tree(AFTER_KILL_WAIT_S)
            for folder in self._folders:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os._exit(0)

    def _prepare(self) -> None:
        gc.disable()
        set_name("oomguard-watch")
        become_subreaper()
        # The reader of oomguard's output waits for nobody else, and what the command does not inherit is not held open.
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        with contextlib.suppress(OSError):  # without /proc they stay
            for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
                with contextlib.suppress(OSError):
                    if number != self._channel.fileno() and not os.get_inheritable(number):
                        os.close(number)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(self._woken, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        ready = {number for number, _ in poll.poll(None if self._child is None else LOOK_MS)}
        if self._channel.fileno() in ready:  # first: what ended the command may have been told before it
            self._obey()
        elif self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
            self._reap()
        elif self._child is not None and not self._paused_parent:
            self._held.look(self._child)

    def _obey(self) -> None:
        message, descriptors = receive(self._channel)
        match message:
            case ("start", words, variables, shares_group, targets, terminal):
                streams = dict(zip(targets, descriptors, strict=False))
                self._terminal = WatcherTerminal.of(descriptors[len(targets) :], terminal)
                self._start(words, variables, streams, shares_group=shares_group)
            case ("signal", number, code, sender, came_s):
                self._forward(number, code, sender, came_s)
            case ("lend", saved, set_to):
                self._lent.note(descriptors, saved, set_to)
            case ("go on", in_front):
                self._go_on(in_front=in_front)
            case ("key", number):
                self._told = self._told or (number in STOPS and self._child is not None)
            case ("kill",):
                self._hurried = True
                self._told = self._told or self._child is not None
                tree.kill(os.getpid(), but=self._witness_pid)
            case ("end", wait_s, spare_s):
                self._end_tree(wait_s, spare_s=spare_s, hurried=self._is_hurried)
                self._say("ended", self._told)
            case ("folder", path):
                self._folders.append(path)
            case _:
                self._gone = True
                self._lent.restore()

    def _is_hurried(self) -> bool:
        """Read what came while the tree is ended: a kill, or the end of oomguard, which hurries nothing."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        while not self._gone and poll.poll(0):
            self._obey()
        return self._hurried

    def _start(
        self, words: list[bytes], variables: list[bytes], streams: dict[int, int], *, shares_group: bool
    ) -> None:
        self._told = self._hurried = False
        self._shares_group = shares_group
        if shares_group and self._witness is None:
            with contextlib.suppress(OSError):  # no process can be started: the command's fork says so
                self._witness = Witness(os.getpgid(self._parent), words)
        failed, told = os.pipe()  # after the witness, which would hold it open
        own = os.getpid()
        try:
            if self._terminal is not None and self._terminal.controls:
                self._terminal.begin()
            else:
                with contextlib.suppress(OSError):
                    os.setpgid(0, 0)
            pid = os.fork()
        except OSError as error:
            os.close(told)
            pid, answer = 0, str(error.errno or errno.EAGAIN).encode()
        else:
            if pid == 0:
                self._become(words, variables, streams, told, own, shares_group=shares_group)
            os.close(told)
            answer = read_failure(failed, pid)
        for number in (failed, *streams.values()):
            os.close(number)
        if answer:
            self._reap()
            if self._terminal is not None:
                self._terminal.close()
            self._say("failed", int(answer))
        else:
            self._child = pid
            self._say("started", pid)

    def _become(
        self,
        words: list[bytes],
        variables: list[bytes],
        streams: dict[int, int],
        told: int,
        watcher: int,
        *,
        shares_group: bool,
    ) -> NoReturn:
        try:
            die_with_parent(watcher)
            if self._terminal is not None:
                streams = {**streams, **self._terminal.become()}
            if shares_group:
                with contextlib.suppress(OSError):
                    os.setpgid(0, os.getpgid(self._parent))
            elif os.getpgrp() != os.getpid():
                os.setpgid(0, 0)
            for target, number in streams.items():  # standard input may be ours
                os.dup2(number, target)
            for number in self._before.closed:
                os.close(number)
            signal.set_wakeup_fd(-1)
            ignored = self._before.ignored_by(is_job=self._terminal is not None and self._terminal.controls)
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before.masked)
            env = dict(variable.split(b"=", 1) for variable in variables)
            execute(words, for_this_process(env, self._parent))
        except OSError as error:
            os.write(told, str(error.errno or errno.EINVAL).encode())
        finally:
            os._exit(127)

    def _forward(self, number: int, code: int | None, sender: int | None, came_s: float) -> None:
        self._reap()
        if self._child is None:  # ended of this very one, which its group had, or of its own
            self._told = self._told or (self._shares_group and number in STOPS)
            return
        group = os.getpgid(self._child)
        witness = self._witness if self._witness is not None and group == self._witness.group else None
        has_it = witness.had(number, code, sender, came_s) if witness and code is not None else False
        if not has_it and not self._twin.is_second(number, sender, came_s):
            is_hangup = number == signal.SIGHUP and code == SI_KERNEL
            as_terminal = (number in OF_TERMINAL or is_hangup) and group == self._child
            tree.send(-group if as_terminal else self._child, number)
            if number == signal.SIGCONT:
                self._held.is_over()
        self._told = self._told or number in STOPS
        if number in STOPS and tree.is_stopped(self._child) and tree.heeds(self._child, number):
            tree.send(tree.job_of(self._child), signal.SIGCONT)

    def _is_job(self) -> bool:
        return self._shares_group and has_terminal()

    def _end_tree(self, wait_s: float, *, spare_s: float = 0.0, hurried: Callable[[], bool] = lambda: False) -> None:
        """End everything below, the witness last: what ends before it is not the last tie of the group."""
        if not tree.pids():  # nobody can tell it from the others
            self._end_witness()
        spared = self._witness_pid
        tree.end(os.getpid(), self._left, wait_s=wait_s, spare_s=spare_s, hurried=hurried, but=spared)
        self._end_witness()

    def _left(self) -> bool:
        """Reap; return whether a child but the witness is left."""
        return self._reap() and (self._witness is None or tree.descendants(os.getpid()) != [self._witness.pid])

    @property
    def _witness_pid(self) -> int | None:
        return None if self._witness is None else self._witness.pid

    def _end_witness(self) -> None:
        if self._witness is not None:
            self._witness.close()
            self._witness = None

    def _reap(self) -> bool:
        """Take the status of every child that ended or stopped; return whether any is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._child:
                self._follow(status)
            elif self._witness is not None and pid == self._witness.pid and os.WIFSIGNALED(status):
                self._witness = None  # somebody killed it: what the group has arrives once more

    def _follow(self, status: int) -> None:
        """Tell oomguard that the command ended; stop and go on with it, so that a shell sees its job stopped."""
        if os.WIFSTOPPED(status):
            number = os.WSTOPSIG(status)
            if os.getppid() != self._parent or self._held.holds:
                return
            if self._terminal is not None and self._terminal.controls:
                self._paused_parent = True  # it stops by itself, once it has set its terminal as it was
                self._say("stopped", number, self._times_gone_on)
            elif number in JOB_STOPS or (number == signal.SIGSTOP and self._is_job()):  # a shell watches the group
                self._paused_parent = tree.send(self._parent, signal.SIGSTOP)
        elif os.WIFCONTINUED(status):
            if self._paused_parent and os.getppid() == self._parent:
                tree.send(self._parent, signal.SIGCONT)
            self._paused_parent = False
        else:
            self._child = None
            self._held.is_over()
            if self._paused_parent and os.getppid() == self._parent:
                tree.send(self._parent, signal.SIGCONT)  # nothing is left that could be continued
            self._paused_parent = False
            if self._terminal is not None:
                self._terminal.close()
            self._say("exited", status)

    def _go_on(self, *, in_front: bool) -> None:
        """Bring the command to the foreground of its terminal, or behind it, and continue it where it is stopped."""
        if self._child is not None and self._terminal is not None:
            self._terminal.bring(os.getpgid(self._child) if in_front else os.getpgrp())
            self._reap()
        self._times_gone_on += 1  # every stop until here is over
        self._paused_parent = False
        if self._child is not None and (self._held.holds or tree.is_stopped(self._child)):
            tree.send(-os.getpgid(self._child), signal.SIGCONT)
        self._held.is_over()

    def _say(self, *message: Any) -> None:
        with contextlib.suppress(OSError):
            send(self._channel, message)
