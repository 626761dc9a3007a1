# The warm interpreter of a sandbox: it has imported what Python tools need and
# never runs a line of them. For each call it forks a process into the call's own
# namespaces, which its supervisor has made; that one gives up every privilege,
# waits for its request and becomes the call. What the init does for a call that
# starts a program (cmd/init/call.go) is done here in the same order.
import atexit
import ctypes
import errno
import fcntl
import gc
import os
import resource
import signal
import socket
import struct
import sys
import time
import types

WARM_FD = 3  # supervisors ask here

NEWNS, NEWCGROUP, NEWPID = 0x20000, 0x2000000, 0x20000000
SET_DUMPABLE, SET_NAME, SET_SECCOMP, CAPBSET_DROP, SET_SECUREBITS, NO_NEW_PRIVS = 4, 15, 22, 24, 28, 38
SECUREBITS = 0x1 | 0x2 | 0x8 | 0x20 | 0x40 | 0x80
KEPT = 1 << 6 | 1 << 7 | 1 << 18 | 1 << 21  # SETGID, SETUID, SYS_CHROOT, SYS_ADMIN
LAST_CAP = 40
RESTRICT_SELF = 446
SIGACTION = {"x86_64": 13, "aarch64": 134}
KEYCTL = {"x86_64": 250, "aarch64": 219}

# The protocol of package inside.
OP_SCRIPT, OP_HARNESS = 4, 5
STARTED, FAILED = 2, 4
F_DESCRIPTORS, F_WORKSPACE, F_SCORE, F_LIMITS, F_PRIVILEGES, F_IDENTITY, F_REQUEST, F_EXEC, F_LANDLOCK, F_FILTER = range(4, 14)
MAX_PACKET = 64 << 10
MAX_NAMES = 1000

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
NAME = ctypes.create_string_buffer(b"python3")


class Failure(Exception):
    """A step of a call's start that did not work."""

    def __init__(self, step, number):
        self.step, self.number = step, number


def must(step, result):
    if result != 0:
        raise Failure(step, ctypes.get_errno())


def prctl(option, a=0):
    return libc.prctl(option, ctypes.c_ulong(a), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def keep(capabilities):
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)(capabilities, capabilities, 0, 0, 0, 0)
    return libc.capset(header, data)


class Warm:
    """What stays the same from call to call."""

    def __init__(self, config):
        os.closerange(WARM_FD + 1, 4096)
        self.uid = config["uid"]
        self.groups = config["groups"]
        self.address_space = config["address_space"]
        self.filter = bytes.fromhex(config["filter"])
        self.bootstrap = compile(config["bootstrap"], "<string>", "exec", dont_inherit=True)
        fresh = set(config["fresh"]) | set(sys.builtin_module_names)
        self.harness = types.ModuleType("bigwave_harness")
        exec(compile(config["harness"], "<string>", "exec", dont_inherit=True), self.harness.__dict__)
        try:
            self.harness.warm()
        except Exception:
            pass  # no pydantic 2: the harness says so when it is asked
        self.loaded = {name.partition(".")[0] for name in sys.modules} - fresh
        self.socket = socket.socket(fileno=WARM_FD)
        self.namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self.lower()
        self.hear()
        gc.collect()
        gc.freeze()

    def lower(self):
        """Keeps of root what it takes to make a call, for itself and for good."""
        for capability in range(LAST_CAP + 1):
            if prctl(CAPBSET_DROP, capability) != 0 and ctypes.get_errno() != errno.EINVAL:
                raise OSError(ctypes.get_errno(), "drop a capability")
        for result in (prctl(SET_SECUREBITS, SECUREBITS), prctl(NO_NEW_PRIVS, 1), prctl(SET_DUMPABLE, 0), keep(KEPT)):
            if result != 0:
                raise OSError(ctypes.get_errno(), "lower privileges")

    @staticmethod
    def hear():
        """Takes signals as an interpreter does that was started by a login."""
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        number = SIGACTION.get(os.uname().machine)
        for reserved in (32, 33) if number else ():  # the C library hides them
            libc.syscall(ctypes.c_long(number), ctypes.c_long(reserved), ctypes.create_string_buffer(32), None, ctypes.c_long(8))
        for number in signal.valid_signals():
            if signal.getsignal(number) == signal.SIG_IGN and number not in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)

    def serve(self):
        """Forks a call for whoever asks. It returns in a call's process only."""
        while True:
            asked, fds, _, _ = socket.recv_fds(self.socket, 16, 8)
            if not asked:
                os._exit(0)
            if len(fds) >= 5 and self.fork(*fds[:4]):
                return Call(self, *fds[4:6])
            for fd in fds:
                os.close(fd)

    def fork(self, pid_ns, mount_ns, cgroup_ns, told):
        """True in the call's process. It is a grandchild: when its parent ends
        it becomes a child of its namespace's first process, the supervisor."""
        if libc.setns(pid_ns, NEWPID) != 0:
            return False
        try:
            child = os.fork()
        except OSError:  # the supervisor is gone, or a limit is reached
            child = -1
        if child != 0:
            libc.setns(self.namespace, NEWPID)
            if child > 0:
                os.waitpid(child, 0)
            return False
        try:
            if libc.setns(cgroup_ns, NEWCGROUP) != 0 or libc.setns(mount_ns, NEWNS) != 0:
                os._exit(1)
            call = os.fork()
            if call == 0:
                return True
            os.write(told, struct.pack("<i", call))
            os._exit(0)
        except OSError:
            os._exit(1)


