# Installs what the environment names from one package index and writes the
# files as a tar stream to standard output; everything else goes to standard
# error, whose last line that starts with ERROR: says what went wrong.
import contextlib
import glob
import importlib.util
import json
import os
import re
import ssl
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request

wanted = json.loads(os.environ.pop("BIGWAVE_INSTALL"))
out = os.dup(1)
os.set_inheritable(out, False)
os.dup2(2, 1)


def fail(why):
    print("\nERROR: " + why, file=sys.stderr)
    sys.exit(1)


for module in ("pip", "venv"):
    if importlib.util.find_spec(module) is None:
        fail(f"The sandbox's Python has no {module} to install packages with")
import venv

scratch, ca = "/workspace/scratch", None
os.mkdir(scratch)
if wanted["ca"]:
    ca = os.path.join(scratch, "ca.pem")
    with open(ca, "w") as file:
        file.write(wanted["ca"])


def ask_index():
    """Ends with the reason if the index gives no answer: of that pip only says
    that there is no such package."""
    page = wanted["index"].rstrip("/") + "/" + re.match("[a-z0-9-]+", wanted["requirements"][0]).group() + "/"
    trusted = ssl.create_default_context(cafile=ca)
    if not ca:
        with contextlib.suppress(Exception):  # whom pip trusts beside the system's
            from pip._vendor import certifi

            trusted.load_verify_locations(certifi.where())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusted))
    try:
        opener.open(page, timeout=10).close()
    except urllib.error.HTTPError as error:
        if error.code not in (404, 410):  # those are its word that there is none
            fail(f"The package index at {wanted['host']} answers {error.code} {error.reason}")
    except Exception as error:
        fail(f"The package index at {wanted['host']} can't be reached: {getattr(error, 'reason', error) or type(error).__name__}")


# An environment of its own sees what the sandbox's Python has, and takes what
# that lacks.
home = os.path.join(scratch, "env")
venv.EnvBuilder(symlinks=True).create(home)
(target,) = glob.glob(os.path.join(home, "lib", "*", "site-packages"))
link = os.path.join(target, "sandbox.pth")
with open(link, "w") as file:
    file.writelines(folder + "\n" for folder in sys.path if os.path.isdir(folder))

python = os.path.join(home, "bin", "python3")
env = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LANG": "C.UTF-8", "HOME": scratch, "TMPDIR": scratch, "PIP_CONFIG_FILE": os.devnull}
command = [
    python, "-I", "-m", "pip", "--isolated", "install", "--no-input", "--disable-pip-version-check", "--no-cache-dir",
    "--no-compile", "--progress-bar=off", "--retries=1", "--timeout=10", "--index-url=" + wanted["index"],
]
command += ["--trusted-host=" + host for host in wanted["plain"]]
if ca:
    command.append("--cert=" + ca)
    import pip

    if [int(n) for n in re.findall("[0-9]+", pip.__version__)[:2]] >= [24, 2]:
        # Otherwise it trusts the system's too, and fails where the host is an address.
        command.append("--use-deprecated=legacy-certs")
code = subprocess.run([*command, "--", *wanted["requirements"]], env=env, stdin=subprocess.DEVNULL, cwd=scratch).returncode
if code != 0:
    ask_index()
    sys.exit(code)
os.remove(link)

# The layer is read-only, so bytecode must be there before, whatever dates say.
compile_all = [python, "-I", "-m", "compileall", "-q", "-j1", "--invalidation-mode", "unchecked-hash", target]
subprocess.run(compile_all, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
with os.fdopen(out, "wb") as stream, tarfile.open(fileobj=stream, mode="w|", dereference=True) as archive:
    for name in sorted(os.listdir(target)):
        archive.add(os.path.join(target, name), name)
