# Loads, describes, validates and calls a Python tool (a source with a class
# Tools) inside a sandbox. One JSON request is read from descriptor 3; what is
# found is written as JSON lines to a descriptor of its own. What the tool
# prints is nobody's protocol.
#
# The tool runs in this very process, so nothing here can be kept from it: it
# can find the result descriptor and write what it likes. The reader must take
# every line for a stranger's. What is done here only keeps honest tools from
# disturbing the result by accident.
import sys

# Nothing that lies in the working directory may stand in for a module: the
# session's files are somebody else's than the valves.
sys.path[:] = [p for p in sys.path if p]

import _thread
import errno
import fcntl
import json
import os
import re

REQUEST_FD = 3
RESULT_FD = 4
HIGH_FD = 250

TOP_PACKAGES = "utils|apps|main|config"
IMPORT = re.compile(r"from([ \t]+)(" + TOP_PACKAGES + r")(?![A-Za-z0-9_])")

# What only works with a running event loop around it.
LOOP_WORDS = ("create_task", "ensure_future", "get_running_loop")

DISCONNECTED = "Client session disconnected."


class Refusal(Exception):
    """An answer to the caller that is no exception of the tool's."""

    def __init__(self, kind, message, **more):
        super().__init__(message)
        self.line = {"kind": kind, "type": "", "message": message, "traceback": "", **more}


# ---------------------------------------------------------------- text and JSON


def safe_str(value):
    """str() of a stranger's object, which may raise or never end in digits."""
    try:
        text = str(value)
        return text if type(text) is str else str.__str__(text)
    except BaseException:
        if isinstance(value, int):
            return hex(value)
        return f"<{type(value).__name__}>"


def clean(text):
    """Text that is valid UTF-8 and that a database can keep."""
    if "\0" in text:
        text = text.replace("\0", "\ufffd")
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def dumps(value, indent=None):
    return json.dumps(value, ensure_ascii=False, indent=indent)


