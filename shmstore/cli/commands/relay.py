"""`shmstore relay`: fetches objects of other hosts into the store of this one, for its workers."""

import argparse
import logging
import signal
from contextlib import ExitStack
from dataclasses import asdict

from shmstore.cli.command import EXIT_OK, EXIT_USAGE, Command, parse_size, positive_argument
from shmstore.cli.commands.common import (
    NO_TIER,
    TIER_VARIABLE,
    add_dir,
    add_json,
    complain,
    print_json,
    store_argument,
    tier_url,
)
from shmstore.errors import TierError, WriterActiveError
from shmstore.store import ObjectStoreWriter

_MORE = """\
A worker that gets a reference of another host's store asks the relay of its own host at the path of the socket, which
it has as `relay` of its cache or in SHMSTORE_RELAY. The relay fetches the object once, and all workers of the host read
it in place.

The store needs an arena for it: relay=True in the configuration of the API servers, or an n_writers that is one higher.
On a host that has only workers, --create makes the store, or takes over what another relay has left."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = f"{COMMAND.summary}\n\n{_MORE}"
    parser.add_argument("--tier", metavar="URL", help=f"such as redis://host:6379 (default: {TIER_VARIABLE})")
    parser.add_argument(
        "--namespace", metavar="NAME", required=True, help="tier_namespace of the hosts that publish, or finds nothing"
    )
    parser.add_argument("--store", metavar="NAME", type=store_argument, required=True, help="the store of this host")
    parser.add_argument(
        "--socket", metavar="PATH", help="where to listen (default: a name made of NAME in $XDG_RUNTIME_DIR or /tmp)"
    )
    create = parser.add_argument_group("for a host that has only workers")
    create.add_argument("--create", action="store_true", help="make the store; needs the next two")
    create.add_argument("--capacity", type=parse_size, metavar="SIZE", help="its size, such as 4G")
    create.add_argument("--n-readers", type=positive_argument, metavar="N", help="the number of workers")
    create.add_argument("--max-objects", type=positive_argument, metavar="N", help="the number of objects at a time")
    create.add_argument(
        "--prefault", action="store_true", help="touch its memory now, so that no fetch is slowed by it"
    )
    add_dir(parser)
    add_json(parser)


def _run(arguments: argparse.Namespace) -> int:
    from shmstore.tiers import StoreTier
    from shmstore.tiers.relay import Relay
    from shmstore.tiers.relay_client import checked_path, relay_path
    from shmstore.tiers.urls import open_tier

    needed, given = (arguments.capacity, arguments.n_readers), (arguments.max_objects, arguments.prefault)
    if (None in needed) if arguments.create else (*needed, *given) != (None, None, None, False):
        return complain("relay", "--create needs --capacity and --n-readers, which are for it alone", EXIT_USAGE)
    url = tier_url(arguments.tier)
    if url is None:
        return complain("relay", NO_TIER, EXIT_USAGE)
    path = relay_path(arguments.store) if arguments.socket is None else checked_path(arguments.socket)
    logging.basicConfig(format="%(asctime)s shmstore relay: %(levelname)s: %(message)s")  # to stderr, from warnings on
    with ExitStack() as stack:
        back_end = open_tier(url)
        stack.callback(back_end.close)
        relay = Relay(path)  # before a store is made, which would stay if this fails
        stack.callback(relay.close)
        writer = _open(arguments)
        stack.callback(writer.close)
        tier = StoreTier(writer, back_end, namespace=arguments.namespace)
        stack.callback(tier.close)
        try:
            back_end.has(["shmstore:probe"])
        except TierError as error:
            logging.warning("the tier does not answer yet: %s", error)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: relay.stop())
        if arguments.json:
            print_json({"ok": True, "socket": path, "handle": asdict(writer.handle)})
        else:
            print(f"shmstore relay: listens at {path} for the workers of store {arguments.store}", flush=True)
        relay.serve(writer, tier)
    return EXIT_OK


def _open(arguments: argparse.Namespace) -> ObjectStoreWriter:
    try:
        if not arguments.create:
            return ObjectStoreWriter.join(arguments.store, dir=arguments.dir)
        return ObjectStoreWriter.open(
            arguments.store,
            capacity=arguments.capacity,
            n_readers=arguments.n_readers,
            max_objects=arguments.max_objects,
            prefault=arguments.prefault,
            dir=arguments.dir,
        )
    except WriterActiveError as error:
        more = (
            "the relay needs an arena of its own: set relay=True in the configuration of all API servers, or create "
            "the store with an n_writers that is one higher; if another relay of this store runs, end it"
        )
        if arguments.create:
            more = "a store that --create makes has one writer: end the other relay, or pass another --store"
        raise WriterActiveError(error.message, hint=more) from None


COMMAND = Command(
    name="relay",
    summary="fetch objects of other hosts into the store of this host, for its workers",
    example="shmstore relay --tier redis://cache.internal:6379 --namespace qwen2-vl/1 --store engine",
    add_arguments=_add_arguments,
    run=_run,
)
