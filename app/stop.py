"""`python -m app.stop`: shut Serve down on a running cluster, once every answer under way has come to its end.

New requests are refused with 503 from the start, and /ready tells load balancers to go elsewhere. Works whatever has
started the application: `serve run`, `serve deploy`, KubeRay or `python -m app.serve`. Run it on a node of the cluster.
Ctrl-C takes it back: the application serves on.

exit status: 0 all answers ended, 1 some were cut at the time limit, 3 there is nothing to stop, 130 interrupted
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

log = logging.getLogger("sightline.serve")

EXIT_CUT = 1
EXIT_NOT_RUNNING = 3
EXIT_INTERRUPTED = 130
TOKEN = Path.home() / ".ray" / "auth_token"
DRAIN_TIMEOUT_S = 660.0
"""Above `server.request_timeout_s`, after which a request ends in any case."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m app.stop", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--address", help="of the Ray cluster, HOST:PORT (default: RAY_ADDRESS, or the one running here)"
    )
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=DRAIN_TIMEOUT_S,
        help="cut what is still under way after so many seconds; 0: at once (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    if not args.timeout_s >= 0:
        parser.error(f"--timeout-s is {args.timeout_s:g}; allowed: 0 or more")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return stop(args.address or os.environ.get("RAY_ADDRESS") or "auto", args.timeout_s)


def stop(address: str, timeout_s: float) -> int:
    """Shut Serve down on the cluster at `address`; the exit status."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if TOKEN.exists():
        # A local cluster asks for the token that it has saved there, and Ray sends none unless told to. One that asks
        # for none does not mind.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray
    from ray import serve

    from app.shutdown import ServeShutdown

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        ray.init(address=address, namespace="serve", log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, TimeoutError, ValueError, RuntimeError) as exc:
        log.error("no Ray cluster answers at %s: %s", address, exc)
        return EXIT_NOT_RUNNING
    try:
        status = serve.status()
        if not (status.proxies or status.applications):
            log.error("Serve does not run on the cluster at %s", address)
            return EXIT_NOT_RUNNING
        shutdown = ServeShutdown()
        try:
            left = shutdown.run(timeout_s)
        except KeyboardInterrupt:
            shutdown.resume()
            log.error("interrupted: the application takes requests again")
            return EXIT_INTERRUPTED
        if left.is_over:
            log.info("stopped; every answer has come to its end")
            return 0
        log.error("stopped after %g s; cut: %s", timeout_s, left)
        return EXIT_CUT
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