def cut(text, limit):
    """The head and the tail of text in at most limit bytes, and whether something is missing."""
    raw = text.encode()
    if len(raw) <= limit:
        return text, False

    def marker(dropped):
        return f"\n… [{dropped} bytes dropped] …\n"

    room = limit - len(marker(len(raw)).encode())
    if room < 2:
        return raw[:limit].decode("utf-8", "ignore"), True
    head = raw[: room // 2].decode("utf-8", "ignore")
    tail = raw[len(raw) - (room - room // 2) :].decode("utf-8", "ignore")
    dropped = len(raw) - len(head.encode()) - len(tail.encode())
    return head + marker(dropped) + tail, True


class Plain:
    """Turns any object into what JSON can say, within a budget."""

    def __init__(self, nodes=1_000_000, depth=100):
        self.nodes = nodes
        self.depth = depth
        self.cut = False

    def of(self, value, depth=0):
        self.nodes -= 1
        if value is None or value is True or value is False:
            return value
        kind = type(value)
        if kind is str:
            return clean(value)
        if kind is int:
            return value if -(1 << 63) <= value < 1 << 64 else safe_str(value)
        if kind is float:
            return value if value - value == 0 else safe_str(value)
        if depth >= self.depth or self.nodes <= 0:
            self.cut = True
            return "…"
        if kind is dict:
            return self.mapping(value.items(), depth + 1)
        if kind is list or kind is tuple:
            return self.sequence(value, depth + 1)
        return self.other(value, depth + 1)

    def other(self, value, depth):
        import dataclasses
        import datetime
        import enum
        from collections import deque
        from collections.abc import Mapping, Set

        if isinstance(value, enum.Enum):
            return self.of(value.value, depth)
        if isinstance(value, str):
            return clean(str.__str__(value))
        if isinstance(value, int):
            return self.of(int.__int__(value), depth)
        if isinstance(value, float):
            return self.of(float.__float__(value), depth)
        if isinstance(value, Mapping):
            return self.mapping(value.items(), depth)
        if isinstance(value, (list, tuple, Set, deque)):
            return self.sequence(value, depth)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return self.octets(bytes(value))
        if isinstance(value, (datetime.date, datetime.time)):
            return value.isoformat()
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self.mapping(((f.name, getattr(value, f.name)) for f in dataclasses.fields(value)), depth)
        if hasattr(type(value), "model_dump"):
            return self.of(value.model_dump(), depth)
        return clean(safe_str(value))

    def mapping(self, items, depth):
        out = {}
        for key, item in items:
            if self.nodes <= 0:
                self.cut = True
                break
            key = key if type(key) is str else self.of(key, depth)
            if key is None or isinstance(key, (bool, int, float)):
                key = json.dumps(key)
            out[clean(key if isinstance(key, str) else safe_str(key))] = self.of(item, depth)
        return out

    def sequence(self, items, depth):
        out = []
        for item in items:
            if self.nodes <= 0:
                self.cut = True
                break
            out.append(self.of(item, depth))
        return out

    @staticmethod
    def octets(raw):
        try:
            return clean(raw.decode())
        except UnicodeDecodeError:
            import base64

            return {"base64": base64.b64encode(raw).decode()}


def plain(value):
    return Plain().of(value)


def whole(value):
    """plain, of what is of no use in parts."""
    p = Plain()
    made = p.of(value)
    if p.cut:
        raise ValueError("it is too large or nests too deeply")
    return made


# ---------------------------------------------------------------- the way out


class Out:
    """Writes result lines. Only the process that made it does: what a tool
    forked comes back here too, and must not speak for its parent."""

    def __init__(self, fd, limits=None):
        self.fd = fd
        self.pid = os.getpid()
        self.lock = _thread.allocate_lock()
        self.done = False
        self.limit({} if limits is None else limits)
        os.register_at_fork(after_in_child=self.forked)

    def limit(self, limits):
        self.text = limits.get("text") or 1 << 20
        self.line = limits.get("line") or 16 << 20
        self.attachments = limits.get("attachments") or 8 << 20
        self.events = limits.get("events") or 1000
        self.event_bytes = limits.get("event_bytes") or 256 << 10
        self.event_total = limits.get("event_total") or 4 << 20
        self.dropped = 0

    def forked(self):
        if self.fd >= 0 and os.getpid() != self.pid:
            os.close(self.fd)
            self.fd = -1

    def event(self, event):
        """One event line; past the limits it is counted and dropped."""
        if self.fd < 0:
            return
        event = Plain(self.event_bytes // 4).of(event)
        line = encode({"event": event}) if isinstance(event, dict) else b""
        with self.lock:
            if self.done:
                return
            if self.events <= 0 or not 0 < len(line) <= min(self.event_bytes, self.event_total):
                self.dropped += 1
                return
            self.events -= 1
            self.event_total -= len(line)
            self.write(line)

    def final(self, line):
        """The last line. Whatever is said after it is not heard."""
        if self.fd < 0:
            return
        with self.lock:
            if self.done:
                return
            self.done = True
            line["events_dropped"] = self.dropped
            written = encode(line)
            if len(written) > self.line:
                refusal = Refusal("too_large", f"What the tool says of itself takes {len(written)} bytes of at most {self.line}.")
                written = encode({"error": refusal.line, "events_dropped": self.dropped})
            self.write(written)

    def write(self, line):
        left = memoryview(line)
        while left:
            try:
                left = left[os.write(self.fd, left) :]
            except BlockingIOError:
                os.set_blocking(self.fd, True)
            except OSError:  # nobody reads any more
                return


def encode(line):
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n"


# ---------------------------------------------------------------- the source


def strip_bom(content):
    return content[1:] if content.startswith("\ufeff") else content


def frontmatter(content):
    """The "key: value" lines of the docstring that opens the source. A byte
    order mark, blank lines and comments may stand before it."""
    lines = iter(strip_bom(content).split("\n"))
    quotes = None
    for line in lines:
        line = line.strip()
        if line and not line.startswith("#"):
            quotes = line.lstrip("rR") if line[:1] in "rR" else line
            break
    if quotes not in ('"""', "'''"):
        return {}
    found = {}
    for line in lines:
        if quotes in line:
            break
        match = re.match(r"^\s*([A-Za-z_]+):\s*(.*)\s*$", line)
        if match:
            found[match.group(1).strip()] = clean(match.group(2).strip())
    return found


def requirements(manifest):
    """The packages that the frontmatter names. A comma inside brackets is
    theirs, and so is one before a comparison: a>=1,<2 is one."""
    parts = []
    for part in re.split(r",(?![^\[\]]*\])", manifest.get("requirements", "")):
        part = part.strip()
        if parts and part.startswith(("<", ">", "=", "!", "~")):
            parts[-1] += "," + part
        elif part:
            parts.append(part)
    return parts


def missing(wanted):
    """The name and the text of those that are not here: neither a distribution
    nor a module of that name. Versions are not compared."""
    import importlib.metadata
    import importlib.util

    def here(name):
        try:
            importlib.metadata.distribution(name)
            return True
        except Exception:
            pass
        try:
            return importlib.util.find_spec(name.replace("-", "_")) is not None
        except Exception:
            return False

    out = []
    for text in wanted:
        name = re.match(r"[A-Za-z0-9]+(?:[._-]+[A-Za-z0-9]+)*(?=\s*(?:[\[<>=!~;@(]|$))", text)
        if name is None or not here(name.group()):
            out.append((text if name is None else name.group(), text))
    return out


def rewrite_imports(content):
    """from utils.x import y → from open_webui.utils.x import y, in import
    statements of exactly the old top packages and nowhere else."""
    if not IMPORT.search(content):
        return content
    import ast

    body = strip_bom(content)
    try:
        tree = ast.parse(body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return content  # compiling it says what is wrong
    places = [
        (node.lineno - 1, node.col_offset)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and node.level == 0
        and re.fullmatch(TOP_PACKAGES, (node.module or "").split(".")[0])
    ]
    lines = re.split(r"(?<=\n)|(?<=\r)(?!\n)", body)
    for row, column in sorted(places, reverse=True):
        raw = lines[row].encode()
        head, rest = raw[:column].decode(), raw[column:].decode()
        lines[row] = head + IMPORT.sub(r"from\1open_webui.\2", rest, count=1)
    return content[: len(content) - len(body)] + "".join(lines)


# ---------------------------------------------------------------- pydantic


def need_pydantic():
    version = "%d.%d" % sys.version_info[:2]
    try:
        import pydantic
    except ImportError:
        raise Refusal("pydantic", f"The sandbox's Python {version} has no pydantic; Python tools need pydantic 2.") from None
    found = safe_str(getattr(pydantic, "VERSION", "of an unknown version"))
    if found.split(".")[0] != "2":
        raise Refusal("pydantic", f"The sandbox's Python {version} has pydantic {found}; Python tools need pydantic 2.")
    return pydantic


def schema_of(model):
    """Its JSON schema as pydantic 2.13 gives it; earlier ones leave out what an
    open object and a decimal's text look like."""
    from pydantic.json_schema import GenerateJsonSchema

    class Schema(GenerateJsonSchema):
        def dict_schema(self, schema):
            made = super().dict_schema(schema)
            if "additionalProperties" not in made and "patternProperties" not in made:
                made["additionalProperties"] = True
            return made

        def decimal_schema(self, schema):
            made = super().decimal_schema(schema)
            if schema.get("max_digits") is None and schema.get("decimal_places") is None:
                for member in made.get("anyOf", [made]):
                    if member.get("type") == "string":
                        member.setdefault("pattern", r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$")
            return made

    return model.model_json_schema(schema_generator=Schema)


# ---------------------------------------------------------------- stand-ins
#
# What tools import most from the server they were written for. Each name is
# there only when the real package is not.


def web_shim(module):
    """Fills in fastapi and starlette: responses that a tool returns, and the
    names that it needs to load."""
    import http
    from collections.abc import MutableMapping

    class Headers(MutableMapping):
        def __init__(self, items=()):
            self._items = {}
            for key, value in dict(items or {}).items():
                self[key] = value

        def __getitem__(self, key):
            return self._items[key.lower()]

        def __setitem__(self, key, value):
            self._items[str(key).lower()] = str(value)

        def __delitem__(self, key):
            del self._items[key.lower()]

        def __iter__(self):
            return iter(self._items)

        def __len__(self):
            return len(self._items)

        def __repr__(self):
            return f"Headers({self._items!r})"

    class Response:
        media_type = None
        charset = "utf-8"

        def __init__(self, content=None, status_code=200, headers=None, media_type=None, background=None):
            self.status_code = status_code
            self.media_type = media_type if media_type is not None else type(self).media_type
            self.background = background
            self.headers = Headers(headers)
            self.body = self.render(content)
            if self.media_type and "content-type" not in self.headers:
                text = self.media_type.startswith("text/")
                self.headers["content-type"] = self.media_type + ("; charset=" + self.charset if text else "")

        def render(self, content):
            if content is None:
                return b""
            return bytes(content) if isinstance(content, (bytes, bytearray, memoryview)) else content.encode(self.charset)

    class HTMLResponse(Response):
        media_type = "text/html"

    class PlainTextResponse(Response):
        media_type = "text/plain"

    class JSONResponse(Response):
        media_type = "application/json"

        def render(self, content):
            return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()

    class RedirectResponse(Response):
        def __init__(self, url, status_code=307, headers=None, background=None):
            super().__init__(b"", status_code, headers, background=background)
            self.headers["location"] = str(url)

    class StreamingResponse(Response):
        def __init__(self, content, status_code=200, headers=None, media_type=None, background=None):
            super().__init__(b"", status_code, headers, media_type, background)
            self.body_iterator = content

    class FileResponse(Response):
        def __init__(self, path, status_code=200, headers=None, media_type=None, background=None, filename=None, **_):
            super().__init__(b"", status_code, headers, media_type, background)
            self.path, self.filename = path, filename

    class State:
        def __init__(self, state=None):
            self.__dict__.update(state or {})

    class URL(str):
        @property
        def path(self):
            return "/"

    class App:
        def __init__(self, *_, **__):
            self.state = State()

        def _route(self, *_, **__):
            return lambda function: function

        get = post = put = delete = patch = head = options = _route

    class Request:
        def __init__(self, scope=None, receive=None, send=None):
            self.scope = scope or {"type": "http"}
            self.app = self.scope.get("app") or App()
            self.state = State()
            self.headers = Headers((k.decode(), v.decode()) for k, v in self.scope.get("headers", ()))
            self.method = self.scope.get("method", "POST")
            self.url = self.base_url = URL("http://localhost/")
            self.cookies, self.query_params, self.path_params = {}, {}, {}
            self.client, self.user, self.session = None, None, {}

        async def body(self):
            return b""

        async def json(self):
            return {}

        async def is_disconnected(self):
            return False

    class HTTPException(Exception):
        def __init__(self, status_code, detail=None, headers=None):
            self.status_code = status_code
            self.detail = http.HTTPStatus(status_code).phrase if detail is None else detail
            self.headers = headers

        def __str__(self):
            return f"{self.status_code}: {self.detail}"

    class UploadFile:
        def __init__(self, file=None, *, size=None, filename=None, headers=None):
            self.file, self.size, self.filename, self.headers = file, size, filename, Headers(headers)

        async def read(self, size=-1):
            return self.file.read(size)

    class BackgroundTasks:
        def __init__(self):
            self.tasks = []

        def add_task(self, function, *args, **kwargs):
            self.tasks.append((function, args, kwargs))

    async def run_in_threadpool(function, *args, **kwargs):
        import asyncio

        return await asyncio.to_thread(function, *args, **kwargs)

    def parameter(default=None, *_, **__):
        return default

    def jsonable_encoder(value, *_, **__):
        return plain(value)

    codes = {f"HTTP_{c.value}_{c.name}": c.value for c in http.HTTPStatus}
    status = type(sys)(module.__name__.split(".")[0] + ".status")
    status.__dict__.update(codes)
    names = {k: v for k, v in locals().items() if k not in ("module", "codes", "parameter", "App", "http", "MutableMapping")}
    names.update(FastAPI=App, APIRouter=App, Starlette=App, Depends=parameter, Query=parameter, Body=parameter)
    names.update(Header=parameter, Form=parameter, File=parameter, Path=parameter, Cookie=parameter)
    for name, found in names.items():
        if isinstance(found, type):
            found.__module__, found.__qualname__ = module.__name__, name
    return names


WEB = {
    "": None,  # everything
    "responses": ("Response", "HTMLResponse", "PlainTextResponse", "JSONResponse", "RedirectResponse", "StreamingResponse", "FileResponse"),
    "requests": ("Request",),
    "exceptions": ("HTTPException",),
    "concurrency": ("run_in_threadpool",),
    "encoders": ("jsonable_encoder",),
    "datastructures": ("Headers", "UploadFile", "URL", "State"),
    "background": ("BackgroundTasks",),
    "status": None,
}

# The parts of the open_webui package that tools import from.
OPEN_WEBUI = frozenset(
    "apps config constants env functions internal main models retrieval routers socket storage tasks tools utils".split()
)


class NotHere(AttributeError):
    """Something of the server's that a sandbox has not."""


def stand_in(name):
    """A class to be imported and named in annotations; using it says that it
    is not here."""

    def refuse(*_, **__):
        raise NotHere(f"{name} is not available in a sandbox")

    class Meta(type):
        def __getattr__(cls, attribute):
            if attribute.startswith("__") and attribute.endswith("__"):
                raise AttributeError(attribute)
            raise NotHere(f"{name} is not available in a sandbox (its {attribute!r} was asked for)")

        def __call__(cls, *args, **kwargs):
            if any("__init__" in base.__dict__ for base in cls.__mro__[:-2]):
                return super().__call__(*args, **kwargs)
            return refuse()

    return Meta(name.rpartition(".")[2], (), {"__module__": name.rpartition(".")[0]})


def message_text(message):
    content = (message or {}).get("content")
    if isinstance(content, list):
        return next((part.get("text") for part in content if part.get("type") == "text"), None)
    return content


def misc_shim():
    """open_webui.utils.misc: the functions that need no server."""

    def last(messages, role):
        return next((m for m in reversed(messages or []) if m.get("role") == role), None)

    def get_last_user_message_item(messages):
        return last(messages, "user")

    def get_last_user_message(messages):
        return message_text(last(messages, "user"))

    def get_last_assistant_message_item(messages):
        return last(messages, "assistant")

    def get_last_assistant_message(messages):
        return message_text(last(messages, "assistant"))

    def get_content_from_message(message):
        return message_text(message)

    def get_system_message(messages):
        return next((m for m in messages if m.get("role") == "system"), None)

    def remove_system_message(messages):
        return [m for m in messages if m.get("role") != "system"]

    def pop_system_message(messages):
        return get_system_message(messages), remove_system_message(messages)

    def prepend_to_first_user_message_content(content, messages):
        for message in messages:
            if message.get("role") == "user":
                if isinstance(message.get("content"), str):
                    message["content"] = f"{content}\n{message['content']}"
                break
        return messages

    def add_or_update_system_message(content, messages, append=False):
        system = get_system_message(messages[:1])
        if system is None:
            messages.insert(0, {"role": "system", "content": content})
        else:
            parts = (system["content"], content) if append else (content, system["content"])
            system["content"] = "\n".join(parts)
        return messages

    names = dict(locals())
    del names["last"]
    return names


def env_shim():
    """open_webui.env and open_webui.config: places and log levels."""
    from collections import defaultdict
    from pathlib import Path

    data = Path("/workspace/.open_webui")
    return {
        "SRC_LOG_LEVELS": defaultdict(lambda: "INFO"),
        "GLOBAL_LOG_LEVEL": "INFO",
        "VERSION": "0.11.0",
        "DATA_DIR": data,
        "CACHE_DIR": data / "cache",
        "UPLOAD_DIR": data / "uploads",
        "STATIC_DIR": data / "static",
        "WEBUI_URL": "",
    }


class Shims:
    """Finds the stand-ins. It stands last on sys.meta_path, so that a real
    package always wins."""

    def find_spec(self, name, path=None, target=None):
        top, _, rest = name.partition(".")
        if top in ("fastapi", "starlette"):
            known = rest in WEB
        elif top == "open_webui":
            known = not rest or rest.split(".")[0] in OPEN_WEBUI
        else:
            return None
        if not known or (rest and not isinstance(getattr(sys.modules.get(top), "__loader__", None), Shims)):
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self, is_package=top == "open_webui" or not rest)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        top, _, rest = module.__name__.partition(".")
        if top == "open_webui":
            self.open_webui(module, rest)
        elif not rest:
            # The two packages share their classes, as the real ones do.
            other = sys.modules.get("starlette" if top == "fastapi" else "fastapi")
            shared = isinstance(getattr(other, "__loader__", None), Shims)
            names = other.names if shared else web_shim(module)
            module.names = names
            module.__dict__.update(names)
        elif rest == "status":
            module.__dict__.update(vars(sys.modules[top].names["status"]), __name__=module.__name__)
        else:
            module.__dict__.update((n, sys.modules[top].names[n]) for n in WEB[rest])

    @staticmethod
    def open_webui(module, rest):
        if rest == "utils.misc":
            module.__dict__.update(misc_shim())
        elif rest in ("env", "config"):
            module.__dict__.update(env_shim())

        def __getattr__(attribute):
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            found = stand_in(f"{module.__name__}.{attribute}")
            setattr(module, attribute, found)
            return found

        module.__getattr__ = __getattr__


# ---------------------------------------------------------------- loading


class Tool:
    """A loaded source: its module and the one object that Tools() gave."""

    def __init__(self, ident, content, manifest):
        self.name = "tool_" + ident
        self.file = f"<{self.name}>"
        self.manifest = manifest
        self.content = content
        self.module = type(sys)(self.name)
        self.instance = None

    def load(self):
        # pydantic and dataclasses look their module up while it still runs.
        sys.modules[self.name] = self.module
        self.module.__file__ = path = self.path()
        written = "__file__" in self.content and self.write(path)
        try:
            exec(self.compile(), self.module.__dict__)
        finally:
            if written:
                try:
                    os.unlink(path)
                except OSError:
                    pass
        if not hasattr(self.module, "Tools"):
            raise Exception("No Tools class found in the module")
        self.instance = self.module.Tools()

    def compile(self):
        try:
            return compile(strip_bom(self.content), self.file, "exec", dont_inherit=True)
        except SyntaxError as error:
            if error.filename == self.file:
                error.filename = "<string>"
            raise

    def path(self):
        name = re.sub(r"\W", "_", self.name)[:50]
        return os.path.join(os.environ.get("TMPDIR") or "/tmp", f"{name}.{os.urandom(6).hex()}.py")

    def write(self, path):
        """A file with the source for as long as it loads, for one that reads
        its own. No other has it: the folder is the whole session's."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return False
        with open(fd, "wb") as file:
            file.write(self.content.encode("utf-8", "replace"))
        return True

    def functions(self):
        """What is offered, by attribute, in dir()'s order."""
        for name in dir(self.instance):
            if name.startswith("_"):
                continue
            value = getattr(self.instance, name)
            if callable(value) and not isinstance(value, type):
                yield name, value

    def function(self, wanted):
        """The function that is described as wanted."""
        named = [f for _, f in self.functions() if getattr(f, "__name__", "") == wanted]
        if named and not wanted.startswith("_"):
            own = getattr(self.instance, wanted, None)
            return next((f for f in named if f == own), named[0])
        raise Refusal("function", f'Tool "{wanted}" not found.')

    def valves_class(self, which):
        """Tools.Valves or, where that is missing, the module's."""
        from pydantic import BaseModel

        found = getattr(self.instance, which, None)
        if found is None:
            found = self.module.__dict__.get(which)
        return found if isinstance(found, type) and issubclass(found, BaseModel) else None

    def set_valves(self, stored):
        """Stored values over those that Tools() set itself, if the tool takes them."""
        model = self.valves_class("Valves")
        if model is None or not hasattr(self.instance, "valves"):
            return
        current = self.instance.valves
        values = {}
        if isinstance(current, model):
            fields = model.model_fields
            values = {
                alias(name, fields[name]): getattr(current, name) for name in current.model_fields_set if name in fields
            }
        values.update(stored)
        self.instance.valves = make_valves(model, values)


def alias(name, field):
    """The key under which a field's value is given."""
    for other in (field.validation_alias, field.alias):
        if isinstance(other, str):
            return other
    return name


def make_valves(model, values):
    """The values as a model, or a refusal that doesn't repeat them."""
    from pydantic import ValidationError

    try:
        return model(**values)
    except ValidationError as error:
        raise Refusal("valves", validation_text(error)) from None


def unfit(whose, error):
    """The same refusal, when the values were stored and not just sent."""
    if isinstance(error, Refusal):
        error.line["message"] = f"{whose} stored valves do not fit the tool: {error.line['message']}"
    return error


def validation_text(error):
    """What pydantic says, without the values: they are secrets."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    lines = ["%d validation error%s for %s" % (len(found), "" if len(found) == 1 else "s", error.title)]
    for one in found[:20]:
        lines.append(".".join(map(str, one["loc"])))
        lines.append(f"  {one['msg']} [type={one['type']}]")
    return "\n".join(lines)


def valves_schema(model, user):
    try:
        schema = schema_of(model)
        dynamic_options(model, schema, user)
        return whole(schema)
    except Exception as error:
        # Values can be set all the same; the tool says what it makes of them.
        print(f"{model.__name__} has no schema: {safe_str(error)}", file=sys.stderr)
        return {"properties": {}, "title": model.__name__, "type": "object"}


def dynamic_options(model, schema, user):
    """A select whose options are a function's name gets what that returns."""
    import inspect

    for prop in schema.get("properties", {}).values():
        given = prop.get("input") if isinstance(prop, dict) else None
        name = given.get("options") if isinstance(given, dict) else None
        if not isinstance(name, str):
            continue
        try:
            function = getattr(model, name)
            taken = inspect.signature(function).parameters
            options = function(**{k: user for k in ("__user__", "user") if k in taken})
            if isinstance(options, list):
                prop["input"] = {**given, "options": options}
        except Exception as error:
            print(f"the options of {name!r} are not there: {safe_str(error)}", file=sys.stderr)


def values_of(model, made):
    """The fields that were set, as JSON, secrets in clear."""
    dumped = made.model_dump(mode="json", exclude_unset=True)
    raw = made.model_dump(mode="python", exclude_unset=True)
    shown = whole(reveal(dumped, raw))
    fields = model.model_fields
    return {alias(k, fields[k]) if k in fields else k: v for k, v in shown.items()}


def reveal(dumped, raw):
    if hasattr(raw, "get_secret_value"):
        return raw.get_secret_value()
    if isinstance(raw, dict) and isinstance(dumped, dict) and len(raw) == len(dumped):
        return {k: reveal(v, r) for (k, v), r in zip(dumped.items(), raw.values())}
    if isinstance(raw, (list, tuple)) and isinstance(dumped, list) and len(raw) == len(dumped):
        return [reveal(v, r) for v, r in zip(dumped, raw)]
    return dumped


# ---------------------------------------------------------------- specs


def doc_of(function):
    doc = getattr(function, "__doc__", None)
    return doc if isinstance(doc, str) else ""


def description(doc):
    import inspect

    lines = []
    for line in doc.strip().split("\n"):
        line = line.strip()
        if line.startswith((":param", ":return")):
            break
        lines.append(line)
    return inspect.cleandoc("\n".join(lines))


def live_description(function):
    """What a model is told now: a docstring may have changed since it was described."""
    doc = doc_of(function)
    if not doc.strip():
        return function.__name__
    return re.split(":param|:return", doc, maxsplit=1)[0]


def parameter_texts(doc):
    found = {}
    for line in doc.split("\n"):
        match = re.match(r":param (\w+):\s*(.+)", line.strip())
        if match and not match.group(1).startswith("__"):
            found[match.group(1)] = match.group(2)
    return found


def spec_of(function):
    """What a model is told about a function: name, description, parameters."""
    import inspect
    import typing

    from pydantic import Field, create_model

    hints = typing.get_type_hints(function)
    doc = doc_of(function)
    texts = parameter_texts(doc)
    fields = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name.startswith("_"):
            continue
        refuse_protected(name)
        default = ... if parameter.default is parameter.empty else parameter.default
        if name in texts:
            default = Field(default, description=texts[name])
        fields[name] = (hints.get(name, typing.Any), default)
    schema = schema_of(create_model(function.__name__, **fields))
    definitions = schema.pop("$defs", {})
    schema = drop_titles(inline(schema, definitions, ()))
    schema.pop("description", None)
    if isinstance(schema.get("properties"), dict):
        schema["properties"] = {k: tidy(v) for k, v in schema["properties"].items()}
    return {"name": function.__name__, "description": description(doc), "parameters": schema}


def refuse_protected(name):
    """The names of pydantic's own that no parameter can have, said as pydantic 2.13 says it."""
    from pydantic import BaseModel

    for space in ("model_validate", "model_dump"):
        if name.startswith(space) and hasattr(BaseModel, name):
            member = getattr(BaseModel, name)
            raise ValueError(f"Field {name!r} conflicts with member {member} of protected namespace {space!r}.")


def inline(node, definitions, inside):
    """The schema with every $ref replaced by what it means; a cycle by {}."""
    if isinstance(node, list):
        return [inline(item, definitions, inside) for item in node]
    if not isinstance(node, dict):
        return node
    ref = node.get("$ref")
    if not isinstance(ref, str):
        return {k: inline(v, definitions, inside) for k, v in node.items()}
    name = ref.rpartition("/")[2].replace("~1", "/").replace("~0", "~")
    meant = {} if name in inside else inline(definitions.get(name, {}), definitions, (*inside, name))
    beside = {k: inline(v, definitions, inside) for k, v in node.items() if k != "$ref"}
    return {**meant, **beside}


def drop_titles(node):
    return {
        k: drop_titles(v) if isinstance(v, dict) else v
        for k, v in node.items()
        if not (k == "title" and isinstance(v, str))
    }


def tidy(schema):
    """One property as models take it: no null, and always with a type."""
    if not isinstance(schema, dict):
        return schema
    schema = dict(schema)
    if isinstance(schema.get("anyOf"), list):
        members = [m for m in schema["anyOf"] if not (isinstance(m, dict) and m.get("type") == "null")]
        if len(members) == 1:
            del schema["anyOf"]
            schema.update(members[0])
        else:
            schema["anyOf"] = members
    if "default" in schema and schema["default"] is None:
        del schema["default"]
    if not any(k in schema for k in ("type", "anyOf", "properties")):
        schema["type"] = "string"
    if isinstance(schema.get("properties"), dict):
        schema["properties"] = {k: tidy(v) for k, v in schema["properties"].items()}
    if isinstance(schema.get("items"), dict):
        schema["items"] = tidy(schema["items"])
    return schema


def specs_of(tool):
    import warnings

    specs, live = [], {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _, function in tool.functions():
            specs.append(whole(spec_of(function)))
            live[clean(function.__name__)] = clean(live_description(function))
    return specs, live


# ---------------------------------------------------------------- arguments


def parse_arguments(given):
    """A model's arguments as an object; nothing at all means none."""
    if given is None:
        return {}
    if isinstance(given, str):
        text = given.strip()
        if not text:
            return {}
        try:
            given = json.loads(text)
        except ValueError:
            import ast

            try:
                given = ast.literal_eval(text)
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                raise Refusal("arguments", "The arguments are not JSON.") from None
        if given is None:
            return {}
    if not isinstance(given, dict):
        raise Refusal("arguments", "The arguments must be an object with one key for each parameter.")
    return given


TRUE = ("true", "1", "yes", "y", "on", "t")
FALSE = ("false", "0", "no", "n", "off", "f")


def coerce(name, value, hint):
    """value as the hint wants it where nothing is lost by that."""
    import typing

    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Union or (origin is not None and getattr(origin, "__name__", "") == "UnionType"):
        inner = [h for h in inner if h is not type(None)]
        if value is None or len(inner) != 1:
            return value
        return coerce(name, value, inner[0])
    if hint is str:
        return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
    if hint is bool:
        return to_bool(name, value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint in (int, float) and isinstance(value, str):
        try:
            return hint(value)
        except ValueError as error:
            raise Refusal("arguments", f'argument "{name}": {error}', argument=name) from None
    if hint in (list, dict) or origin in (list, dict):
        value = from_text(value, origin or hint)
    if origin is list and isinstance(value, list) and len(inner) == 1:
        return [coerce(f"{name}[{i}]", item, inner[0]) for i, item in enumerate(value)]
    return value


def to_bool(name, value):
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if not isinstance(value, str):
        return value
    word = value.strip().lower()
    if word in TRUE or word in FALSE:
        return word in TRUE
    raise Refusal("arguments", f'argument "{name}": {value[:100]!r} is neither true nor false', argument=name)


def from_text(value, kind):
    """A list or an object that came as its own JSON text."""
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError:
            return value
        if isinstance(parsed, kind):
            return parsed
    return value


def arguments_for(function, given, reserved):
    """The keyword arguments of a call: what the model gave and the signature
    has, then what only the platform gives."""
    import inspect
    import typing

    from pydantic.fields import FieldInfo

    parameters = inspect.signature(function).parameters
    try:
        hints = typing.get_type_hints(function)
    except Exception:
        hints = {}
    out = {}
    for name, parameter in parameters.items():
        if name.startswith("_"):
            if name in reserved:
                out[name] = reserved[name]()
        elif name in given:
            out[name] = coerce(name, given[name], hints.get(name))
        elif isinstance(parameter.default, FieldInfo):
            if not parameter.default.is_required():
                out[name] = parameter.default.get_default(call_default_factory=True)
            else:
                raise Refusal("arguments", f'{function.__name__}() needs the argument "{name}".', argument=name)
    return out


def fits(function, kwargs):
    import inspect

    try:
        inspect.signature(function).bind(**kwargs)
        return True
    except TypeError:
        return False


def reserved_arguments(tool, request, out):
    """The arguments that only the platform gives, each made when it is asked for."""
    ids = request.get("ids") or {}

    async def emit(event):
        out.event(event)

    async def ask(event=None):
        # Nobody is there to be asked: what was not confirmed is refused.
        kind = event.get("type") if isinstance(event, dict) else None
        if kind == "confirmation":
            return False
        return None if kind == "input" else {"error": DISCONNECTED}

    def user():
        found = dict(request.get("user") or {})
        model = tool.valves_class("UserValves")
        if model is not None:
            try:
                found["valves"] = make_valves(model, request.get("user_valves") or {})
            except Refusal as error:
                raise unfit("The user's", error) from None
        return found

    def web_request():
        from fastapi import Request

        return Request({"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []})

    return {
        "__event_emitter__": lambda: emit,
        "__event_call__": lambda: ask,
        "__user__": user,
        "__metadata__": lambda: request.get("metadata") or {},
        "__oauth_token__": lambda: None,
        "__request__": web_request,
        "__model__": lambda: request.get("model"),
        "__chat_id__": lambda: ids.get("chat"),
        "__message_id__": lambda: ids.get("message"),
        "__messages__": lambda: request.get("messages") or [],
        "__files__": lambda: request.get("files") or [],
        "__id__": lambda: request.get("id", ""),
    }


# ---------------------------------------------------------------- calling

GENERATED_ITEMS = 10_000


class Drain:
    """What a generator yields, until it is enough."""

    def __init__(self, limit):
        self.limit = limit
        self.items = []
        self.cut = False

    def add(self, item):
        """Takes one; False when no more are wanted."""
        if self.limit <= 0 or len(self.items) >= GENERATED_ITEMS:
            self.cut = True
            return False
        self.items.append(item)
        self.limit -= len(item) if isinstance(item, (str, bytes)) else 1
        return True

    def value(self):
        if self.items and all(isinstance(item, str) for item in self.items):
            return "".join(self.items)
        return self.items


def invoke(function, kwargs, limit, looped):
    """Calls it and waits for what it returns: the value, and whether it was cut."""
    import inspect

    if not looped:
        value = function(**kwargs)
        if inspect.isgenerator(value):
            return drained(value, limit)
        if not (inspect.isawaitable(value) or inspect.isasyncgen(value)):
            return value, False
        start = value
    else:
        start = None
    import asyncio

    async def main():
        value = function(**kwargs) if start is None else start
        if inspect.isawaitable(value):
            value = await value
        if inspect.isasyncgen(value):
            drain = Drain(limit)
            async for item in value:
                if not drain.add(item):
                    break
            result = drain.value(), drain.cut
        elif inspect.isgenerator(value):
            result = drained(value, limit)
        else:
            result = value, False
        for _ in range(3):  # what was started and not awaited may still say a word
            await asyncio.sleep(0)
        return result

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    # The loop is not closed: that would wait for threads which nobody ends,
    # and the process ends with the call.
    return loop.run_until_complete(main())


def drained(generator, limit):
    drain = Drain(limit)
    for item in generator:
        if not drain.add(item):
            break
    return drain.value(), drain.cut


def wants_loop(function, content):
    """Whether it is called with an event loop running: what is async is, and
    what is not when its source makes tasks, unless it runs a loop itself."""
    import inspect

    inner = inspect.unwrap(function)
    if inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner):
        return True
    names = getattr(getattr(inner, "__code__", None), "co_names", ())
    return any(w in content for w in LOOP_WORDS) and not ("run" in names or "run_until_complete" in names)


# ---------------------------------------------------------------- results


class Result:
    """What a returned object comes to: text for the model, the value as JSON,
    files and embeds beside it."""

    def __init__(self, function, nodes):
        self.function = function
        self.nodes = nodes
        self.files = []
        self.embeds = []
        self.cut = False

    def line(self, value, out):
        kind = type(value).__name__
        text, value = self.read(value)
        same = isinstance(value, str) and value == text
        text, cut_text = cut(clean(text), out.text)
        room = out.attachments
        for kept in (self.files, self.embeds):
            for item in list(kept):
                room -= len((item["url"] if isinstance(item, dict) else item).encode())
                if room < 0:
                    kept.remove(item)
                    self.cut = True
        result = {
            "type": kind,
            "text": text,
            "value": None if same else value,
            "same": same,
            "files": self.files,
            "embeds": self.embeds,
            "truncated": self.cut or cut_text,
        }
        if not same and len(encode(value)) > out.text:
            result.update(value=None, truncated=True)
        for field, empty in (("value", None), ("embeds", []), ("files", []), ("text", "")):
            if len(encode({"result": result})) + 100 <= out.line:
                break
            result[field] = empty
            result["truncated"] = True
        return result

    def plain(self, value):
        p = Plain(self.nodes)
        made = p.of(value)
        self.cut = self.cut or p.cut
        return made

    def read(self, value):
        """The text and the JSON value of what a function returned."""
        if value is None:
            return "", None
        if is_response(value):
            return self.response(value)
        if isinstance(value, tuple):
            if len(value) == 2 and is_response(value[0]) and self.inline(value[0]):
                self.response(value[0])
                return self.read(value[1])
            made = self.plain(value)
            first = self.read(value[0])[1] if value and is_response(value[0]) else (made[0] if made else made)
            return dumps(first, 2), made
        if isinstance(value, str):
            value = clean(str.__str__(value))
            if value.startswith("data:image/"):
                self.files.append({"type": "image", "url": value})
                value = f"{self.function}: Image file read successfully."
            return value, value
        if isinstance(value, list):
            value = self.without_files(value)
            made = self.plain(value)
            return dumps({"results": made}, 2), made
        if isinstance(value, dict):
            made = self.plain(value)
            return dumps(made, 2), made
        return clean(safe_str(value)), self.plain(value)

    def without_files(self, items):
        rest = []
        for item in items:
            if isinstance(item, str) and item.startswith("data:"):
                kind = "image" if item.startswith("data:image/") else "file"
                self.files.append({"type": kind, "url": clean(str.__str__(item))})
            else:
                rest.append(item)
        return rest

    @staticmethod
    def inline(response):
        disposition = safe_str(response.headers.get("content-disposition", ""))
        html = "HTMLResponse" in (base.__name__ for base in type(response).__mro__)
        return html and "inline" in disposition.lower()

    def response(self, response):
        body = response.body
        body = clean(bytes(body).decode("utf-8", "replace"))
        if not self.inline(response):
            return body, body
        self.embeds.append(body)
        status = response.status_code if isinstance(response.status_code, int) else 200
        if status < 400:
            said = {
                "status": "success",
                "code": "ui_component",
                "message": f"{self.function}: Embedded UI result is active and visible to the user.",
            }
        else:
            said = {
                "status": "error",
                "code": "ui_component",
                "message": f"{self.function}: the embedded UI result answered {status}.",
            }
        return dumps(said, 2), said


def is_response(value):
    """A fastapi or starlette response, the real one or ours."""
    return (
        "Response" in (base.__name__ for base in type(value).__mro__)
        and isinstance(getattr(value, "body", None), (bytes, memoryview))
        and hasattr(value, "headers")
        and hasattr(value, "status_code")
    )


# ---------------------------------------------------------------- errors


def error_line(kind, error, file):
    """An exception of the tool's, as a line."""
    if isinstance(error, Refusal):
        return error.line
    line = {
        "kind": kind,
        "type": type(error).__name__,
        "message": cut(clean(safe_str(error)), 16 << 10)[0],
        "traceback": cut(clean(trace(error, file)), 16 << 10)[0],
    }
    if isinstance(error, SystemExit):
        line["kind"] = "exit"
    elif isinstance(error, ModuleNotFoundError) and isinstance(error.name, str):
        line.update(kind="missing_module", module=clean(error.name))
    return line


def trace(error, file):
    """Where it was raised, from the tool's first frame on. Lines of the
    tool's source are not shown: who may call it may not read it."""
    try:
        import traceback

        at = error.__traceback__
        while at is not None and at.tb_frame.f_code.co_filename != file:
            at = at.tb_next
        lines = traceback.StackSummary.extract(traceback.walk_tb(at), limit=-20, lookup_lines=False).format()
        return "".join(lines).rstrip("\n") if at is not None else ""
    except BaseException:
        return ""


# ---------------------------------------------------------------- operations


def opened(request):
    """The loaded tool, or an error that says what is wrong with it."""
    content = request["content"]
    tool = Tool(request.get("id") or "", rewrite_imports(content), frontmatter(content))
    try:
        tool.load()
    except BaseException as error:
        raise Failed("load", error, tool) from None
    return tool


class Failed(BaseException):
    """Stranger's code raised; where that happened and in which tool."""

    def __init__(self, kind, error, tool):
        super().__init__()
        self.line = error_line(kind, error, tool.file)


def describe(request, out):
    manifest = frontmatter(request["content"])
    try:
        need_pydantic()
        tool = opened(request)
        try:
            return described(tool, request)
        except BaseException as error:
            raise Failed("load", error, tool) from None
    except (Failed, Refusal) as error:
        error.line["manifest"] = manifest
        raise


def lacks(request, out):
    """What is missing and for which interpreter; nothing of the tool is loaded."""
    import sysconfig

    found = missing(requirements(frontmatter(request["content"])))
    return {
        "missing": [{"name": name, "text": text} for name, text in found],
        "interpreter": " ".join(
            [sys.implementation.name, sys.version.split()[0], safe_str(sysconfig.get_config_var("SOABI")), sysconfig.get_platform()]
        ),
    }


def described(tool, request):
    if isinstance(request.get("valves"), dict):
        tool.set_valves(request["valves"])
    specs, live = specs_of(tool)
    valves, user_valves = tool.valves_class("Valves"), tool.valves_class("UserValves")
    user = request.get("user") or {}
    return {
        "specs": specs,
        "live_descriptions": live,
        "manifest": tool.manifest,
        "requirements": requirements(tool.manifest),
        "valves_schema": valves and valves_schema(valves, user),
        "user_valves_schema": user_valves and valves_schema(user_valves, user),
        "has_user_valves": user_valves is not None,
        "flags": {
            "citation": bool(getattr(tool.instance, "citation", False)),
            "file_handler": bool(getattr(tool.instance, "file_handler", False)),
            "valves": hasattr(tool.instance, "valves"),
        },
        "content": tool.content,
    }


WHICH = {"valves": "Valves", "user_valves": "UserValves"}


def validate_valves(request, out):
    need_pydantic()
    which = WHICH.get(request.get("which"))
    values = request.get("values")
    if which is None or not isinstance(values, dict):
        raise Refusal("request", "The request names no valves.")
    tool = opened(request)
    try:
        model = tool.valves_class(which)
        if model is None:
            raise Refusal("no_valves", f"The tool has no {which} class.")
        values = {k: v for k, v in values.items() if v is not None}
        return {"values": values_of(model, make_valves(model, values))}
    except BaseException as error:
        raise Failed("valves", error, tool) from None


def call(request, out):
    need_pydantic()
    given = parse_arguments(request.get("arguments"))
    tool = opened(request)
    try:
        tool.set_valves(request.get("valves") or {})
    except BaseException as error:
        raise Failed("valves", unfit("The tool's", error), tool) from None
    try:
        name = request.get("function")
        function = tool.function(name if isinstance(name, str) else "")
        kwargs = arguments_for(function, given, reserved_arguments(tool, request, out))
    except BaseException as error:
        raise Failed("load", error, tool) from None
    kind = "exception" if fits(function, kwargs) else "arguments"
    try:
        value, was_cut = invoke(function, kwargs, out.text, wants_loop(function, tool.content))
        result = Result(clean(name), out.text // 4)
        result.cut = was_cut
        return result.line(value, out)
    except BaseException as error:
        raise Failed(kind, error, tool) from None


OPERATIONS = {"lacks": lacks, "describe": describe, "validate_valves": validate_valves, "call": call}


def run(raw, out):
    """Carries out one request and writes its lines. True: it went well.
    Nothing of it stays in this module, so that a process may be forked for
    each request; every forked one must end when this returns."""
    try:
        request = read(raw)
        out.limit(request.get("limits") or {})
        for path in request.get("paths") or []:
            sys.path.append(path)
        sys.meta_path.append(Shims())
        line = {"result": OPERATIONS[request["op"]](request, out)}
    except (Failed, Refusal) as error:
        line = {"error": error.line}
    except BaseException as error:  # a tool that reaches in here is still only a tool
        line = {"error": error_line("exception", error, "")}
    try:
        out.final(line)
    except BaseException as error:
        out.done = False
        out.final({"error": error_line("exception", error, "")})
    return "result" in line


def read(raw):
    try:
        request = json.loads(raw)
    except ValueError:
        raise Refusal("request", "The request is not JSON.") from None
    if not isinstance(request, dict) or request.get("op") not in OPERATIONS or not isinstance(request.get("content"), str):
        raise Refusal("request", "The request names no known operation or has no content.")
    return request


def warm():
    """Imports what every request needs; a process to fork from does it once."""
    import asyncio  # noqa: F401
    import dataclasses  # noqa: F401
    import inspect  # noqa: F401
    import traceback  # noqa: F401
    import typing  # noqa: F401

    need_pydantic()
    import pydantic.fields

    pydantic.create_model("warm", x=(int, pydantic.Field(1, description="x"))).model_json_schema()


def take_result_fd():
    """The result's descriptor, out of the way of programs that are started."""
    for low in (HIGH_FD, 64, 10):
        try:
            high = fcntl.fcntl(RESULT_FD, fcntl.F_DUPFD_CLOEXEC, low)
            os.close(RESULT_FD)
            return high
        except ValueError:
            continue
        except OSError as error:
            if error.errno != errno.EINVAL:  # past the limit of descriptors
                raise
    raise OSError("no descriptor left")


def end(code):
    """Ends the process now: threads and exit handlers of the tool don't count."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            pass
    os._exit(code)


def main():
    fd = take_result_fd()
    with open(REQUEST_FD, "rb") as file:
        raw = file.read()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    # The tool's own __main__, without any of this.
    sys.modules["__main__"] = type(sys)("__main__")
    code = 1
    try:
        code = 0 if run(raw, Out(fd)) else 1
    finally:
        end(code)


if __name__ == "__main__":
    main()
