"""A pod for launcher tests: a few lines of HTTP, with faults on demand. Run as a script."""

import argparse
import http.server
import os
import signal
import subprocess
import sys
import threading
import time

from kvferry_service.exits import exit_status
from kvferry_service.parent import die_with_parent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parent-fd", type=int)
    parser.add_argument("--exit-code", type=int, help="end at once with this status")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--child", action="store_true", help="start a child that outlives this process")
    parser.add_argument("--stop-log", help="append the name here when asked to stop")
    parser.add_argument("--name", default="pod")
    args = parser.parse_args()
    print(f"hello from {args.name}", flush=True)
    if args.exit_code is not None:
        print(f"broken {args.name}", file=sys.stderr, flush=True)
        sys.exit(args.exit_code)
    die_with_parent(args.parent_fd, lambda: os._exit(0), grace_s=1.0, death_signal=None)
    if args.child:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"ready": true}'
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
    except OSError as error:
        print(f"port {args.port}: {error.strerror}", file=sys.stderr, flush=True)
        sys.exit(exit_status(error))

    def stop(*_: object) -> None:
        if args.stop_log:
            with open(args.stop_log, "a") as file:
                file.write(f"{args.name}\n")
        if not args.ignore_term:
            threading.Thread(target=server.shutdown, daemon=True).start()

    signal.signal(signal.SIGTERM, stop)
    server.serve_forever(0.05)
    time.sleep(0.05)


if __name__ == "__main__":
    main()