class Call:
    """The process of one call."""

    def __init__(self, warm, sock, rules=-1):
        self.warm = warm
        sock = fcntl.fcntl(sock, fcntl.F_DUPFD_CLOEXEC, 200)
        self.rules = fcntl.fcntl(rules, fcntl.F_DUPFD_CLOEXEC, 200) if rules >= 0 else -1
        warm.socket.detach()
        os.closerange(3, 200)
        self.socket = socket.socket(fileno=sock)

    def begin(self):
        """Becomes the user's, takes the request and returns what is to be called."""
        try:
            self.set_up()
            return self.take()
        except Failure as failure:
            self.note(FAILED, failure.number, failure.step)
        except OSError as error:
            self.note(FAILED, error.errno or 0, F_REQUEST)
        os._exit(125)

    def note(self, kind, a, b=0):
        try:
            self.socket.send(struct.pack("<IIIIqqqq", kind, 0, 0, 0, a, b, 0, 0))
        except OSError:
            pass

    def set_up(self):
        os.umask(0o022)
        os.setsid()
        self.set_score()
        os.setpriority(os.PRIO_PROCESS, 0, 0)
        self.drop()
        try:
            os.chdir("/workspace")
        except PermissionError:  # an earlier call has taken the user's rights away
            try:
                os.chmod("/workspace", 0o755)
                os.chdir("/workspace")
            except OSError as error:
                raise Failure(F_WORKSPACE, error.errno) from None
        except OSError as error:
            raise Failure(F_WORKSPACE, error.errno) from None
        self.fence()

    @staticmethod
    def set_score():
        must(F_SCORE, prctl(SET_DUMPABLE, 1))
        try:
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
        except OSError as error:
            raise Failure(F_SCORE, error.errno) from None
        must(F_SCORE, prctl(SET_DUMPABLE, 0))

    def drop(self):
        """Gives up what is left of root; what an exec could bring back the
        interpreter has given up before."""
        uid = self.warm.uid
        try:
            if self.warm.groups:
                os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        except OSError as error:
            raise Failure(F_IDENTITY, error.errno) from None
        must(F_PRIVILEGES, keep(0))
        number = KEYCTL.get(os.uname().machine)
        if number:
            libc.syscall(ctypes.c_long(number), ctypes.c_long(1), ctypes.c_long(0))  # a session keyring of its own; it may fail

    def fence(self):
        if self.rules >= 0:
            must(F_LANDLOCK, libc.syscall(ctypes.c_long(RESTRICT_SELF), ctypes.c_long(self.rules), ctypes.c_long(0)))
            os.close(self.rules)
        code = self.warm.filter
        if code:
            program = ctypes.create_string_buffer(code, len(code))
            header = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(program))
            at = ctypes.create_string_buffer(header, len(header))
            must(F_FILTER, libc.prctl(SET_SECCOMP, ctypes.c_ulong(2), ctypes.c_ulong(ctypes.addressof(at)), ctypes.c_ulong(0), ctypes.c_ulong(0)))

    def take(self):
        """Waits for the request and arranges the process as it says."""
        packet, fds, _, _ = socket.recv_fds(self.socket, MAX_PACKET, 8)
        if not packet:
            os._exit(0)  # nobody wants us any more
        fds = [self.out_of_the_way(fd) for fd in fds]
        if packet == b"bulk":
            with open(fds.pop(), "rb") as file:
                file.seek(0)
                packet = file.read()
        op, argc, envc, _, _ = struct.unpack_from("<IIIIQ", packet)
        strings = packet[24:].split(b"\0")
        program, argv, env = strings[0], strings[2 : 2 + argc], strings[2 + argc : 2 + argc + envc]
        if op not in (OP_SCRIPT, OP_HARNESS) or len(env) != envc:
            raise Failure(F_REQUEST, errno.EPROTO)
        for target, fd in enumerate(fds, 1):
            os.dup2(fd, target)
            os.close(fd)
        self.note(STARTED, time.clock_gettime_ns(time.CLOCK_MONOTONIC))
        if self.warm.address_space > 0:
            resource.setrlimit(resource.RLIMIT_AS, (self.warm.address_space,) * 2)
        env = dict(item.split(b"=", 1) for item in env)
        if op == OP_SCRIPT and self.differs(env):
            try:
                os.execve(program, argv, env)
            except OSError as error:
                raise Failure(F_EXEC, error.errno) from None
        self.socket.close()
        os.environb.clear()
        os.environb.update(env)
        time.tzset()
        prctl(SET_NAME, ctypes.addressof(NAME))
        prctl(SET_DUMPABLE, 1)  # as after an exec
        if op == OP_HARNESS:
            return self.warm.harness.main
        sys.path.insert(0, "")
        return lambda: finish(self.warm.bootstrap)

    @staticmethod
    def out_of_the_way(fd):
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
        os.close(fd)
        return moved

    def differs(self, env):
        """Whether an interpreter that starts now would find other modules: what
        lies in the working directory comes first, and there is a place for the
        user's own. Such a call has one started."""
        if any(name.startswith(b"PYTHON") and name != b"PYTHONUNBUFFERED" for name in env):
            return True
        try:
            if os.path.lexists(os.path.join(os.fsdecode(env.get(b"HOME", b"/")), ".local", "lib")):
                return True
            with os.scandir(".") as entries:
                for count, entry in enumerate(entries):
                    if count >= MAX_NAMES or entry.name.partition(".")[0] in self.warm.loaded:
                        return True
        except OSError:
            return True
        return False


def finish(code):
    """Runs code as __main__ and ends the process as the interpreter would, but
    for taking apart what was imported before the call, which takes longer than
    most calls do."""
    main = sys.modules["__main__"].__dict__
    main.pop("_run", None)
    status = 0
    try:
        exec(code, main)
    except SystemExit as end:
        status = end.code
        if status is None:
            status = 0
        elif not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    main.clear()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:
            status = 120
    os._exit(status & 0xFF)


def begin(config):
    """What __main__ is to call, in each call's process."""
    sys.path[:] = [entry for entry in sys.path if entry]
    run = Warm(config).serve().begin()
    sys.argv[:] = ["-c"]
    return run
