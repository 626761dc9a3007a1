import sys


def _run():
    name = "<python_exec>"
    with open(3, "rb") as script:
        source = script.read()

    class _Lines:
        # Tracebacks show source lines by linecache, whose import is too dear
        # to pay for in every call: it is filled when somebody imports it.
        @staticmethod
        def find_spec(module, path=None, target=None):
            if module == "linecache":
                sys.meta_path.remove(_Lines)
                import linecache

                text = source.decode("utf-8", "replace")
                linecache.cache[name] = (len(source), None, text.splitlines(True), name)
                return type(linecache.__spec__)("linecache", _Lines)
            return None

        @staticmethod
        def create_module(spec):
            return sys.modules["linecache"]

        @staticmethod
        def exec_module(module):
            pass

    sys.meta_path.insert(0, _Lines)
    main = sys.modules["__main__"].__dict__
    del main["_run"], main["sys"]
    try:
        exec(compile(source, name, "exec", dont_inherit=True), main)
    except Exception:
        kind, error, trace = sys.exc_info()
        trace = trace.tb_next
        try:
            import traceback

            if sys.excepthook is sys.__excepthook__:
                traceback.print_exception(kind, error, trace)
            else:
                sys.excepthook(kind, error, trace)
        finally:
            sys.exit(1)


_run()
