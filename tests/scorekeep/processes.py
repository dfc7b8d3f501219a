"""Small children for the supervisor's tests, and how to see that a process is gone."""

import sys
import time
from collections.abc import Callable

import psutil

PYTHON = (sys.executable, "-c")

#: Says "up" on standard output, then waits; ends with status 0 on SIGTERM.
PATIENT = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("up", flush=True)
time.sleep(60)
"""

#: Like PATIENT, and does not care about SIGTERM.
STUBBORN = PATIENT.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")

#: An API that is ready at once. Its model is ready, or whatever SCOREKEEP_LOG_FORMAT smuggles in.
READY = """
import http.server, json, os, sys, signal
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        state = os.environ.get("TEST_MODEL_STATE", "ready")
        body = {"ready": state == "ready", "models": {"sentiment": state, "judge": "loading"},
                "reasons": [{"part": "model sentiment", "code": "c", "detail": "no such folder"}]}
        if state == "failed":
            del body["models"]["judge"]
        data = json.dumps(body).encode()
        self.send_response(200 if body["ready"] else 503)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *_): pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
http.server.HTTPServer(("127.0.0.1", int(os.environ["SCOREKEEP_PORT"])), Handler).serve_forever()
"""


def is_gone(pid: int) -> bool:
    """Say whether the process has ended; one that nobody has reaped has ended too."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 8.0) -> None:
    """Return when the condition holds; fail the test if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
