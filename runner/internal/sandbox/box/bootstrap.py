def _run():
    import sys

    name = "<python_exec>"
    with open(3, "rb") as script:
        source = script.read()

    def fill(lines):
        text = source.decode("utf-8", "replace")
        lines.cache[name] = (len(source), None, text.splitlines(True), name)

    class _Lines:
        # Tracebacks show source lines by linecache, whose import is too dear
        # to pay for in every call: it is filled when somebody imports it.
        @staticmethod
        def find_spec(module, path=None, target=None):
            if module != "linecache":
                return None
            sys.meta_path.remove(_Lines)
            from importlib.util import find_spec

            spec = find_spec(module)
            load = spec.loader.exec_module

            def exec_module(loaded):
                load(loaded)
                fill(loaded)

            spec.loader.exec_module = exec_module
            return spec

    if "linecache" in sys.modules:  # since Python 3.13
        fill(sys.modules["linecache"])
    else:
        sys.meta_path.insert(0, _Lines)
    main = sys.modules["__main__"].__dict__
    del main["_run"]
    try:
        exec(compile(source, name, "exec", dont_inherit=True), main)
    except Exception:
        kind, error, trace = sys.exc_info()
        trace = trace.tb_next
        if sys.excepthook is sys.__excepthook__:
            import traceback

            traceback.print_exception(kind, error, trace)
        else:
            sys.excepthook(kind, error, trace)
        sys.exit(1)


_run()
