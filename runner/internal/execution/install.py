# Installs what the environment names from one package index and writes the
# files as a tar stream to standard output; everything else goes to standard
# error, whose last line that starts with ERROR: says what went wrong.
import importlib.util
import json
import os
import subprocess
import sys
import tarfile

wanted = json.loads(os.environ.pop("BIGWAVE_INSTALL"))
out = os.dup(1)
os.set_inheritable(out, False)
os.dup2(2, 1)
if importlib.util.find_spec("pip") is None:
    print("ERROR: The sandbox's Python has no pip to install packages with", file=sys.stderr)
    sys.exit(1)

target, scratch = "/workspace/packages", "/workspace/scratch"
os.mkdir(target)
os.mkdir(scratch)
env = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LANG": "C.UTF-8", "HOME": scratch, "TMPDIR": scratch, "PIP_CONFIG_FILE": os.devnull}
command = [
    sys.executable, "-I", "-m", "pip", "--isolated", "install", "--no-input", "--disable-pip-version-check", "--no-cache-dir",
    "--no-compile", "--progress-bar=off", "--retries=1", "--timeout=15", "--index-url=" + wanted["index"], "--target=" + target,
]
if wanted["plain"]:
    command.append("--trusted-host=" + wanted["plain"])
code = subprocess.run([*command, "--", *wanted["requirements"]], env=env, stdin=subprocess.DEVNULL, cwd=scratch).returncode
if code != 0:
    sys.exit(code)

# The layer is read-only, so bytecode must be there before, whatever dates say.
compile_all = [sys.executable, "-I", "-m", "compileall", "-q", "-j1", "--invalidation-mode", "unchecked-hash", target]
subprocess.run(compile_all, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
with os.fdopen(out, "wb") as stream, tarfile.open(fileobj=stream, mode="w|", dereference=True) as archive:
    for name in sorted(os.listdir(target)):
        archive.add(os.path.join(target, name), name)
